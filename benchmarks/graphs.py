"""How long the clipped sum of a physical batch takes without the Python between its operations.

On a GPU each operation starts a kernel, and a small network waits for the host. For physical batches of one shape
(``privacy.constant_shapes``), the forward and the backward pass and the clipped sum are one sequence of operations,
which reads no number from the device. Here that sequence is

* a CUDA graph: recorded by the device, and started as a whole;
* a program: traced once, and run by torch.fx without vmap, modes and hooks;
* compiled: that program by ``torch.compile``, and the result as a CUDA graph.

Each has a process, where it takes steps in turn with the step as it is, and must give the same sum. What Python does
beside these operations is not done again, neither ``training_step`` nor the private step's checks, so no training
offers this; the table says what it would save. Run ``python benchmarks/graphs.py --help``.
"""

import argparse
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from step import hardware, positive
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from training_steps import MODELS, autocast_to, quiet, seconds_of, use_tf32

from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients import contribution
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.recording import Recording

Work = Callable[..., Tensor]
"""From weights, images and labels to the clipped sum, a flat tensor."""

PLANS = {"flat": ClipPlan.flat(), "per-layer": ClipPlan.per_layer()}
ON_A_GPU = ("CUDA graph", "compiled, CUDA graph")
WAYS = ("CUDA graph", "program", "compiled", "compiled, CUDA graph")
# The relative difference of two sums in float32; other kernels round otherwise in bfloat16.
_AGREES = {"fp32": 1e-5, "bf16": 5e-2}


def clipped_sum(model: nn.Module, plan: ClipPlan, dtype: str, counted: Tensor) -> Work:
    """The step as it is, of as many examples as ``counted`` (b,) has entries, of which those that are true count."""
    parameters = dict(model.named_parameters())
    total, autocast = ClippedSum(parameters, plan), autocast_to(counted.device.type, dtype)

    def work(weights: Sequence[Tensor], images: Tensor, labels: Tensor) -> Tensor:
        trained = {name: w.detach().requires_grad_() for name, w in zip(parameters, weights, strict=True)}

        def loss(image: Tensor, label: Tensor) -> Tensor:
            logits = functional_call(model, trained, (image.unsqueeze(0),))
            return F.cross_entropy(logits, label.unsqueeze(0))

        total.reset()
        total.begin(len(images), counted)
        recording = Recording(trained, len(images), total.take)
        with autocast():
            losses = recording.run(loss, images, labels)
        recording.backward(losses)
        total.end()
        return total.flat.clone()

    return work


def as_cuda_graph(work: Work, *examples: Any) -> Work:
    """The kernels that ``work`` starts, all at once, on the memory of ``examples``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # libraries choose their kernels and take their memory
            work(*examples)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work(*examples)

    def replay(*examples: Any, kept: Work = work) -> Tensor:  # with what the graph reads
        graph.replay()
        return result

    return replay


def as_program(work: Work, *examples: Any, compiled: bool = False) -> Work:
    """The operations of ``work``, without what leads to them."""
    program = make_fx(work)(*examples)
    run = torch.compile(program, dynamic=False) if compiled else program
    return torch.no_grad()(run)  # type: ignore[no-any-return]


def made(way: str, work: Work, *examples: Any) -> Work:
    """What takes the step in one of ``WAYS``."""
    if way == "CUDA graph":
        return as_cuda_graph(work, *examples)
    other = as_program(work, *examples, compiled=way != "program")
    other(*examples)  # which compiles it
    return as_cuda_graph(other, *examples) if way in ON_A_GPU else other


@contextmanager
def no_number_is_read() -> Iterator[None]:
    """On a CPU too, the sum is taken without a look at numbers, as on a GPU: a program has no branches."""
    before = contribution.read_at_once
    contribution.read_at_once = lambda device: False
    try:
        yield
    finally:
        contribution.read_at_once = before


def compare(way: str, plan: str, options: argparse.Namespace) -> tuple[str, bool]:
    """The end of a row of the table, and whether the sums agree for numbers that the way was not made with."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    use_tf32(False)
    torch.manual_seed(0)
    build, shape, _ = MODELS[options.model]
    model = build().to(device).train()
    weights = [parameter.detach() for parameter in model.parameters()]
    images = torch.randn(options.batch_size, *shape, device=device)
    labels = torch.randint(10, (options.batch_size,), device=device)
    examples = (weights, images, labels)
    counted = torch.ones(options.batch_size, dtype=torch.bool, device=device)  # as where examples are filled up
    with no_number_is_read(), quiet():
        work = clipped_sum(model, PLANS[plan], options.type, counted)
        work(*examples)  # an error of the model is told without what traces it, and what is made once is there
        start = time.perf_counter()
        other = made(way, work, *examples)
        preparing = time.perf_counter() - start
        images.normal_()
        labels.random_(10)
        for weight in weights:
            weight.mul_(1.1)
        expected, found = work(*examples).double(), other(*examples).double()
        difference = float((found - expected).norm() / expected.norm())
        times = [
            [seconds_of(lambda each=each: each(*examples), device) for each in (work, other)]
            for _ in range(options.rounds)
        ]
    plain, without = (1e3 * statistics.median(column) for column in zip(*times, strict=True))
    row = f"{preparing:.1f} | {plain:.1f} | {without:.1f} | {without / plain:.2f} | {difference:.0e} |"
    return row, difference <= _AGREES[options.type]


def told(way: str, plan: str, options: argparse.Namespace) -> tuple[str, bool]:
    """The same, or a row with the error: the table shows what does not work."""
    try:
        return compare(way, plan, options)
    except Exception as error:
        first = error.__context__ if isinstance(error.__context__, Exception) else error
        words = f"{type(first).__name__}: {first}".splitlines()[0][:200].replace("|", "/")
        return f"{words} | | | | |", True


def in_a_process(way: str, plan: str, options: argparse.Namespace) -> tuple[str, bool]:
    """The same in a process of its own: a graph that failed leaves the device in a state that others would meet."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(told, way, plan, options).result()
        except BrokenProcessPool:
            return "the process died; it may have run out of memory | | | | |", True


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="wrn16-4", choices=MODELS)
    parser.add_argument("--type", default="fp32", choices=_AGREES)
    parser.add_argument("--clipping", nargs="+", default=list(PLANS), choices=PLANS)
    parser.add_argument("--batch-size", type=positive, default=64 if on_gpu else 16)
    parser.add_argument("--ways", nargs="+", default=WAYS if on_gpu else ["program"], choices=WAYS)
    parser.add_argument("--rounds", type=positive, default=7, help="steps that count (default 7)")
    options = parser.parse_args(arguments)
    if not on_gpu and (needs := [way for way in options.ways if way in ON_A_GPU]):
        parser.error(f"--ways {', '.join(needs)} needs a GPU that torch can use")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    options = parse(arguments)
    print(f"{hardware('cuda' if torch.cuda.is_available() else 'cpu', torch.get_num_threads())}\n")
    print("| model | type | batch | clipping | way | s before | as it is, ms | this way, ms | ratio | difference |")
    print("| --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: |", flush=True)
    wrong = []
    for way in options.ways:
        for plan in options.clipping:
            row, agrees = in_a_process(way, plan, options)
            wrong += [] if agrees else [f"{way} ({plan})"]
            print(f"| {options.model} | {options.type} | {options.batch_size} | {plan} | {way} | {row}", flush=True)
    if wrong:
        sys.exit(f"Another sum than that of the step as it is: {', '.join(wrong)}.")


if __name__ == "__main__":
    main()
