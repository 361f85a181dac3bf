"""Trains the methods of post-processing side by side, each with its learning rate tuned.

One-dimensional parameters take the same steps of DP-SGD with every method. ``tuned_runs.py`` says how rates are tuned
and runs are kept. Run ``python benchmarks/methods.py --help``.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import tuned_runs

_EMA = ("Momentum", {"beta": 0.95, "kind": "ema_nesterov"})
_HEAVY_BALL = ("Momentum", {"beta": 0.9, "kind": "heavy_ball"})
_NS = {"class_path": "Orthogonalize"}

# Transforms of the matrices, and the middle one of the first three learning rates.
METHODS: dict[str, tuple[list[tuple[str, dict[str, Any]]], float]] = {
    "dp_sgd": ([_HEAVY_BALL], 1.0),
    "normalized": ([_EMA, ("Normalize", {})], 0.06),
    "noise_normalized": ([_EMA, ("NoiseNormalize", {})], 0.06),
    "dp_muon": ([_EMA, ("Orthogonalize", {})], 0.06),
    "dp_muon_s": ([_HEAVY_BALL, ("MagnitudeScale", {"transform": _NS})], 0.6),
    "gated": ([_EMA, ("GatedOrthogonalize", {})], 0.2),
    "gated_full_norm": ([_EMA, ("GatedOrthogonalize", {}), ("Normalize", {})], 0.06),
    "shrunk": ([_EMA, ("SpectralShrinkage", {})], 10.0),
    "shrunk_full_norm": ([_EMA, ("SpectralShrinkage", {}), ("Normalize", {})], 0.06),
    "selective": ([_EMA, ("SelectiveOrthogonalize", {})], 0.06),
    "kalman_sgd": ([("Kalman", {"process_to_measurement_ratio": 1.5})], 3.0),
    "kalman_muon": ([("Kalman", {"process_to_measurement_ratio": 1.5}), _EMA, ("Orthogonalize", {})], 0.06),
    "low_pass_muon": ([("LowPass", {}), ("Orthogonalize", {})], 0.06),
}
# Learning rate of one-dimensional parameters, with heavy-ball momentum 0.9.
_VECTOR_RATE = 1.0


def transforms(method: str, rate: float) -> list[dict[str, Any]]:
    """The chain of a method, and the steps of one-dimensional parameters after it."""
    vectors = [
        ("Momentum", {"beta": 0.9, "kind": "heavy_ball", "applies_to": "vectors"}),
        ("Scale", {"factor": _VECTOR_RATE / rate, "applies_to": "vectors"}),
    ]
    return [{"class_path": name, "init_args": args} for name, args in METHODS[method][0] + vectors]


def cell(method: str, batch_size: int, options: argparse.Namespace) -> tuned_runs.Cell:
    """A method at a batch size."""

    def configuration(rate: float, seed: int, folder: Path) -> Any:
        config = tuned_runs.base(options, seed=seed, rate=rate, batch_size=batch_size, folder=folder)
        return {**config, "postprocess": {"transforms": transforms(method, rate)}}

    return tuned_runs.Cell(method, batch_size, METHODS[method][1], configuration)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    # The images of the runs in the docs were normalised with these constants, which are not CIFAR-10's.
    return tuned_runs.parser(__doc__, list(METHODS), batch_sizes=[256, 2048], mean=[0.305], std=[0.376]).parse_args(
        arguments
    )


def main() -> None:
    """Measure and print."""
    options = parse()
    tuned_runs.compare([cell(name, size, options) for size in options.batch_sizes for name in options.only], options)


if __name__ == "__main__":
    main()
