"""Images per second and core from files to the training process, compared with the decoder alone.

Makes a synthetic ImageNet: as many files as ImageNet has, in 1,000 class folders, of its sizes (473 x 402 pixels on
average). They are hard links to a few hundred different JPEG files, so that they take little room. Then it draws
logical batches of a private run from them by Poisson sampling, loads them as a run does, and counts the images per
second of processor time of all processes together. Run ``python benchmarks/pipeline.py --help``.
"""

import argparse
import json
import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from dp_lightning.datamodules import ImageNet
from dp_lightning.datamodules.file_source import open_image
from dp_lightning.privacy import PoissonSampler, PrivacyPlan, PrivateStep
from dp_lightning.privacy.reading import Reading
from dp_lightning.private_run.logical_batches import PhysicalLoader

IMAGENET = 1_281_167
CLASSES = 1000
_DIFFERENT = 512


def make_files(root: Path, count: int, *, seed: int = 0) -> None:
    """``count`` training images under ``root/train`` and one validation image per class; existing files are kept."""
    done = root / "done.json"
    if done.is_file() and json.loads(done.read_text()) == count:
        return
    noise = np.random.default_rng(seed)
    pool = root / "pool"
    pool.mkdir(parents=True, exist_ok=True)
    for number in range(_DIFFERENT):
        # Width and height of ImageNet's images: 473 and 402 on average, few below 300.
        width, height = (int(max(noise.normal(mean, 60), 120)) for mean in (473, 402))
        coarse = noise.integers(0, 256, (height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
        pixels = (smooth + noise.normal(0, 12, smooth.shape).astype(np.int16)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(pool / f"{number}.JPEG", quality=90)
    for label in range(CLASSES):
        for split, own in (("train", range(label, count, CLASSES)), ("val", range(label, label + 1))):
            folder = root / split / f"n{label:08d}"
            folder.mkdir(parents=True, exist_ok=True)
            for number in own:
                path = folder / f"n{label:08d}_{number:08d}.JPEG"
                if not path.exists():
                    os.link(pool / f"{number % _DIFFERENT}.JPEG", path)
    done.write_text(json.dumps(count))


def processor_seconds() -> float:
    """Processor time of this process and of its children that have ended."""
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def resident_mib() -> float:
    """Memory of this process now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1024


def of_decoder(root: Path, images: int, decode: Any) -> float:
    """Images per second of processor time of a decoder alone."""
    paths = [str(root / "pool" / f"{number}.JPEG") for number in range(_DIFFERENT)]
    decode(paths[0])
    start = processor_seconds()
    for number in range(images):
        decode(paths[number % _DIFFERENT])
    return images / (processor_seconds() - start)


def by_pil(path: str) -> np.ndarray:
    """Decode the image with PIL."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def of_loading(data: ImageNet, *, batch_size: int, physical: int, augmult: int, steps: int) -> dict[str, float]:
    """Images (views) per second of processor time through sampling and loading, and seconds per Poisson draw."""
    plan = PrivacyPlan(
        num_train=data.num_train,
        expected_batch_size=batch_size,
        num_steps=steps,
        noise_multiplier=1.0,
        delta=1e-7,
        accountant="rdp",
    )
    sampler = PoissonSampler(num_train=plan.num_train, sample_rate=plan.sample_rate)
    start = time.perf_counter()
    for step in range(10):
        sampler.draw(step)
    draw = (time.perf_counter() - start) / 10
    users = data.train_dataloader()
    with patch("dp_lightning.privacy.step.require_single_records"):  # the files are links
        private = PrivateStep(
            torch.nn.Linear(1, 1),
            torch.sum,  # nothing is trained
            users.dataset,
            plan=plan,
            reading=Reading(collate_fn=users.collate_fn, augmult=augmult),
            max_physical_batch_size=physical,
            seed=0,
        )
    loader = PhysicalLoader(users, private)
    start, seconds, views = processor_seconds(), time.perf_counter(), 0
    for step in range(steps):
        for batch in loader.next_step(steps - step):
            views += augmult * int(batch.counted.sum())
        private.record.count(noise_multiplier=plan.noise_multiplier, sample_rate=plan.sample_rate)
    del loader  # the workers end, and their time counts
    wall = time.perf_counter() - seconds
    return {"per_core": views / (processor_seconds() - start), "per_second": views / wall, "draw": draw, "views": views}


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True, help="folder for the files")
    parser.add_argument("--files", type=int, default=IMAGENET)
    parser.add_argument("--batch-size", type=int, default=1024, help="expected batch size")
    parser.add_argument("--physical", type=int, default=64, help="images in a physical batch")
    parser.add_argument("--augmult", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=2, help="logical batches to load")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=224)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    torch.set_num_threads(1)
    make_files(options.root, options.files)
    before, start = resident_mib(), time.perf_counter()
    data = ImageNet(str(options.root), image_size=options.image_size, num_workers=options.workers)
    data.setup("fit")
    source: Any = data.train_dataset.source
    names = source.paths
    print(
        f"{len(names)} files listed in {time.perf_counter() - start:.1f} s, {resident_mib() - before:.0f} MiB more "
        f"memory, {names._names.nbytes / 2**20:.0f} MiB of them names",
        flush=True,
    )
    count = options.batch_size * options.steps
    decoders = {"torchvision": open_image, "PIL": by_pil}
    alone = {name: of_decoder(options.root, count, decode) for name, decode in decoders.items()}
    for name, value in alone.items():
        print(f"{name} alone: {value:.0f} images per second and core", flush=True)
    for augmult in options.augmult:
        found = of_loading(
            data, batch_size=options.batch_size, physical=options.physical, augmult=augmult, steps=options.steps
        )
        shares = ", ".join(
            f"{100 * found['per_core'] / augmult / value:.0f} % of {name}" for name, value in alone.items()
        )
        print(
            f"augmult {augmult}: {found['per_core']:.0f} views per second and core ({shares}, per image), "
            f"{found['per_second']:.0f} views per second, a Poisson draw in {1e3 * found['draw']:.1f} ms, "
            f"{resident_mib():.0f} MiB",
            flush=True,
        )


if __name__ == "__main__":
    main()
