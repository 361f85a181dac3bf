"""How often `dpl audit` finds faults that are planted in the product, and how often it raises a false alarm.

Each run is one audit of a configuration, with the named function of the product replaced. A line per run goes to
``audit.jsonl``, with the checks that failed; the table counts them. Two ranks are two processes of this machine. Run
``python benchmarks/audit.py --help``.
"""

import argparse
import contextlib
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from dp_lightning.commands.audit import Audit
from dp_lightning.commands.audit_runs import AuditRuns
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.products import Product
from dp_lightning.privacy.noise import GaussianNoise

QUICK = ["--config", "configs/digits.yaml", "--trainer.accelerator", "cpu", "--privacy.target_epsilon", "null"]
QUICK += ["--privacy.noise_multiplier", "1.0"]


def _scaled_noise(factor: float) -> Any:
    add_to = GaussianNoise.add_to

    def scaled(self: GaussianNoise, tensor: torch.Tensor, deviation: float, *, step: int) -> torch.Tensor:
        return add_to(self, tensor, factor * deviation, step=step)

    return patch.object(GaussianNoise, "add_to", scaled)


def _noiseless_bias() -> Any:
    add_to = GaussianNoise.add_to

    def without_the_last(self: GaussianNoise, tensor: torch.Tensor, deviation: float, *, step: int) -> torch.Tensor:
        noised = add_to(self, tensor, deviation, step=step)
        noised[-10:] = tensor[-10:]  # the bias of ten classes
        return noised

    return patch.object(GaussianNoise, "add_to", without_the_last)


def _reused(every: int) -> Any:
    """The noise repeats every ``every`` steps."""
    normals, kept = GaussianNoise._normals, {}

    def again(self: GaussianNoise, shape: Any, device: Any, step: int) -> torch.Tensor:
        key = (tuple(shape), step % every)
        if key not in kept:
            kept[key] = normals(self, shape, device, step)
        return kept[key].clone()

    return patch.object(GaussianNoise, "_normals", again)


