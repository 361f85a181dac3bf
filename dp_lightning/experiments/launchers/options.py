"""The options of a launcher, as the command line gives them."""

import sys
from collections.abc import Mapping
from typing import Any

from dp_lightning.errors import ConfigurationError


def known_options(launcher: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with what was given in their place.

    Raises:
        ConfigurationError: for an option that the launcher does not have.
    """
    for name in given:
        if name not in defaults:
            raise ConfigurationError(
                f"--launcher {launcher} has no option {name}; it has {', '.join(sorted(defaults))}."
            )
    return {**defaults, **given}


def missing_extra(launcher: str, package: str) -> ConfigurationError:
    """The error of a launcher whose package is not installed."""
    return ConfigurationError(f"--launcher {launcher} needs {package}: pip install 'dp-lightning[{launcher}]'")


def failed(folder: str, error: BaseException | None) -> int:
    """The status of a run around which the machinery has failed; says why."""
    print(f"{folder}: {error}", file=sys.stderr, flush=True)
    return -1
