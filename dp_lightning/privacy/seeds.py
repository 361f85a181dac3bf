"""What noise and sampling have in common where a run that goes on has a fixed seed."""

from dp_lightning.errors import ConfigurationError


def require_same_seed(setting: str, given: int | None, saved: int | None) -> None:
    """Refuse another seed than the checkpoint's.

    Raises:
        ConfigurationError: naming the setting.
    """
    if given != saved:
        raise ConfigurationError(
            f"privacy.{setting} is {given}, the checkpoint was made with {saved}. Set it to the checkpoint's value."
        )
