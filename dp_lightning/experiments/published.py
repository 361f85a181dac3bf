"""The paper's numbers, beside which those of a run are shown."""

import functools
from importlib.resources import files
from typing import Any

import yaml


@functools.cache
def published() -> dict[str, Any]:
    """The tables of Shanmugam et al. 2026 as ``published.yaml`` holds them."""
    text = files("dp_lightning.experiments").joinpath("published.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.safe_load(text)
    return tables
