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
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tuned_runs

from dp_lightning.privacy.plan import PrivacyPlan, RunShape

MOMENTUM = 0.9
# The standard deviation of the noise in a weight at the end. On features of length 1 it is that of a logit.
NOISE = {"linear": 0.9, "network": 0.07}
# Above it steps go too far, whatever the noise is.
HIGHEST = {"linear": 30.0, "network": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    "linear": {"class_path": "LinearProbeModule", "init_args": {"normalize": "unit"}},
    "network": {"class_path": "SmallCNNModule", "init_args": {"channels": 64}},
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

    def configuration(lr: float, seed: int, folder: Path) -> Any:
        config = tuned_runs.base(options, seed=seed, rate=lr, batch_size=options.batch_size, folder=folder)
        config = {**tuned_runs.on_scattering(config, options), "model": MODELS[name]}
        # The plan's accountant, so that the table's sigma and the rate are those of the run.
        config["privacy"] |= {"target_epsilon": epsilon, "accountant": "prv"}
        config["privacy"]["max_physical_batch_size"] = options.physical
        config["optimizer"]["init_args"]["momentum"] = MOMENTUM
        return config

    return tuned_runs.Cell(f"{name}_epsilon_{epsilon:g}", options.batch_size, 0.0, configuration)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = tuned_runs.parser(__doc__, list(MODELS), batch_sizes=[])
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--batch-size", type=int, default=8192)
    parser.add_argument("--physical", type=int, default=512, help="images that go through the layer together")
    parser.add_argument("--num-train", type=int, default=45_000, help="training images of the file, without a tenth")
    parser.set_defaults(epochs=40, threads=2)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    rows = []
    for name in options.only:
        for epsilon in options.epsilons:
            steps = options.epochs * options.num_train // options.batch_size
            shape = RunShape(
                num_train=options.num_train, expected_batch_size=options.batch_size, num_steps=steps, delta=1e-5
            )
            plan = shape.calibrate(epsilon)
            lr = rate(plan, NOISE[name], HIGHEST[name])
            runs = [tuned_runs.run(cell(name, epsilon, options), lr, seed, options) for seed in options.seeds]
            tests = [100 * run["test_accuracy_last"] for run in runs]
            rows.append(
                f"| {name} | {epsilon:g} | {plan.noise_multiplier:.2f} | {lr:g} | {statistics.mean(tests):.1f} | "
                f"{', '.join(f'{test:.1f}' for test in tests)} | {steps} | "
                f"{statistics.mean(run['seconds'] for run in runs) / 60:.1f} min |"
            )
    print("\n| trained | epsilon | sigma | lr | test accuracy, mean | each seed | steps | time of a run |")
    print("| --- " * 8 + "|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