def _other_normals(change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    normals = GaussianNoise._normals
    return patch.object(GaussianNoise, "_normals", lambda self, *args: change(normals(self, *args)))


def _repeated(noise: torch.Tensor) -> torch.Tensor:
    """The same numbers for each kernel of the second convolution and for its bias."""
    noise[2464:2480] = noise[160:176]
    return noise


def _twice() -> Any:
    add_to = GaussianNoise.add_to

    def twice(self: GaussianNoise, tensor: torch.Tensor, deviation: float, *, step: int) -> torch.Tensor:
        return add_to(self, add_to(self, tensor, deviation, step=step), deviation, step=step + 10**6)

    return patch.object(GaussianNoise, "add_to", twice)


def _double_factors() -> Any:
    factors = ClipPlan.factors
    return patch.object(ClipPlan, "factors", lambda self, norms, bounds: 2 * factors(self, norms, bounds))


def _dropped_root() -> Any:
    return patch.object(ClipPlan, "bounds", lambda self, labels: [self.max_grad_norm] * len(labels))


def _short_norms() -> Any:
    norms = Product.norms

    def half(self: Product) -> Any:
        return {name: values / 2 for name, values in norms(self).items()}

    return patch.object(Product, "norms", half)


def _unclipped_when_noised() -> Any:
    """Clip to twice C only if noise is added, which the measurement without noise cannot see."""
    add_to = GaussianNoise.add_to

    def doubled(self: GaussianNoise, tensor: torch.Tensor, deviation: float, *, step: int) -> torch.Tensor:
        return add_to(self, tensor * (2 if deviation > 0 else 1), deviation, step=step)

    return patch.object(GaussianNoise, "add_to", doubled)


_ROOT12 = math.sqrt(12.0)
#: By name: what to plant, and further options of `dpl fit`.
FAULTS: dict[str, tuple[Callable[[], Any], list[str]]] = {
    "honest": (contextlib.nullcontext, []),
    "honest, per layer": (contextlib.nullcontext, ["--privacy.clipping", "per_layer"]),
    "sigma / 2": (lambda: _scaled_noise(0.5), []),
    "sigma / sqrt(2)": (lambda: _scaled_noise(math.sqrt(0.5)), []),
    "sigma 5 % too small": (lambda: _scaled_noise(0.95), []),
    "2 C": (_double_factors, []),
    "2 C where there is noise": (_unclipped_when_noised, []),
    "sqrt(L) dropped, per layer": (_dropped_root, ["--privacy.clipping", "per_layer"]),
    "norms of linear and convolutional layers halved": (_short_norms, []),
    "a bias without noise": (_noiseless_bias, []),
    "noise reused from step to step": (lambda: _reused(1), []),
    "noise reused every third step": (lambda: _reused(3), []),
    "noise shared by two tensors": (lambda: _other_normals(_repeated), []),
    "uniform noise": (lambda: _other_normals(lambda noise: (torch.rand_like(noise) - 0.5) * _ROOT12), []),
    "noise added twice": (_twice, []),
}
#: On two ranks.
OF_RANKS = {
    "honest": FAULTS["honest"],
    "noise added twice on one rank": (_twice, []),
    "noise divided by the ranks": (lambda: _scaled_noise(0.5), []),
}


def audited(arguments: Sequence[str], *, canaries: int = 500) -> Audit:
    """The audit of a configuration."""
    return Audit(AuditRuns(arguments), canaries)


def row(name: str, audit: Audit, seconds: float) -> dict[str, Any]:
    """A line of the file."""
    found = [check.subject for check in audit.failed]
    shown = {"epsilon_shown": audit.shown, "epsilon_claimed": audit.claimed}
    above = audit.shown > audit.claimed or any(v > audit.claimed for v in audit.shown_by_tensor.values())
    return {"fault": name, "found_by": found, "canaries_above": above, **shown, "seconds": round(seconds, 2)}


def rows(names: Sequence[str], runs: int, arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Audit ``runs`` times with each fault."""
    for number in range(runs):
        for name in names:
            plant, more = FAULTS[name]
            start = time.perf_counter()
            with plant():
                audit = audited([*arguments, *more])
            yield {"run": number, **row(name, audit, time.perf_counter() - start)}


def of_ranks(name: str, out: Path, arguments: Sequence[str]) -> None:
    """One audit on two ranks, in separate processes; Lightning starts the second one with the same command line."""
    command = [sys.executable, __file__, "--rank", name, "--out", str(out), *arguments]
    subprocess.run(command, check=True, capture_output=True)


def one_of_ranks(name: str, out: Path, arguments: Sequence[str]) -> None:
    """What each of the two processes does."""
    plant, more = OF_RANKS[name]
    start = time.perf_counter()
    with plant():
        audit = audited([*arguments, *more, "--trainer.devices", "2"])
    if audit.runs.is_first:
        with out.open("a") as file:
            line = row(f"two ranks: {name}", audit, time.perf_counter() - start)
            file.write(json.dumps(line) + "\n")


def table(lines: Sequence[dict[str, Any]]) -> str:
    """How often each was found, and by what."""
    shown = ["| planted | found | by | canaries above the claim |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys(line["fault"] for line in lines):
        mine = [line for line in lines if line["fault"] == name]
        by = sorted({check for line in mine for check in line["found_by"]})
        found, above = (sum(map(bool, (line[key] for line in mine))) for key in ("found_by", "canaries_above"))
        shown.append(f"| {name} | {found} of {len(mine)} | {'; '.join(by) or '-'} | {above} of {len(mine)} |")
    return "\n".join(shown)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the campaign and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--runs", type=int, default=10, help="audits of each fault; default: 10")
    parser.add_argument("--honest", type=int, default=20, help="audits of an honest product; default: 20")
    parser.add_argument("--ranks", type=int, default=0, help="audits of each fault on two ranks; default: 0")
    parser.add_argument("--out", type=Path, default=Path("audit.jsonl"), help="file of the runs; default: audit.jsonl")
    parser.add_argument("--rank", choices=sorted(OF_RANKS), help=argparse.SUPPRESS)
    options, of_fit = parser.parse_known_args(arguments)
    of_fit = of_fit or QUICK
    if options.rank is not None:
        one_of_ranks(options.rank, options.out.resolve(), of_fit)
        return
    options.out.unlink(missing_ok=True)
    honest = [name for name in FAULTS if name.startswith("honest")]
    planted = [name for name in FAULTS if name not in honest]
    for names, runs in ((honest, options.honest), (planted, options.runs)):
        for line in rows(names, runs, of_fit):
            with options.out.open("a") as file:
                file.write(json.dumps(line) + "\n")
    for _ in range(options.ranks):
        for name in OF_RANKS:
            of_ranks(name, options.out, of_fit)
    print(table([json.loads(line) for line in options.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
