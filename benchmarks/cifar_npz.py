"""CIFAR-10 in one file for `NpzImages`, as the benchmarks and some grids take it; half the size with ``--half``.

Run ``python benchmarks/cifar_npz.py --root data --download --half --out cifar10_16.npz``.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("--root", type=Path, help="folder of torchvision's CIFAR10")
    given.add_argument("--npz", type=Path, help="a file of NpzImages instead")
    parser.add_argument("--download", action="store_true", help="download CIFAR-10 into --root")
    parser.add_argument("--half", action="store_true", help="means of 2 x 2 pixels")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    found = dict(np.load(options.npz)) if options.npz else arrays(options.root, download=options.download)
    if options.half:
        found |= {name: halved(value) for name, value in found.items() if name.endswith("_images")}
    with options.out.open("wb") as file:
        np.savez(file, **found)
    print(", ".join(f"{name} {value.shape}" for name, value in found.items()))


if __name__ == "__main__":
    main()
