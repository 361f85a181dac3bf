"""Seconds for the scattering coefficients of images of CIFAR-10's size: processes, and threads of one.

Both write a new cache of the same images, made of noise, in turns. Run ``python benchmarks/features.py --help``.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from epochs import images as write_images

from dp_lightning.datamodules import CachedFeatures, NpzImages


def seconds(images: Path, cache: str, *, processes: bool, mirror: bool) -> float:
    """Time to read the images, compute their features and write them."""
    data = CachedFeatures(
        NpzImages(str(images), num_classes=10, num_workers=torch.get_num_threads() if processes else 0),
        "scattering",
        cache=cache,
        backbone_kwargs={"mirror": mirror},
    )
    start = time.perf_counter()
    data.prepare_data()
    return time.perf_counter() - start


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=60_000, help="training images; 100 test images more")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="and processes")
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--mirror", action="store_true", help="average with the coefficients of the mirror image")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    torch.set_num_threads(options.threads)
    found: dict[str, list[float]] = {"processes": [], "threads": []}
    with tempfile.TemporaryDirectory() as folder:
        images = Path(folder, "images.npz")
        write_images(images, options.images)
        for _ in range(options.turns):
            for name, times in found.items():
                with tempfile.TemporaryDirectory(dir=folder) as cache:
                    times.append(seconds(images, cache, processes=name == "processes", mirror=options.mirror))
    for name, times in found.items():
        print(f"{options.threads} {name}: " + ", ".join(f"{value:.1f}" for value in times) + " s")
    ratio = statistics.median(found["threads"]) / statistics.median(found["processes"])
    print(f"threads take {ratio:.2f} times the time of processes, for {options.images:,} images")


if __name__ == "__main__":
    main()
