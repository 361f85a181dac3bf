"""Errors that a user can act on: each message names the setting and the fix.

The command line prints only their message and exits with 2; everything else is a defect and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class DpLightningError(Exception):
    """Base of every error that a user can act on."""


class ConfigurationError(DpLightningError, ValueError):
    """A setting, or a combination of settings, that would break or blur the guarantee."""


class DataError(DpLightningError, ValueError):
    """Data that is missing or malformed; the message names the file."""


class ModelError(DpLightningError, ValueError):
    """A module whose gradient cannot be shown to be a sum of per-example gradients."""


class BudgetError(DpLightningError, RuntimeError):
    """A step that would spend more than the run's privacy budget."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the known name most like ``name``, with a space before it; empty if none is like it."""
    by_lower_case = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f" Did you mean {by_lower_case[near[0]]}?" if near else ""
