"""`dpl account`: given three of epsilon, noise, steps and batch size, solve for the fourth.

With q = B/N, epsilon(sigma, q, T, delta) decreases in sigma and increases in T and B. The command therefore
solves for the smallest noise multiplier, the largest number of steps or the largest expected batch size
within epsilon, or for epsilon itself. E epochs are T = E max(1, round(N / B)) steps, as in a fit.
"""

import argparse
import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

from dp_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from dp_lightning.privacy.plan import PrivacyPlan

_MOST_STEPS = 2**30


def main(arguments: list[str]) -> None:
    """Solve for the missing quantity and print it."""
    options = _parser().parse_args(arguments[1:])
    plan = _solve(options)
    epsilons = plan.epsilons()
    print(json.dumps(_as_dict(plan, epsilons)) if options.json else _table(plan, epsilons))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl account",
        allow_abbrev=False,
        description="Give exactly three of: epsilon, noise multiplier, steps or epochs, batch size. "
        "The fourth is solved for.",
    )
    add = parser.add_argument
    add("--epsilon", "--target-epsilon", "--target_epsilon", type=float, help="the privacy budget")
    add("--noise-multiplier", "--noise_multiplier", type=float, help="noise standard deviation over sensitivity")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", "--num-steps", "--num_steps", type=int, help="logical optimizer steps")
    length.add_argument("--epochs", type=int, help="steps as epochs, of round(num_train / batch_size) each")
    sizes = ("--batch-size", "--batch_size", "--expected-batch-size", "--expected_batch_size")
    add(*sizes, type=int, help="expected batch size over all devices, in the unit of --num-train")
    add(
        "--num-train",
        "--num_train",
        type=int,
        required=True,
        help="number of training examples, or of persons (unit_of_privacy: group)",
    )
    add("--delta", type=float, required=True, help="below 1/num_train")
    add("--accountant", choices=("prv", "rdp", "pld"), default="prv", help="accountant to solve with (default: prv)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _solve(options: argparse.Namespace) -> "PrivacyPlan":
    missing = _missing(options)
    if missing in ("--noise-multiplier", "--epsilon"):
        return _plan(options, batch_size=options.batch_size)

    def fits(steps: int, batch_size: int) -> bool:
        candidate = _plan(options, steps=steps, batch_size=batch_size)
        # The Renyi bound is cheap and never below the others, so candidates well within epsilon need no other.
        return candidate.epsilon("rdp") <= options.epsilon or candidate.epsilon() <= options.epsilon

    if missing == "--steps or --epochs":
        steps = _largest(lambda steps: fits(steps, options.batch_size), 1, _MOST_STEPS)
        if steps is None:
            raise ConfigurationError(f"one step already spends more than epsilon = {options.epsilon:g}.")
        return _plan(options, steps=steps, batch_size=options.batch_size)
    if options.steps is not None:
        batch_size = _largest(lambda size: fits(options.steps, size), 1, options.num_train)
    else:
        batch_size = _largest_batch_of_epochs(fits, options.epochs, options.num_train)
    if batch_size is None:
        raise ConfigurationError(f"no batch size stays within epsilon = {options.epsilon:g}: raise --noise-multiplier.")
    return _plan(options, batch_size=batch_size)


def _missing(options: argparse.Namespace) -> str:
    """The one of the four options that is not given; checks the others."""
    from dp_lightning.privacy.ranges import check_count

    given = {
        "--epsilon": options.epsilon,
        "--noise-multiplier": options.noise_multiplier,
        "--steps or --epochs": options.steps if options.steps is not None else options.epochs,
        "--batch-size": options.batch_size,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        present = [name for name in given if name not in missing]
        raise ConfigurationError(
            f"give exactly three of {', '.join(given)}; the fourth is solved for. "
            f"Given: {', '.join(present) or 'none'}."
        )
    for name in ("num_train", "steps", "epochs", "batch_size"):
        if getattr(options, name) is not None:
            check_count(name, getattr(options, name))
    return missing[0]


def _plan(options: argparse.Namespace, *, batch_size: int, steps: int | None = None) -> "PrivacyPlan":
    """The plan for these options; ``steps`` defaults to their steps or epochs."""
    from dp_lightning.privacy.plan import RunShape

    steps = options.steps if steps is None else steps
    shape = RunShape.of_length(
        num_train=options.num_train,
        expected_batch_size=batch_size,
        delta=options.delta,
        max_epochs=options.epochs if steps is None else None,
        max_steps=-1 if steps is None else steps,
    )
    if options.noise_multiplier is None:
        return shape.calibrate(options.epsilon, accountant=options.accountant)
    return shape.with_noise(options.noise_multiplier, accountant=options.accountant, target_epsilon=options.epsilon)


def _largest(fits: Callable[[int], bool], low: int, high: int) -> int | None:
    """The largest integer in [low, high] that fits, if all smaller ones do; None if ``low`` does not."""
    if not fits(low):
        return None
    step = 1
    while low + step <= high and fits(low + step):
        low, step = low + step, 2 * step
    beyond = range(low + 1, min(high, low + step - 1) + 1)
    return low + bisect_left(beyond, True, key=lambda value: not fits(value))


def _largest_batch_of_epochs(fits: Callable[[int, int], bool], epochs: int, num_train: int) -> int | None:
    """The largest B <= num_train that fits with the steps of so many epochs.

    The steps of an epoch become fewer as B grows, so epsilon increases in B only as long as their number stays the
    same. The search finds the last such stretch whose first B fits, then the largest B in it.
    """
    from dp_lightning.privacy.plan import steps_of_epoch

    sizes = range(1, num_train + 1)

    def fewer(batch_size: int) -> int:
        return -steps_of_epoch(num_train, batch_size)

    def first_of_stretch(batch_size: int) -> int:
        return sizes[bisect_left(sizes, fewer(batch_size), key=fewer)]

    def first_fits(batch_size: int) -> bool:
        return fits(-epochs * fewer(batch_size), first_of_stretch(batch_size))

    inside = _largest(first_fits, 1, num_train)
    if inside is None:
        return None
    last = sizes[bisect_right(sizes, fewer(inside), key=fewer) - 1]
    return _largest(lambda size: fits(-epochs * fewer(inside), size), first_of_stretch(inside), last)


def _as_dict(plan: "PrivacyPlan", epsilons: dict[str, float | None]) -> dict[str, object]:
    return {
        "noise_multiplier": plan.noise_multiplier,
        "sample_rate": plan.sample_rate,
        "num_steps": plan.num_steps,
        "delta": plan.delta,
        "epsilon": {name: "inf" if value == float("inf") else value for name, value in epsilons.items()},
        "expected_batch_size": plan.expected_batch_size,
        "num_train": plan.num_train,
    }


def _table(plan: "PrivacyPlan", epsilons: dict[str, float | None]) -> str:
    rows = [
        ("noise multiplier", f"{plan.noise_multiplier:.4f}"),
        ("sample rate", f"{plan.sample_rate:.6g} ({plan.expected_batch_size} of {plan.num_train})"),
        ("steps", f"{plan.num_steps} ({plan.num_steps * plan.sample_rate:.4g} epochs)"),
        ("delta", f"{plan.delta:g}"),
    ]
    for name, value in epsilons.items():
        shown = "not installed (pip install 'dp-lightning[pld]')" if value is None else f"{value:.4f}"
        rows.append((f"epsilon, {name.upper()}", shown))
    return "\n".join(f"{name:<18}{value}" for name, value in rows)
