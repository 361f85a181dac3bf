"""What noise, post-processing and several ranks add to a logical step, beside the gradient work of B examples.

One physical batch, the noise, each chain of transforms and, with ``--ranks``, the collective and the orthogonalization
take turns. The chains get fresh noise in the shapes of the model's gradients. Every rank is a
process with an equal part of the threads (on GPUs, with a device of its own). A part's time runs from a barrier to the
slowest rank's end; the figure is the median over rounds. Run ``python benchmarks/postprocess.py --help``.
"""

import argparse
import json
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.multiprocessing
import training_steps
from measuring import arguments, hardware, positive, seconds_of, table, write_json

from dp_lightning.postprocess import (
    Chain,
    GatedOrthogonalize,
    Kalman,
    LowPass,
    MagnitudeScale,
    Momentum,
    NoiseNormalize,
    Normalize,
    Orthogonalize,
    SelectiveOrthogonalize,
    SpectralShrinkage,
    Transform,
)
from dp_lightning.privacy.secret_normals import secret_normals
from dp_lightning.ranks import Ranks


def _ema(*transforms: Transform) -> Chain:
    return Chain([Momentum(0.95, kind="ema_nesterov"), *transforms])


def chains() -> dict[str, Chain]:
    """The chains that are measured."""
    return {
        "heavy-ball momentum": Chain([Momentum(0.9)]),
        "Kalman filter": Chain([Kalman(process_to_measurement_ratio=1.5)]),
        "low-pass filter": Chain([LowPass()]),
        "normalized": _ema(Normalize()),
        "noise-normalized": _ema(NoiseNormalize()),
        "DP-Muon": _ema(Orthogonalize()),
        "DP-Muon, bfloat16": _ema(Orthogonalize(precision="bfloat16")),
        "DP-Muon, polar express, 6 steps": _ema(Orthogonalize(coefficients="polar_express", steps=6)),
        "DP-Muon, exact": _ema(Orthogonalize(coefficients="exact")),
        "DP-Muon-S": Chain([Momentum(0.9), MagnitudeScale(Orthogonalize())]),
        "gated": _ema(GatedOrthogonalize()),
        "shrunk": _ema(SpectralShrinkage()),
        "selective": _ema(SelectiveOrthogonalize()),
    }


Part = Callable[[dict[str, torch.Tensor]], object]
"""Part of a step; it gets fresh gradients by name."""


def parts_of_step(options: argparse.Namespace, rank: int, device: torch.device) -> dict[str, Part]:
    """What is measured on each rank, by name."""
    model, images, labels = training_steps.build(options.model, device, options.batch_size)
    take_step = training_steps.WAYS["ours flat"](model, training_steps.autocast_to(device.type, "fp32"))
    flat = torch.randn(sum(p.numel() for p in model.parameters()), device=device)
    parts: dict[str, Part] = {"gradient": lambda _: take_step(images, labels)}
    if options.ranks == 1:
        parts["noise"] = lambda _: secret_normals(flat.shape, device)
        parts["torch.randn of as many numbers"] = lambda _: torch.randn_like(flat)
        return parts | {name: partial(chain, noise=1.0) for name, chain in chains().items()}
    return parts | {
        "collective": lambda _: Ranks(rank, options.ranks).add_up(flat),
        "noise, by rank 0": lambda _: secret_normals(flat.shape, device) if rank == 0 else None,
        "orthogonalized": Chain([Orthogonalize()]),
    }


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Run every part in turn; rank 0 writes the times, and the number of images in a physical batch."""
    device = torch.device("cuda", 0 if options.one_device else rank) if options.cuda else torch.device("cpu")
    if options.ranks > 1:
        torch.set_num_threads(max(options.threads // options.ranks, 1))
        meeting = {"init_method": f"file://{folder}/meet", "rank": rank, "world_size": options.ranks}
        backend = "nccl" if options.cuda and not options.one_device else "gloo"
        torch.distributed.init_process_group(backend, **meeting)
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):  # of Opacus, about hooks and secure mode
        parts = parts_of_step(options, rank, device)
        make, _, _ = training_steps.MODELS[options.model]
        shapes = {name: p.shape for name, p in make().named_parameters()}
        times: dict[str, list[float]] = {name: [] for name in parts}
        for turn in range(options.warmup + options.rounds):
            gradients = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
            for name, part in parts.items():
                if options.ranks > 1:
                    torch.distributed.barrier()
                seconds = torch.tensor(seconds_of(partial(part, gradients), device), device=device)
                if options.ranks > 1:
                    torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
                if turn >= options.warmup:
                    times[name].append(float(seconds))
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    if options.ranks > 1:
        torch.distributed.destroy_process_group()


def parse(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--model", choices=training_steps.MODELS, default="wrn16-4")
    parser.add_argument("--expected-batch-size", type=positive, default=2048)
    parser.add_argument("--batch-size", type=positive, help="physical batch; default: by model and device")
    parser.add_argument("--ranks", type=positive, default=1, help="processes (default 1)")
    parser.add_argument("--one-device", action="store_true", help="let all ranks share the only GPU, by gloo")
    parser.add_argument("--warmup", type=int, default=1, help="rounds before those that count (default 1)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads of all ranks")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(given)
    # NCCL takes no device twice.
    options.cuda = torch.cuda.device_count() >= (1 if options.one_device else options.ranks)
    machine = hardware("cuda" if options.cuda else "cpu", options.threads)
    print(f"{machine}, {options.model}, {options.ranks} rank{'s' * (options.ranks > 1)}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if options.ranks == 1:
            work(0, options, folder)
        else:
            torch.multiprocessing.spawn(work, (options, folder), nprocs=options.ranks)
        times: dict[str, list[float]] = json.loads(Path(folder, "times.json").read_text())
    median = {name: statistics.median(values) for name, values in times.items()}
    count = options.batch_size or training_steps.MODELS[options.model][2]["cuda" if options.cuda else "cpu"]
    step = median["gradient"] / count * options.expected_batch_size
    print(f"The gradients of {options.expected_batch_size:,} examples take {step:.2f} s on one rank.\n")
    rows = [(name, f"{1e3 * seconds:.1f}", f"{100 * seconds / step:.2f} %") for name, seconds in median.items()]
    rows[0] = (f"gradient of {count} examples", *rows[0][1:])
    print(table(["part", "ms", "of those gradients"], rows))
    write_json(options.json, {"machine": machine, "ranks": options.ranks, "batch_size": count, "times": times})


if __name__ == "__main__":
    main()
