"""Private training on scattering coefficients, which need no other data: accuracy and time by epsilon.

``linear`` trains one layer on them, and ``network`` a network of two convolutions. No rate is tuned on these runs: it
follows from B, T and sigma by the rule of `rate`. A run that is finished is not repeated.

    python benchmarks/scattering.py --data cifar10.npz --out runs/scattering
"""

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parent))

import tuned_runs

from dp_lightning.privacy.plan import PrivacyPlan, RunShape

MOMENTUM = 0.9


class Trained(NamedTuple):
    """What is trained on the coefficients, and how."""

    model: dict[str, Any]
    angles: int
    batch_size: int
    epochs: int
    noise: float
    """The standard deviation of the noise in a weight at the end. On features of length 1 it is that of a logit."""
    highest: float
    """The rate above which steps go too far, whatever the noise is."""


TRAINED = {
    "linear": Trained({"class_path": "LinearProbeModule", "init_args": {"normalize": "unit"}}, 8, 8192, 40, 0.9, 30.0),
    "network": Trained({"class_path": "SmallCNNModule", "init_args": {"channels": 32}}, 4, 4096, 20, 0.07, 4.0),
}


def rate(plan: PrivacyPlan, noise: float, highest: float) -> float:
    """The learning rate of SGD at which the noise of all steps adds up to ``noise`` for each weight, or ``highest``.

    A step of rate r with momentum m moves a weight in the end by the rate r / (1 - m) times the noise sigma C / B. Over
    T steps of a cosine schedule, whose squares have the mean 3/8, the moves have the standard deviation
    r / (1 - m) sigma C / B sqrt(3 T / 8).
    """
    of_rate_1 = plan.noise_multiplier / plan.expected_batch_size * math.sqrt(3 / 8 * plan.num_steps) / (1 - MOMENTUM)
    return min(float(f"{noise / of_rate_1:.2g}"), highest)


def cell(name: str, epsilon: float, options: argparse.Namespace) -> tuned_runs.Cell:
    """What is trained at an epsilon."""
    trained = TRAINED[name]

    def configuration(lr: float, seed: int, folder: Path) -> Any:
        config = tuned_runs.base(options, seed=seed, rate=lr, batch_size=trained.batch_size, folder=folder)
        cache = {"images": config["data"], "backbone": "scattering", "cache": str((options.out / "features").resolve())}
        cache["backbone_kwargs"] = {"angles": trained.angles, "mirror": True}
        config |= {"model": trained.model, "data": {"class_path": "CachedFeatures", "init_args": cache}}
        # The plan's accountant, so that the table's sigma and the rate are those of the run.
        config["privacy"] |= {"target_epsilon": epsilon, "accountant": "prv", "max_physical_batch_size": 512}
        config["trainer"] |= {"max_epochs": epochs(name, options), "check_val_every_n_epoch": epochs(name, options)}
        config["optimizer"]["init_args"]["momentum"] = MOMENTUM
        return config

    return tuned_runs.Cell(f"{name}_epsilon_{epsilon:g}", trained.batch_size, 0.0, configuration)


def epochs(name: str, options: argparse.Namespace) -> int:
    """How many a run has."""
    return TRAINED[name].epochs if options.epochs is None else int(options.epochs)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = tuned_runs.parser(__doc__, list(TRAINED), batch_sizes=[])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--num-train", type=int, default=45_000, help="training images of the file, without a tenth")
    parser.set_defaults(epochs=None, threads=2)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.only:
        trained = TRAINED[name]
        shape = RunShape.of_length(
            num_train=options.num_train,
            expected_batch_size=trained.batch_size,
            delta=1e-5,
            max_epochs=epochs(name, options),
        )
        for epsilon in options.epsilons:
            plan = shape.calibrate(epsilon)
            lr = rate(plan, trained.noise, trained.highest)
            runs = [tuned_runs.run(cell(name, epsilon, options), lr, seed, options) for seed in options.seeds]
            tests = [100 * run["test_accuracy_last"] for run in runs]
            rows.append(
                f"| {name} | {epsilon:g} | {plan.noise_multiplier:.2f} | {lr:g} | {statistics.mean(tests):.1f} | "
                f"{', '.join(f'{test:.1f}' for test in tests)} | {shape.num_steps} | "
                f"{statistics.mean(run['seconds'] for run in runs) / 60:.1f} min |"
            )
    print("\n| trained | epsilon | sigma | lr | test accuracy, mean | each seed | steps | time of a run |")
    print("| --- " * 8 + "|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
