"""Trains a small network with one more ingredient at a time, each time with the learning rate tuned.

The ladder: DP-SGD; standardised weights and ReLU before GroupNorm; augmentation multiplicity; the moving average of the
weights; orthogonalized updates. Every rung includes those below it. ``tuned_runs.py`` says how rates are tuned and runs
are kept. Run ``python benchmarks/recipes.py --help``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import methods
import tuned_runs

LADDER = ("plain", "standardized", "augmult", "average", "spectral")


def cell(rung: str, batch_size: int, options: argparse.Namespace) -> tuned_runs.Cell:
    """A rung of the ladder at a batch size."""
    height = LADDER.index(rung)
    method = "dp_muon" if rung == "spectral" else "dp_sgd"

    def configuration(rate: float, seed: int, folder: Path) -> Any:
        config = tuned_runs.base(options, seed=seed, rate=rate, batch_size=batch_size, folder=folder)
        config["data"]["init_args"]["augment"] = True
        if height >= LADDER.index("standardized"):
            config["model"]["init_args"] |= {"weight_standardization": True, "relu_first": True}
        if height >= LADDER.index("augmult"):
            config["privacy"]["augmult"] = options.augmult
        if height >= LADDER.index("average"):
            config["averaging"] = {"decay": options.decay}
        return {**config, "postprocess": {"transforms": methods.transforms(method, rate)}}

    return tuned_runs.Cell(rung, batch_size, methods.METHODS[method][1], configuration)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = tuned_runs.parser(__doc__, LADDER, batch_sizes=[1024])
    parser.add_argument("--augmult", type=int, default=4)
    parser.add_argument(
        "--decay", type=float, default=0.99, help="of the moving average; in a short run its warm-up alone counts"
    )
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    tuned_runs.compare([cell(rung, size, options) for size in options.batch_sizes for rung in options.only], options)


if __name__ == "__main__":
    main()
