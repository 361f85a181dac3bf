"""Two sets of made-up images for `NpzImages`, on which settings prove themselves that were found with CIFAR-10.

Run ``python benchmarks/made_up_images.py --out FOLDER``. It writes ``digits.npz``, digits in the colours of street
numbers on clutter and between others (16 x 16 pixels, 20,000 for the training), and ``cells.npz``, eight kinds of white
blood cells that differ in the lobes of the nucleus, its share of the cell, and granules (28 x 28 pixels, 4,000).
"""

import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from measuring import arguments
from PIL import Image, ImageDraw, ImageFilter, ImageFont

Rng = np.random.Generator
# By kind: lobes of the nucleus, its share of the cell, granules.
CELLS = [(1, 0.8, 2), (1, 0.5, 2), (2, 0.45, 14), (3, 0.4, 4), (1, 0.65, 30), (2, 0.5, 30), (4, 0.35, 4), (1, 0.72, 8)]


def near(colour: Sequence[float], spread: float, rng: Rng) -> tuple[int, ...]:
    """A colour like this one."""
    return tuple(int(value) for value in np.clip(colour + rng.normal(0, spread, 3), 0, 255))


def digit(kind: int, rng: Rng) -> Image.Image:
    """A digit (64 x 64) that is turned and moved a little, often with others beside it."""
    back, ink = rng.integers(0, 256, 3), rng.integers(0, 256, 3)
    while abs(ink - back).sum() <= 120:
        ink = rng.integers(0, 256, 3)
    image = Image.new("RGB", (64, 64), tuple(back.tolist()))
    draw = ImageDraw.Draw(image)
    for _ in range(rng.integers(2, 7)):
        corner = rng.integers(-16, 64, 2)
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape([*corner.tolist(), *(corner + rng.integers(8, 48, 2)).tolist()], fill=near(back, 25, rng))
    x, y = (32 + rng.integers(-4, 5, 2)).tolist()
    beside = [int(side * rng.integers(36, 46)) for side in (-1, 1) if rng.random() < 0.5]
    for text, dx in [(str(kind), 0), *((str(rng.integers(10)), dx) for dx in beside)]:
        layer = Image.new("L", (128, 128))
        font = ImageFont.load_default(size=int(rng.integers(44, 61)))
        ImageDraw.Draw(layer).text((64, 64), text, font=font, fill=255, anchor="mm")
        image.paste(tuple(ink.tolist()), (x + dx - 64, y - 64), layer.rotate(rng.normal(0, 8)))
    return image


def cell(kind: int, rng: Rng) -> Image.Image:
    """A white blood cell (84 x 84) among red ones."""
    lobes, share, granules = CELLS[kind]
    image = Image.new("RGB", (84, 84), near([232, 205, 198], 10, rng))
    draw = ImageDraw.Draw(image)

    def disc(x: float, y: float, r: float, fill: tuple[int, ...]) -> None:
        tall = r * rng.uniform(0.8, 1.2)
        draw.ellipse([x - r, y - tall, x + r, y + tall], fill=fill)

    for _ in range(rng.integers(2, 6)):
        disc(*rng.uniform(0, 84, 2), rng.uniform(14, 22), near([216, 150, 150], 12, rng))
    (x, y), radius, nucleus = 42 + rng.normal(0, 4, 2), rng.uniform(20, 30), near([100, 60, 140], 16, rng)
    disc(x, y, radius, near([195, 175, 205], 14, rng))
    for lobe in range(lobes):
        turn, away = 2 * math.pi * (lobe + rng.uniform(-0.2, 0.2)) / lobes, radius * 0.42 * (lobes > 1)
        size = radius * share * rng.uniform(0.8, 1.2) / lobes**0.35
        disc(x + away * math.cos(turn), y + away * math.sin(turn), size, nucleus)
    for _ in range(int(granules * rng.uniform(0.5, 1.5))):
        disc(*rng.normal((x, y), radius / 2), rng.uniform(1, 2.2), near([200, 100, 100], 25, rng))
    return image.rotate(rng.uniform(0, 360), fillcolor=(225, 195, 190))


def images(make: Callable[[int, Rng], Image.Image], kinds: int, count: int, side: int) -> tuple[np.ndarray, np.ndarray]:
    """Images (count, side, side, 3) of 8 bits, out of focus and with noise, and labels (count,)."""
    rng = np.random.default_rng(0)
    labels, found = rng.integers(0, kinds, count), np.empty((count, side, side, 3), np.uint8)
    for image, label in zip(found, labels, strict=True):
        drawn = make(int(label), rng).filter(ImageFilter.GaussianBlur(rng.uniform(1, 3))).resize((side, side))
        image[:] = np.clip(np.asarray(drawn) * rng.uniform(0.85, 1.1) + rng.normal(0, 9, image.shape), 0, 255)
    return found, labels


# The drawing, kinds, images for the training and for the test, and the side in pixels.
SETS = {"digits": (digit, 10, 20_000, 5000, 16), "cells": (cell, len(CELLS), 4000, 4000, 28)}


def main(given: Sequence[str] | None = None) -> None:
    """Write both sets under the names that `NpzImages` reads."""
    parser = arguments(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(given)
    options.out.mkdir(parents=True, exist_ok=True)
    for name, (draw, kinds, train, test, side) in SETS.items():
        x, y = images(draw, kinds, train + test, side)
        of_training = {"train_images": x[:train], "train_labels": y[:train]}
        np.savez(options.out / f"{name}.npz", **of_training, test_images=x[train:], test_labels=y[train:])


if __name__ == "__main__":
    main()
