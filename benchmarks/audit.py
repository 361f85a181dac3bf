"""How often `dpl audit` finds faults that are planted in the product, and how often it raises a false alarm.

Each run is one audit of a configuration, with the named function of the product replaced. A line per run goes to
``audit.jsonl``, with the checks that failed; the table counts them. Two ranks are two processes of this machine. Run
``python benchmarks/audit.py --help``.
"""

import argparse
import contextlib
import io
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parent))

import torch
from measuring import arguments, table

from dp_lightning.cli import main as dpl
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.products import Product
from dp_lightning.privacy.noise import GaussianNoise

QUICK = ["--config", "configs/digits.yaml", "--trainer.accelerator", "cpu", "--privacy.target_epsilon", "null"]
QUICK += ["--privacy.noise_multiplier", "1.0"]


def _noise(change: Callable[[torch.Tensor, torch.Tensor, float, int], torch.Tensor]) -> Any:
    """Replace the noise that is added: ``change`` gets the sum, the noise, the deviation and the step."""
    add_to = GaussianNoise.add_to

    def changed(self: GaussianNoise, tensor: torch.Tensor, deviation: float, *, step: int) -> torch.Tensor:
        noise = add_to(self, torch.zeros_like(tensor), deviation, step=step)
        return change(tensor, noise, deviation, step)

    return patch.object(GaussianNoise, "add_to", changed)


def _scaled_noise(factor: float) -> Any:
    return _noise(lambda tensor, noise, deviation, step: tensor + factor * noise)


def _noiseless_bias() -> Any:
    def without_the_last(tensor: torch.Tensor, noise: torch.Tensor, deviation: float, step: int) -> torch.Tensor:
        noise[-10:] = 0  # the bias of ten classes
        return tensor + noise

    return _noise(without_the_last)


def _twice() -> Any:
    def twice(tensor: torch.Tensor, noise: torch.Tensor, deviation: float, step: int) -> torch.Tensor:
        return tensor + noise + deviation * torch.randn_like(noise)

    return _noise(twice)


def _unclipped_when_noised() -> Any:
    """Clip to twice C only if noise is added, which the measurement without noise cannot see."""
    return _noise(lambda tensor, noise, deviation, step: tensor * (2 if deviation > 0 else 1) + noise)


def _other_normals(change: Callable[[torch.Tensor, int], torch.Tensor]) -> Any:
    normals = GaussianNoise._normals

    def changed(self: GaussianNoise, shape: Any, device: Any, step: int) -> torch.Tensor:
        return change(normals(self, shape, device, step), step)

    return patch.object(GaussianNoise, "_normals", changed)


def _reused(every: int) -> Any:
    """The noise repeats every ``every`` steps."""
    kept: dict[Any, torch.Tensor] = {}
    return _other_normals(lambda noise, step: kept.setdefault((noise.shape, step % every), noise).clone())


def _shared() -> Any:
    def repeated(noise: torch.Tensor, step: int) -> torch.Tensor:
        noise[2464:2480] = noise[160:176]  # one kernel of the second convolution, and its bias
        return noise

    return _other_normals(repeated)


def _uniform() -> Any:
    return _other_normals(lambda noise, step: (torch.rand_like(noise) - 0.5) * math.sqrt(12.0))


def _double_factors() -> Any:
    factors = ClipPlan.factors
    return patch.object(ClipPlan, "factors", lambda self, norms, bounds: 2 * factors(self, norms, bounds))


def _dropped_root() -> Any:
    return patch.object(ClipPlan, "bounds", lambda self, labels: [self.max_grad_norm] * len(labels))


def _short_norms() -> Any:
    norms = Product.norms
    return patch.object(Product, "norms", lambda self: {name: values / 2 for name, values in norms(self).items()})


Fault = tuple[Callable[[], Any], list[str]]
#: By name: what to plant, and further options of `dpl fit`.
FAULTS: dict[str, Fault] = {
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
    "noise shared by two tensors": (_shared, []),
    "uniform noise": (_uniform, []),
    "noise added twice": (_twice, []),
}
#: On two ranks.
OF_RANKS = {
    "honest": FAULTS["honest"],
    "noise added twice on one rank": (_twice, []),
    "noise divided by the ranks": (lambda: _scaled_noise(0.5), []),
}


def audited(folder: Path, arguments: Sequence[str]) -> dict[str, Any] | None:
    """The numbers of ``dpl audit``; None on the second of two ranks, which writes none."""
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        dpl(["audit", *arguments, "--out", str(folder)])
    numbers = folder / "numbers.json"
    return json.loads(numbers.read_text()) if numbers.exists() else None


def plant(name: str, faults: Mapping[str, Fault], out: Path, arguments: Sequence[str]) -> None:
    """Audit with a fault, and add a line to the file of the runs."""
    change, more = faults[name]
    start = time.perf_counter()
    with change(), tempfile.TemporaryDirectory() as folder:
        numbers = audited(Path(folder), [*arguments, *more])
    if numbers is None:
        return
    found = [check["subject"] for check in numbers["checks"] if not check["holds"]]
    shown = max(numbers["epsilon_shown"], *numbers["epsilon_shown_by_tensor"].values())
    line = {"fault": name if faults is FAULTS else f"two ranks: {name}", "found_by": found}
    line |= {"canaries_above": shown > numbers["epsilon_claimed"], "seconds": round(time.perf_counter() - start, 2)}
    with out.open("a") as file:
        file.write(json.dumps(line) + "\n")


def counted(lines: Sequence[dict[str, Any]]) -> str:
    """How often each fault was found, and by what."""
    rows = []
    for name in dict.fromkeys(line["fault"] for line in lines):
        mine = [line for line in lines if line["fault"] == name]
        by = sorted({check for line in mine for check in line["found_by"]})
        found, above = (sum(map(bool, (line[key] for line in mine))) for key in ("found_by", "canaries_above"))
        rows.append((name, f"{found} of {len(mine)}", "; ".join(by) or "-", f"{above} of {len(mine)}"))
    return table(["planted", "found", "by", "canaries above the claim"], rows)


def main(given: Sequence[str] | None = None) -> None:
    """Run the campaign and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=10, help="audits of each fault; default: 10")
    parser.add_argument("--honest", type=int, default=20, help="audits of an honest product; default: 20")
    parser.add_argument("--ranks", type=int, default=0, help="audits of each fault on two ranks; default: 0")
    parser.add_argument("--out", type=Path, default=Path("audit.jsonl"), help="file of the runs; default: audit.jsonl")
    parser.add_argument("--rank", choices=sorted(OF_RANKS), help=argparse.SUPPRESS)
    options, of_fit = parser.parse_known_args(given)
    of_fit = of_fit or QUICK
    if options.rank is not None:  # one of two processes: Lightning starts the second one with the same command line
        plant(options.rank, OF_RANKS, options.out, [*of_fit, "--trainer.devices", "2"])
        return
    options.out.unlink(missing_ok=True)
    for name in FAULTS:
        for _ in range(options.honest if name.startswith("honest") else options.runs):
            plant(name, FAULTS, options.out, of_fit)
    for name in list(OF_RANKS) * options.ranks:
        command = [sys.executable, __file__, "--rank", name, "--out", str(options.out.resolve()), *of_fit]
        subprocess.run(command, check=True, capture_output=True)
    print(counted([json.loads(line) for line in options.out.read_text().splitlines()]))


if __name__ == "__main__":
    main()
