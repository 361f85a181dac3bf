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
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import torch
from measuring import arguments, memory_mib
from PIL import Image

from dp_lightning.datamodules import ImageNet
from dp_lightning.privacy import PoissonSampler, PrivacyPlan, PrivateStep
from dp_lightning.privacy.reading import Reading
from dp_lightning.private_run.logical_batches import PhysicalLoader

IMAGENET = 1_281_167
CLASSES = 1000
_DIFFERENT = 512


def make_files(root: Path, count: int) -> None:
    """``count`` training images under ``root/train`` and one validation image per class; existing files are kept."""
    done = root / "done.json"
    if done.is_file() and json.loads(done.read_text()) == count:
        return
    noise = np.random.default_rng(0)
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


def by_pil(path: str) -> np.ndarray:
    """The pixels that PIL decodes."""
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def of_decoder(root: Path, images: int) -> float:
    """Images per second of processor time of the decoder alone."""
    paths = [str(root / "pool" / f"{number}.JPEG") for number in range(_DIFFERENT)]
    start = processor_seconds()
    for number in range(images):
        by_pil(paths[number % _DIFFERENT])
    return images / (processor_seconds() - start)


def of_loading(data: ImageNet, options: argparse.Namespace, augmult: int) -> tuple[float, float]:
    """Views per second of processor time, and per second, through sampling and loading."""
    plan = PrivacyPlan(
        num_train=data.num_train,
        expected_batch_size=options.batch_size,
        num_steps=options.steps,
        noise_multiplier=1.0,
        delta=1e-7,
        accountant="rdp",
    )
    users = data.train_dataloader()
    with patch("dp_lightning.privacy.step.require_single_records"):  # the files are links
        private = PrivateStep(
            torch.nn.Linear(1, 1),
            torch.sum,  # nothing is trained
            users.dataset,
            plan=plan,
            reading=Reading(collate_fn=users.collate_fn, augmult=augmult),
            max_physical_batch_size=options.physical,
            seed=0,
        )
    loader = PhysicalLoader(users, private)
    start, seconds, views = processor_seconds(), time.perf_counter(), 0
    for step in range(options.steps):
        for batch in loader.next_step(options.steps - step):
            views += augmult * int(batch.counted.sum())
        private.record.count(noise_multiplier=plan.noise_multiplier, sample_rate=plan.sample_rate)
    del loader  # the workers end, and their time counts
    wall = time.perf_counter() - seconds
    return views / (processor_seconds() - start), views / wall


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = arguments(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder for the files")
    parser.add_argument("--files", type=int, default=IMAGENET)
    parser.add_argument("--batch-size", type=int, default=1024, help="expected batch size")
    parser.add_argument("--physical", type=int, default=64, help="images in a physical batch")
    parser.add_argument("--augmult", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=2, help="logical batches to load")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--image-size", type=int, default=224)
    options = parser.parse_args(given)
    torch.set_num_threads(1)
    make_files(options.root, options.files)
    before, start = memory_mib("VmRSS"), time.perf_counter()
    data = ImageNet(str(options.root), image_size=options.image_size, num_workers=options.workers)
    data.setup("fit")
    seconds, more = time.perf_counter() - start, memory_mib("VmRSS") - before
    print(f"{data.num_train} files listed in {seconds:.1f} s, {more:.0f} MiB more memory", flush=True)
    sampler = PoissonSampler(num_train=data.num_train, sample_rate=options.batch_size / data.num_train)
    start = time.perf_counter()
    for step in range(10):
        sampler.draw(step)
    print(f"a Poisson draw in {100 * (time.perf_counter() - start):.1f} ms", flush=True)
    alone = of_decoder(options.root, options.batch_size * options.steps)
    print(f"PIL alone: {alone:.0f} images per second of processor time", flush=True)
    for augmult in options.augmult:
        per_core, per_second = of_loading(data, options, augmult)
        print(
            f"augmult {augmult}: {per_core:.0f} views ({per_core / augmult:.0f} images) per second of processor time, "
            f"{per_second:.0f} views per second",
            flush=True,
        )


if __name__ == "__main__":
    main()
