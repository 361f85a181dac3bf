"""What post-processing makes of a planted signal in noise: ``python benchmarks/spiked.py``.

A signal X with equal singular values x, of low or of full rank, is planted in Gaussian noise at the matrix shapes of
WRN-16-4. x is given in units of the detection threshold noise * (m n)^(1/4), below which no method can tell the
direction from noise; Wedin's condition for recovery, noise * (sqrt(m) + sqrt(n)), is 2.0 to 2.7 such units.

Printed per shape and strength, as means over draws:

- the cosine between each update and the polar factor of X;
- the squared error of the shrunk matrix over ||X||^2, beside the closed form in the limit of large matrices of low rank
  (Gavish and Donoho 2017).
"""

import math
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import arguments, table
from torch import Tensor

from dp_lightning.postprocess import (
    Chain,
    GatedOrthogonalize,
    Orthogonalize,
    SpectralShrinkage,
    Transform,
    polar_factor,
)

SHAPES = [(16, 27), (64, 144), (64, 576), (128, 576), (128, 1152), (256, 1152), (256, 2304), (10, 256)]
STRENGTHS = [0.5, 0.8, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0]
UPDATES: dict[str, list[Transform]] = {
    "none": [],
    "Newton-Schulz": [Orthogonalize()],
    "polar express": [Orthogonalize(coefficients="polar_express")],
    "gated": [GatedOrthogonalize()],
    "shrunk": [SpectralShrinkage()],
}


def planted(rows: int, columns: int, rank: int, strength: float, generator: torch.Generator) -> Tensor:
    """A signal whose singular values are all ``strength`` times the detection threshold of unit noise."""
    left = torch.linalg.qr(torch.randn(rows, rank, generator=generator, dtype=torch.float64)).Q
    right = torch.linalg.qr(torch.randn(columns, rank, generator=generator, dtype=torch.float64)).Q
    return strength * (rows * columns) ** 0.25 * left @ right.T


def closed_form(rows: int, columns: int, strength: float) -> float:
    """Squared error over ||X||^2 of the best shrinkage of singular values: 1 - cos^2 cos^2 of the two angles."""
    if strength <= 1:
        return 1.0
    beta = min(rows, columns) / max(rows, columns)
    z2 = strength**2 * math.sqrt(beta)
    left, right = (z2**2 - beta) / (z2**2 + beta * z2), (z2**2 - beta) / (z2**2 + z2)
    return 1 - left * right


def measure(rows: int, columns: int, rank: int, strength: float, draws: int) -> dict[str, float]:
    """Means over draws of the cosine of each update, and of the error of the shrunk matrix."""
    generator = torch.Generator().manual_seed(0)
    totals = dict.fromkeys([*UPDATES, "error"], 0.0)
    for _ in range(draws):
        signal = planted(rows, columns, rank, strength, generator)
        noisy = signal + torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        clean = polar_factor(signal)
        for name, transforms in UPDATES.items():
            update = Chain(transforms)({"w": noisy.float()}, noise=1.0)["w"].double()
            totals[name] += float(torch.nn.functional.cosine_similarity(update.flatten(), clean.flatten(), dim=0))
            if name == "shrunk":
                totals["error"] += float((update - signal).square().sum() / signal.square().sum())
    return {name: total / draws for name, total in totals.items()}


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--draws", type=int, default=20)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 5])
    options, rows = parser.parse_args(given), []
    for shape in SHAPES:
        for rank, strength in product([*options.ranks, min(shape)], STRENGTHS):
            found = measure(*shape, rank, strength, options.draws)
            expected = closed_form(*shape, strength) if rank < min(shape) else math.nan
            cosines = (f"{found[name]:.2f}" for name in UPDATES)
            size = f"{shape[0]} x {shape[1]}"
            rows.append((size, rank, f"{strength:g}", *cosines, f"{found['error']:.3f}", f"{expected:.3f}"))
    print(table(["shape", "rank", "x / threshold", *UPDATES, "error", "closed form"], rows))


if __name__ == "__main__":
    main()
