"""What post-processing adds to a logical step: each chain's time compared with the gradient work of B examples.

Chains and one physical batch take turns; the figure is the median over rounds. The chains get fresh noise in the shapes
of the model's gradients. Run ``python benchmarks/postprocess.py --help``.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import step as step_benchmark
import torch
import training_steps

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


def _ema() -> Transform:
    return Momentum(0.95, kind="ema_nesterov")


CHAINS: dict[str, Callable[[], list[Transform]]] = {
    "heavy-ball momentum": lambda: [Momentum(0.9)],
    "Kalman filter": lambda: [Kalman(process_to_measurement_ratio=1.5)],
    "low-pass filter": lambda: [LowPass()],
    "normalized": lambda: [_ema(), Normalize()],
    "noise-normalized": lambda: [_ema(), NoiseNormalize()],
    "DP-Muon": lambda: [_ema(), Orthogonalize()],
    "DP-Muon, bfloat16": lambda: [_ema(), Orthogonalize(precision="bfloat16")],
    "DP-Muon, polar express, 6 steps": lambda: [_ema(), Orthogonalize(coefficients="polar_express", steps=6)],
    "DP-Muon, exact": lambda: [_ema(), Orthogonalize(coefficients="exact")],
    "DP-Muon-S": lambda: [Momentum(0.9), MagnitudeScale(Orthogonalize())],
    "DP-Muon-S, power iteration": lambda: [Momentum(0.9), MagnitudeScale(Orthogonalize(), method="power")],
    "gated": lambda: [_ema(), GatedOrthogonalize()],
    "shrunk": lambda: [_ema(), SpectralShrinkage()],
    "selective": lambda: [_ema(), SelectiveOrthogonalize()],
}


def held(chain: Chain) -> int:
    """Bytes of the state of a chain."""
    state = chain.state_dict()
    transforms = [slots for by_name in state["transforms"].values() for slots in by_name.values()]
    noise = [slots for by_name in state["noise"] for slots in by_name.values()]
    return sum(value.numel() * value.element_size() for slots in (*transforms, *noise) for value in slots.values())


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=training_steps.MODELS, default="wrn16-4")
    positive = step_benchmark.positive
    parser.add_argument("--expected-batch-size", type=positive, default=2048)
    parser.add_argument("--batch-size", type=positive, help="physical batch; default: by model and device")
    parser.add_argument("--rounds", type=positive, default=7)
    parser.add_argument("--json", type=Path, help="write every time here too")
    return parser.parse_args(arguments)


def main() -> None:
    """Measure and print."""
    options = parse()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, images, labels = training_steps.in_channels_last(options.model, device, options.batch_size)
    count = len(images)
    take_step = training_steps.WAYS["ours flat"](model, training_steps.autocast_to(device.type, "fp32"))
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    chains = {name: Chain(make()) for name, make in CHAINS.items()}
    times: dict[str, list[float]] = {"gradient": [], **{name: [] for name in chains}}

    def timed(name: str, work: Callable[[], object]) -> None:
        times[name].append(training_steps.seconds_of(work, device))

    for turn in range(options.rounds + 1):
        timed("gradient", lambda: take_step(images, labels))
        gradients = {name: torch.randn(shape, device=device) for name, shape in shapes.items()}
        for name, chain in chains.items():
            timed(name, partial(chain, gradients, noise=1.0))
        if turn == 0:
            for values in times.values():
                values.clear()
    median = {name: statistics.median(values) for name, values in times.items()}
    step = median["gradient"] / count * options.expected_batch_size
    bytes_of_parameters = sum(4 * shape.numel() for shape in shapes.values())
    print(f"{step_benchmark.hardware(device.type, torch.get_num_threads())}\n")
    print(
        f"{options.model}: {step:.2f} s for the gradients of "
        f"{options.expected_batch_size} examples ({1e3 * median['gradient'] / count:.2f} ms each)\n"
    )
    print("| chain | ms | of the logical step | state, in copies of the parameters |")
    print("| --- | --- | --- | --- |")
    for name, chain in chains.items():
        print(
            f"| {name} | {1e3 * median[name]:.1f} | {100 * median[name] / step:.2f} % | "
            f"{held(chain) / bytes_of_parameters:.2f} |"
        )
    if options.json:
        options.json.write_text(json.dumps({"times": times, "batch_size": count}, indent=1))


if __name__ == "__main__":
    main()
