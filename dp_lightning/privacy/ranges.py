"""The ranges of a run's public numbers; each function names the setting that is outside."""

import math

from dp_lightning.errors import ConfigurationError


def check_delta(delta: float) -> None:
    """Raise ConfigurationError unless `delta` is a number in (0, 1)."""
    if not is_number(delta) or not 0 < delta < 1:
        raise ConfigurationError(f"delta must be a number between 0 and 1; got {delta!r}.")


def check_count(name: str, value: int) -> None:
    """Raise ConfigurationError unless `value` is an integer from 1 to 2**53."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**53:
        raise ConfigurationError(f"{name} must be an integer of at least 1; got {value!r}.")


def check_noise_multiplier(value: float) -> None:
    """Raise ConfigurationError unless `value` is a finite number of at least 0."""
    if not is_number(value) or not 0 <= value < math.inf:
        raise ConfigurationError(f"noise_multiplier must be a finite number of at least 0; got {value!r}.")


def check_step_settings(
    *, examples: str, max_physical_batch_size: int, augmult: int, images_per_group: int | None = None
) -> None:
    """Refuse values outside of their ranges.

    Raises:
        ConfigurationError: naming the setting.
    """
    if examples not in ("together", "one_by_one"):
        raise ConfigurationError(f"privacy.examples is {examples!r}; choose 'together' or 'one_by_one'.")
    counts = {"augmult": augmult, "images_per_group": 1 if images_per_group is None else images_per_group}
    for name, count in counts.items():
        if count < 1:
            raise ConfigurationError(f"privacy.{name} is {count}; it must be at least 1.")
    if max_physical_batch_size < (rows := math.prod(counts.values())):
        names = " times ".join(f"privacy.{name}" for name, count in counts.items() if count > 1)
        raise ConfigurationError(
            f"privacy.max_physical_batch_size is {max_physical_batch_size}; it must be at least {rows}"
            + (f", {names}: all rows of an example go through the model at once." if names else ".")
        )


def is_number(value: object) -> bool:
    """Whether a value is a number, and neither a truth value nor NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
