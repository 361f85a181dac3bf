"""Errors that a user can act on: each message names the setting and the fix.

The command line prints only their message and exits with 2; everything else is a defect and keeps its traceback.
"""


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
