"""CIFAR-10 in one file for `NpzImages`, as the benchmarks and some grids take it; half the size with ``--half``.

Run ``python benchmarks/cifar_npz.py --root data --download --half --out cifar10_16.npz``.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from measuring import arguments


def halved(images: np.ndarray) -> np.ndarray:
    """Images (n, H, W, C) of 8 bits with the means of 2 x 2 pixels (n, H/2, W/2, C), rounded."""
    n, height, width, channels = images.shape
    blocks = images.reshape(n, height // 2, 2, width // 2, 2, channels)
    return np.rint(blocks.mean(axis=(2, 4), dtype=np.float32)).astype(np.uint8)


def arrays(root: Path, *, download: bool) -> dict[str, np.ndarray]:
    """Images and labels under the names that `NpzImages` reads."""
    from torchvision.datasets import CIFAR10

    found = {}
    for split in ("train", "test"):
        data = CIFAR10(str(root), train=split == "train", download=download)
        found |= {f"{split}_images": data.data, f"{split}_labels": np.asarray(data.targets)}
    return found


def main(given: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = arguments(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of torchvision's CIFAR10")
    parser.add_argument("--download", action="store_true", help="download CIFAR-10 into --root")
    parser.add_argument("--half", action="store_true", help="means of 2 x 2 pixels")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    found = arrays(options.root, download=options.download)
    if options.half:
        found |= {name: halved(value) for name, value in found.items() if name.endswith("_images")}
    np.savez(options.out, **found)
    print(", ".join(f"{name} {value.shape}" for name, value in found.items()))


if __name__ == "__main__":
    main()
