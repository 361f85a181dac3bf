"""How the time of a private step grows with the physical batch and with the logical batch.

All sizes are measured in one run, each in its own process, which take steps in turn (see ``step.py``). If the cost is
linear, the time for an image is the same for all sizes. Run ``python benchmarks/scaling.py --help``.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from step import Job, hardware, measure, positive


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    import torch
    import training_steps

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn16-4", choices=training_steps.MODELS)
    parser.add_argument("--way", default="ours flat", choices=["ours flat", "ours per-layer"])
    parser.add_argument("--type", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--format", default="contiguous", choices=["contiguous", "channels_last"])
    parser.add_argument(
        "--physical", nargs="*", type=positive, default=[16, 32, 64, 128, 256, 512], help="physical batch sizes"
    )
    parser.add_argument(
        "--pieces", nargs="*", type=positive, default=[1, 2, 4, 8, 16], help="physical batches of a logical one"
    )
    parser.add_argument("--piece", type=positive, default=64, help="size of those physical batches (default 64)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that count (default 2)")
    parser.add_argument("--rounds", type=positive, default=5, help="steps that count (default 5)")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads(), help="CPU threads")
    parser.add_argument("--json", type=Path, help="also write all rows to this file")
    return parser.parse_args(arguments)


def table(rows: list[dict[str, Any]], name: str) -> str:
    """Markdown: the time of a step, and for an image, relative to the median over the sizes."""
    each = {id(row): row["seconds"] / row["batch_size"] / row["pieces"] for row in rows if "error" not in row}
    middle = sorted(each.values())[len(each) // 2] if each else 0.0
    lines = [f"| {name} | ms | ms for an image | relative |", "| ---: | ---: | ---: | ---: |"]
    for row in rows:
        size = row["batch_size"] * row["pieces"]
        if "error" in row:
            lines.append(f"| {size} | {row['error']} | | |")
        else:
            time = each[id(row)]
            lines.append(f"| {size} | {row['seconds'] * 1e3:.0f} | {time * 1e3:.2f} | {time / middle:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    import torch

    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    machine = hardware(device, options.threads)
    print(machine, flush=True)
    job = Job(options.model, options.type, options.way, options.format, 0, device, options.threads, "step")
    parts = {
        "physical batch": [job._replace(batch_size=size) for size in options.physical],
        "logical batch": [
            job._replace(batch_size=options.piece, through="callback", pieces=pieces) for pieces in options.pieces
        ],
    }
    every: list[dict[str, Any]] = []
    for name, jobs in parts.items():
        if jobs:
            rows = measure(jobs, warmup=options.warmup, rounds=options.rounds)
            every += rows
            print("\n" + table(rows, name), flush=True)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps({"machine": machine, "rows": every}, indent=1))


if __name__ == "__main__":
    main()
