"""`dpl account`: price a run before it starts, or add up what several runs on the same data have spent.

With q = B/N, epsilon(sigma, q, T, delta) decreases in sigma and increases in T and B. Given three of epsilon, noise,
steps and batch size, the command solves for the smallest noise multiplier, the largest number of steps or the largest
expected batch size within epsilon, or for epsilon itself. E epochs are T = ceil(E max(1, round(N / B))) steps.
"""

import argparse
import json
from bisect import bisect_left
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from dp_lightning.errors import ConfigurationError

if TYPE_CHECKING:
    from dp_lightning.privacy.plan import PrivacyPlan

_MOST = 2**30  # steps


def main(arguments: list[str]) -> None:
    """Print the total of the runs that are given; without one, solve for the missing quantity and print the plan."""
    options = _parser().parse_args(arguments[1:])
    if options.runs:
        from dp_lightning.commands.total import total_epsilon

        total = total_epsilon(options.runs, options.delta)
        print(json.dumps(total.to_dict()) if options.json else total.text())
        return
    if None in (options.num_train, options.delta):
        raise ConfigurationError("Give --num-train and --delta, or folders of runs to add up.")
    from dp_lightning.privacy.choice import epsilon_of_choice
    from dp_lightning.privacy.plan import error_of_noise
    from dp_lightning.privacy.statement import plain

    plan = _solve(options)
    epsilons = plan.epsilons()
    if options.json:
        names = ("noise_multiplier", "sample_rate", "num_steps", "delta", "expected_batch_size", "num_train", "bands")
        print(json.dumps(plain({**{name: getattr(plan, name) for name in names}, "epsilon": epsilons})))
        return
    rows = [
        ("noise multiplier", f"{plan.noise_multiplier:.4f}"),
        ("sample rate", f"{plan.sample_rate:.6g} ({plan.expected_batch_size} of {plan.num_train})"),
        ("steps", f"{plan.num_steps} ({plan.epochs:.4g} epochs)"),
        ("delta", f"{plan.delta:g}"),
    ]
    for name, value in epsilons.items():
        shown = "not installed (pip install 'dp-lightning[pld]')" if value is None else f"{value:.4f}"
        rows.append((f"epsilon, {name.upper()}", shown))
    if plan.bands > 1:
        share = error_of_noise(plan, options.epsilon or plan.epsilon("rdp"))
        rows.append(("bands", f"{plan.bands} (the noise leaves {share:.3f} of the error of independent noise)"))
    if options.expected_runs is not None:
        rounds, mean = plan.rounds(plan.noise_multiplier), options.expected_runs
        for number in ("logarithmic", "poisson"):
            price = epsilon_of_choice([rounds], expected_runs=mean, delta=plan.delta, distribution=number)
            rows.append(("best of several", f"epsilon {price:.4f}, of {mean:g} runs on average, {number}"))
    print("\n".join(f"{name:<18}{value}" for name, value in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl account",
        allow_abbrev=False,
        description="Give exactly three of: epsilon, noise multiplier, steps or epochs, batch size. "
        "The fourth is solved for. Or give the folders of runs on the same data: it adds up what they have spent.",
    )
    add = parser.add_argument
    add("runs", nargs="*", type=Path, metavar="RUN", help="folder of a run; every run below it counts")
    add("--epsilon", "--target-epsilon", "--target_epsilon", type=float, help="the privacy budget")
    add("--noise-multiplier", "--noise_multiplier", type=float, help="noise standard deviation over sensitivity")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--steps", "--num-steps", "--num_steps", type=int, help="logical optimizer steps")
    length.add_argument("--epochs", type=Fraction, help="steps as epochs, of round(num_train / batch_size) each")
    sizes = ("--batch-size", "--batch_size", "--expected-batch-size", "--expected_batch_size")
    add(*sizes, type=int, help="expected batch size over all devices, in the unit of --num-train")
    counted = "number of training examples, or of persons (unit_of_privacy: group)"
    add("--num-train", "--num_train", type=int, help=counted)
    add("--delta", type=float, help="below 1/num_train; of runs, default: the smallest delta of theirs")
    add("--bands", default="1", help="over how many steps noise is correlated, or auto (default: 1, independent noise)")
    several = "also price the best of so many runs on average (dpl sweep --release-best)"
    add("--expected-runs", "--expected_runs", type=float, metavar="M", help=several)
    add("--accountant", choices=("prv", "rdp", "pld"), default="prv", help="accountant to solve with (default: prv)")
    add("--json", action="store_true", help="print one JSON object")
    return parser


def _solve(options: argparse.Namespace) -> "PrivacyPlan":
    """The plan whose missing quantity is solved for."""
    from dp_lightning.privacy.plan import RunShape, best_bands

    given = {
        "--epsilon": options.epsilon,
        "--noise-multiplier": options.noise_multiplier,
        "--steps or --epochs": options.steps if options.steps is not None else options.epochs,
        "--batch-size": options.batch_size,
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) != 1:
        present = ", ".join(name for name in given if name not in missing) or "none"
        raise ConfigurationError(
            f"give exactly three of {', '.join(given)}; the fourth is solved for. Given: {present}."
        )
    if not options.bands.isdecimal() and (options.bands != "auto" or options.epsilon is None):
        raise ConfigurationError(f"--bands is {options.bands}; give a number, or auto together with --epsilon.")
    numbers = {
        "expected_batch_size": options.batch_size,
        "max_steps": -1 if options.steps is None else options.steps,
        "max_epochs": options.epochs,
    }

    def plan(**changed: int) -> "PrivacyPlan":
        shape = RunShape.of_length(num_train=options.num_train, delta=options.delta, **{**numbers, **changed})
        bands = best_bands(shape, options.epsilon) if options.bands == "auto" else int(options.bands)
        shape = replace(shape, bands=bands)
        if options.noise_multiplier is None:
            return shape.calibrate(options.epsilon, accountant=options.accountant)
        return shape.with_noise(options.noise_multiplier, accountant=options.accountant, target_epsilon=options.epsilon)

    def exceeds(name: str, value: int) -> bool:
        candidate = plan(**{name: value})
        # The Renyi bound is cheap and never below the others, so candidates well within epsilon need no other.
        return candidate.epsilon("rdp") > options.epsilon and candidate.epsilon() > options.epsilon

    searched = {"--batch-size": ("expected_batch_size", options.num_train), "--steps or --epochs": ("max_steps", _MOST)}
    if missing[0] in searched:
        name, most = searched[missing[0]]
        if exceeds(name, 1):
            raise ConfigurationError(
                f"{missing[0]}: 1 already spends more than epsilon = {options.epsilon:g}. Raise --noise-multiplier."
            )
        # A number that fits and whose successor does not: the largest one, but where larger batches of a number of
        # epochs take fewer steps, by rounding, a somewhat larger batch may fit too.
        numbers[name] = bisect_left(range(2, most + 1), True, key=lambda value: exceeds(name, value)) + 1
    return plan()
