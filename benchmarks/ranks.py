"""What several ranks add to a private step: the collective, the noise, and both ways of orthogonalization.

Every rank is a process with an equal part of the threads (on GPUs, with a device of its own). A part's time runs from a
barrier to the slowest rank's end; the figure is the median over rounds, in which the parts take turns. Run
``python benchmarks/ranks.py --help``.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import step as step_benchmark
import torch
import torch.multiprocessing
import training_steps

from dp_lightning.postprocess import Chain, Orthogonalize
from dp_lightning.privacy import GaussianNoise
from dp_lightning.ranks import Ranks

PARTS = {
    "gradient": "clipped sum of one physical batch",
    "collective": "clipped sums added up over ranks",
    "noise": "noise drawn and added, by rank 0",
    "orthogonalize everywhere": "Newton-Schulz, every rank all matrices",
    "orthogonalize dealt out": "Newton-Schulz, each rank its share, gathered",
    "gather": "the same bytes gathered, without the work",
}


def parts_of_step(rank: int, options: argparse.Namespace, device: torch.device) -> dict[str, Callable[[], None]]:
    """Each part of a step as a function without arguments."""
    model, images, labels = training_steps.in_channels_last(options.model, device, options.batch_size)
    take_step = training_steps.WAYS["ours flat"](model, training_steps.autocast_to(device.type, "fp32"))
    flat = torch.randn(sum(p.numel() for p in model.parameters()) + 2, device=device)
    noise = GaussianNoise()
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    # Every matrix is dealt out, whatever it costs.
    everyone = Ranks(rank, options.ranks, operations_per_byte=1e-9)
    everywhere, dealt = Chain([Orthogonalize()]), Chain([Orthogonalize()], ranks=everyone)
    matrices = sum(value.numel() for value in gradients.values() if value.ndim > 1)
    mine = torch.randn(-(-matrices // options.ranks), device=device)

    def noisy() -> None:
        if rank == 0:
            noise.add_to(flat, 1.0, step=0)

    return {
        "gradient": lambda: take_step(images, labels),
        "collective": lambda: everyone.add_up(flat),
        "noise": noisy,
        "orthogonalize everywhere": lambda: everywhere(gradients) and None,
        "orthogonalize dealt out": lambda: dealt(gradients) and None,
        "gather": lambda: everyone.gather([mine], like=[[mine]] * options.ranks) and None,
    }


def work(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Run every part in turn; rank 0 writes the times."""
    cuda = options.device == "cuda"
    device = torch.device("cuda", 0 if options.one_device else rank) if cuda else torch.device("cpu")
    torch.set_num_threads(max(options.threads // options.ranks, 1))
    torch.distributed.init_process_group(
        "nccl" if cuda and not options.one_device else "gloo",
        init_method=f"file://{folder}/meet",
        rank=rank,
        world_size=options.ranks,
    )
    torch.manual_seed(0)
    times: dict[str, list[float]] = {name: [] for name in PARTS}
    with training_steps.quiet():
        parts = parts_of_step(rank, options, device)
        for turn in range(options.warmup + options.rounds):
            for name, part in parts.items():
                torch.distributed.barrier()
                start = time.perf_counter()
                part()
                if cuda:
                    torch.cuda.synchronize()
                seconds = torch.tensor(time.perf_counter() - start, device=device)
                torch.distributed.all_reduce(seconds, op=torch.distributed.ReduceOp.MAX)
                if turn >= options.warmup:
                    times[name].append(float(seconds))
    if rank == 0:
        Path(folder, "times.json").write_text(json.dumps(times))
    torch.distributed.destroy_process_group()


def table(times: dict[str, list[float]]) -> str:
    """Markdown: milliseconds, and the ratio to the gradient of one physical batch."""
    median = {name: statistics.median(values) for name, values in times.items()}
    lines = ["| part | what it is | ms | beside the gradient |", "| --- | --- | ---: | ---: |"]
    lines += [
        f"| {name} | {PARTS[name]} | {seconds * 1e3:.1f} | {seconds / median['gradient']:.3f} |"
        for name, seconds in median.items()
    ]
    return "\n".join(lines)


def rates(options: argparse.Namespace, times: dict[str, list[float]]) -> str:
    """Bytes and operations behind the times."""
    build, _, _ = training_steps.MODELS[options.model]
    shapes = [p.shape for p in build().parameters()]
    numbers = sum(shape.numel() for shape in shapes)
    operations = sum(Orthogonalize().cost(shape) for shape in shapes)
    median = {name: statistics.median(values) for name, values in times.items()}
    per_second = operations / median["orthogonalize everywhere"]
    gathered = 4 * sum(shape.numel() for shape in shapes if len(shape) > 1)
    return (
        f"{numbers:,} parameters, {operations / 1e9:.3g} GFLOP of Newton-Schulz at {per_second / 1e9:.3g} GFLOP/s, "
        f"collective {4 * numbers / median['collective'] / 1e9:.3g} GB/s, "
        f"gather {gathered / median['gather'] / 1e9:.3g} GB/s, "
        f"{per_second * median['gather'] / gathered:.0f} operations in the time of a gathered byte"
    )


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    positive = step_benchmark.positive
    parser.add_argument("--model", default="wrn16-4", choices=training_steps.MODELS)
    parser.add_argument("--ranks", type=positive, default=2)
    parser.add_argument("--batch-size", type=positive, help="physical batch size (default: by model and device)")
    parser.add_argument("--warmup", type=int, default=2, help="rounds before those that count (default 2)")
    parser.add_argument("--rounds", type=positive, default=9, help="rounds that count (default 9)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads of all ranks")
    parser.add_argument("--one-device", action="store_true", help="let all ranks share the only GPU, by gloo")
    parser.add_argument("--json", type=Path, help="also write the times to this file")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    enough = 1 if options.one_device else options.ranks  # NCCL takes no device twice
    options.device = "cuda" if torch.cuda.device_count() >= enough else "cpu"
    machine = step_benchmark.hardware(options.device, options.threads)
    print(f"{machine}, {options.ranks} ranks, {options.model}\n", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(work, (options, folder), nprocs=options.ranks)
        times: dict[str, Any] = json.loads(Path(folder, "times.json").read_text())
    print(f"{table(times)}\n\n{rates(options, times)}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "ranks": options.ranks, "times": times}, indent=1))


if __name__ == "__main__":
    main()
