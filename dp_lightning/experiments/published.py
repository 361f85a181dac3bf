"""The paper's numbers, which are shown beside those of the runs."""

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
