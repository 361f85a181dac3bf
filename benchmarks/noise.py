"""The time of the noise of a logical step, beside torch's own generator. Run ``python benchmarks/noise.py --help``."""

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from step import hardware
from training_steps import seconds_of

from dp_lightning.privacy.secret_normals import secret_normals


def median_ms(work: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Of so many calls, after one that does not count."""
    times = [seconds_of(work, device) for _ in range(rounds + 1)]
    return 1e3 * statistics.median(times[1:])


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--millions", nargs="+", type=float, default=[2.7, 22.1, 36.5], help="parameters (default 2.7 22.1 36.5)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    print(f"{hardware(device.type, torch.get_num_threads())}\n")
    print("| millions of parameters | secret noise, ms | torch.randn, ms |\n| ---: | ---: | ---: |")
    for millions in options.millions:
        shape = (round(millions * 1e6),)
        secret = median_ms(lambda shape=shape: secret_normals(shape, device), device, options.rounds)
        plain = median_ms(lambda shape=shape: torch.randn(shape, device=device), device, options.rounds)
        print(f"| {millions:g} | {secret:.1f} | {plain:.1f} |", flush=True)


if __name__ == "__main__":
    main()
