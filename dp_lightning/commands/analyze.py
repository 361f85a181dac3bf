"""`dpl analyze`: signal and noise of a run's gradients, layer by layer (Shanmugam et al. 2026, Section 4).

It computes gradients of the training data without noise. Its output goes to `unprotected/` and must not be released.
The signal-to-noise ratio that `dpl fit` logs as privacy/snr comes from privatized gradients alone.
"""

import argparse
import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_lightning.analysis import (
    bulk_density,
    bulk_edges,
    detection_batch_size,
    direction_recovery,
    entropy_rank,
    newton_schulz_cosines,
    participation_ratio,
    recovery_batch_size,
)
from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.commands.analysis_run import AnalysisRun
from dp_lightning.commands.configs import with_paths
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.document import Document, figure, place_on_axis, style

_WARNING = (
    "UNPROTECTED: these numbers are computed from raw gradients of the training data. No noise protects them. Do not "
    "release them, and do not use them to choose the settings of a private run."
)
# Matrices whose spectra and directions are drawn; more are hard to tell apart.
_DRAWN = 4
_TRIALS, _STEPS = 100, 5

Facts = dict[str, Any]


def main(arguments: list[str]) -> None:
    """Analyse and write a page; options unknown to the analysis are passed on to ``dpl fit``."""
    options, of_fit = _parser().parse_known_args(with_paths(arguments[1:]))
    if not any(argument.startswith("--config") for argument in of_fit):
        raise ConfigurationError("dpl analyze needs the --config of a run, such as configs/wrn16_cifar10.yaml.")
    if options.batch_sizes is not None and options.kind in ("spectrum", "newton-schulz"):
        raise ConfigurationError(
            f"dpl analyze {options.kind} looks at one batch size: set --privacy.expected_batch_size instead of "
            "--batch-sizes."
        )
    folder: Path = options.out / "unprotected" / options.kind
    require_writable(folder, "--out")
    run = AnalysisRun(of_fit, options.ckpt_path, num_batches=options.batches, batch_sizes=options.batch_sizes)
    title, fill = KINDS[options.kind]
    page = Document(f"{title}: {type(run.module).__name__}, {type(run.data).__name__}", folder, warning=_WARNING)
    draws = "one Poisson draw" if run.num_batches == 1 else f"{run.num_batches} Poisson draws"
    page.say(f"Clipped gradients of {draws} at fixed parameters, {run.clip_plan.describe()['kind']} clipping.")
    for name, taken in (("disk", "at the parameters themselves"), ("frozen_until", "for all parameters")):
        if run.settings.get(name) is not None:
            page.say(f"privacy.{name} is left out: the gradients are taken {taken}.")
    facts = fill(run, page)
    with replacing(folder / "numbers.json") as file:
        file.write((json.dumps({"unprotected": page.warning, **facts}, indent=1) + "\n").encode())
    page.publish("page")


def _snr(run: AnalysisRun, page: Document) -> Facts:
    """Norms of signal and noise by batch size."""
    names = ("batch_size", "noise_multiplier", "signal", "noise", "snr")
    facts: list[dict[str, Any]] = []
    for size in run.batch_sizes if run.asked else [run.batch_size]:
        plan, measured = run.plan(size), run.measure(size)
        signal = statistics.fmean(measured.norms)
        noise = plan.noise_norm(num_parameters=measured.num_parameters, sensitivity=run.clip_plan.sensitivity)
        facts.append(dict(zip(names, (size, plan.noise_multiplier, signal, noise, signal / noise), strict=True)))
    page.say("Signal is the norm of the clipped gradient divided by B, noise the root mean square norm of the noise.")
    rows = [[str(fact["batch_size"]), *(f"{fact[name]:.3g}" for name in names[1:])] for fact in facts]
    page.table([["B", "sigma", "signal", "noise", "signal / noise"], *rows])
    sizes = [fact["batch_size"] for fact in facts]
    with figure(page, "snr", "Norms of signal and noise, and their ratio, by batch size", panels=2) as (norms, ratio):
        _draw(norms, sizes, {name: [fact[name] for fact in facts] for name in ("signal", "noise")}, "norm")
        norms.set_yscale("log")
        _draw(ratio, sizes, {"signal / noise": [fact["snr"] for fact in facts]}, "signal / noise")
    return {"by_batch_size": facts}


def _spectrum(run: AnalysisRun, page: Document) -> Facts:
    """Singular values of each matrix, without and with noise, beside those of noise alone."""
    level = run.noise_level(run.batch_size)
    matrices = _matrices(run)
    head = ["matrix", "m x n", "s1", "s2", "noise edge", "values above it", "rank", "rank with noise"]
    rows, facts = [[*head, "entropy rank", "with noise"]], {}
    for name, clean in matrices.items():
        values, seen = torch.linalg.svdvals(clean), torch.linalg.svdvals(_noised(run, clean))
        edge = bulk_edges(*clean.shape, noise_level=level)[1]
        ranks = {
            "effective": float(participation_ratio(values)),
            "effective_with_noise": float(participation_ratio(seen)),
            "entropy": float(entropy_rank(values)),
            "entropy_with_noise": float(entropy_rank(seen)),
        }
        cells = [*(f"{number:.3g}" for number in (*_first_two(values), edge)), str(int((seen > edge).sum()))]
        rows.append([name, _shape(clean), *cells, *(f"{rank:.1f}" for rank in ranks.values())])
        facts[name] = {"values": values.tolist(), "with_noise": seen.tolist(), "noise_edge": edge, "ranks": ranks}
    page.say(
        f"B = {run.batch_size}. The rank is the paper's effective rank, (sum s)^2 / sum s^2; the entropy rank is that "
        "of Roy and Vetterli 2007. The noise edge is the upper edge of the Marchenko-Pastur bulk."
    )
    page.table(rows)
    drawn = _largest(matrices)
    caption = "Singular values without noise (marks), with noise (bars), and the density of noise alone (line)"
    with figure(page, "spectrum", caption, panels=len(drawn)) as axes:
        for ax, (name, clean) in zip(axes, drawn.items(), strict=True):
            values, seen = facts[name]["values"], facts[name]["with_noise"]
            grid = torch.linspace(*bulk_edges(*clean.shape, noise_level=level), 200)
            ax.hist(seen, max(10, len(seen) // 6), density=True, alpha=0.5, label="with noise")
            ax.plot(grid, bulk_density(grid, *clean.shape, noise_level=level), color="black", label="noise alone")
            ax.plot(values, [0.0] * len(values), "|", color="red", markersize=12, label="without noise")
            ax.set(title=f"{name} ({_shape(clean)})", xlabel="singular value", ylabel="density")
    return facts


def _recovery(run: AnalysisRun, page: Document) -> Facts:
    """The batch sizes above which each matrix passes Wedin's bound and the spiked-matrix threshold."""
    sizes = run.batch_sizes
    sigmas = {size: run.plan(size).noise_multiplier for size in sizes}
    rows = [["matrix", "m x n", "s1", "s1 - s2", *(f"B = {size}" for size in sizes)]]
    facts: dict[str, Any] = {}
    for name, matrix in _matrices(run).items():
        top, second = _first_two(torch.linalg.svdvals(matrix))
        thresholds: dict[int, dict[str, float]] = {}
        for size, sigma in sigmas.items():
            given: dict[str, Any] = {"noise_multiplier": sigma, "sensitivity": run.clip_plan.sensitivity}
            thresholds[size] = {
                "recovery": recovery_batch_size(top - second, *matrix.shape, **given),
                "detection": detection_batch_size(top, *matrix.shape, **given),
            }
        cells = [
            "yes" if size >= needed["recovery"] else "detected" if size >= needed["detection"] else "no"
            for size, needed in thresholds.items()
        ]
        rows.append([name, _shape(matrix), f"{top:.3g}", f"{top - second:.3g}", *cells])
        facts[name] = {"shape": list(matrix.shape), "top": top, "gap": top - second, "thresholds": thresholds}
    rates = {
        kind: [statistics.fmean(size >= fact["thresholds"][size][kind] for fact in facts.values()) for size in sizes]
        for kind in ("recovery", "detection")
    }
    for kind, shares in rates.items():
        rows.append([f"{kind}: share of matrices", "", "", "", *(f"{100 * share:.0f} %" for share in shares)])
    page.say(
        f"Singular values at B = {run.batch_size}. yes: B is above sigma S (sqrt(m) + sqrt(n)) / (s1 - s2), beyond "
        "which Wedin's bound is informative; this is sufficient, not necessary. detected: B is above "
        "sigma S (m n)^(1/4) / s1, where the leading singular vectors begin to correlate with the signal. Sigma is "
        "the noise multiplier of the privacy plan at each batch size."
    )
    page.table(rows)
    with figure(page, "recovery", "Share of matrices that pass each threshold, by batch size") as (ax,):
        _draw(ax, sizes, rates, "share of matrices")
    return {"noise_multipliers": sigmas, "matrices": facts, "rates": rates}


def _newton_schulz(run: AnalysisRun, page: Document) -> Facts:
    """How close the iterates get to the polar factor, without and with noise."""
    matrices = _matrices(run)
    rows = [["matrix", "m x n", "gradient", *(f"k = {k}" for k in range(_STEPS + 1))]]
    facts: dict[str, Any] = {}
    for name, clean in matrices.items():
        facts[name] = {}
        for kind, matrix in (("without noise", clean), ("with noise", _noised(run, clean))):
            facts[name][kind] = cosines = newton_schulz_cosines(matrix, steps=_STEPS).tolist()
            rows.append([name, _shape(clean), kind, *(f"{cosine:.3f}" for cosine in cosines)])
    page.say(
        f"B = {run.batch_size}. The cosine between the k-th iterate with the coefficients of Muon and the polar factor "
        "U V^T; k = 0 is the gradient itself."
    )
    page.table(rows)
    with figure(page, "newton_schulz", "Cosine between Newton-Schulz iterates and the polar factor", panels=2) as axes:
        for ax, kind in zip(axes, ("without noise", "with noise"), strict=True):
            for number, name in enumerate(_largest(matrices)):
                ax.plot(range(_STEPS + 1), facts[name][kind], label=name, **style(number))
            ax.set(title=kind, ylim=(0, 1.02), xlabel="steps k", ylabel="cosine")
    return facts


def _direction(run: AnalysisRun, page: Document) -> Facts:
    """The cosine of the first singular vector with and without noise, by simulation."""
    levels = {size: run.noise_level(size) for size in run.batch_sizes}
    matrices = {name: matrix for name, matrix in _matrices(run).items() if matrix.any()}
    if not matrices:
        raise ConfigurationError("The gradients of all matrices are zero, so they have no direction. Give --ckpt-path.")
    rows = [["matrix", "m x n", *(f"B = {size}" for size in levels)]]
    facts: dict[str, Any] = {}
    for name, matrix in _largest(matrices).items():
        values, facts[name] = torch.linalg.svdvals(matrix), {}
        for size, level in levels.items():
            found = direction_recovery(values, *matrix.shape, noise_level=level, trials=_TRIALS)
            facts[name][size] = {"mean": float(found.mean()), "deviation": float(found.std())}
        cells = [f"{fact['mean']:.3f} ± {fact['deviation']:.3f}" for fact in facts[name].values()]
        rows.append([name, _shape(matrix), *cells])
    page.say(
        f"Singular values at B = {run.batch_size}, of the {len(facts)} largest matrices that are not zero. The cosine "
        f"between the first left singular vector with and without noise, mean and deviation over {_TRIALS} draws."
    )
    page.table(rows)
    with figure(page, "direction", "Cosine of the first direction with and without noise") as (ax,):
        lines = {name: [fact["mean"] for fact in by_size.values()] for name, by_size in facts.items()}
        _draw(ax, list(levels), lines, "cosine")
    return facts


#: Title and function of the page of each kind. A function adds tables and figures, and returns the numbers by name.
KINDS: Mapping[str, tuple[str, Callable[[AnalysisRun, Document], Facts]]] = {
    "snr": ("Signal and noise of the whole gradient", _snr),
    "spectrum": ("Singular values of the gradient's matrices", _spectrum),
    "recovery": ("Recovery of the first singular direction", _recovery),
    "newton-schulz": ("Convergence of Newton-Schulz", _newton_schulz),
    "direction": ("Recovery of directions by simulation", _direction),
}


def _matrices(run: AnalysisRun) -> dict[str, Tensor]:
    """The gradients of the run's matrices at its batch size."""
    found = run.measure(run.batch_size).matrices
    if not found:
        raise ConfigurationError("The model trains no matrix, so there is no spectrum to look at.")
    return found


def _noised(run: AnalysisRun, clean: Tensor) -> Tensor:
    """The matrix plus noise at the run's level; matrices of the same shape get the same noise."""
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    return clean + run.noise_level(run.batch_size) * noise


def _largest(matrices: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The largest matrices of different shapes, in the order of the network."""
    by_shape: dict[tuple[int, ...], str] = {}
    for name in sorted(matrices, key=lambda name: -matrices[name].numel()):
        by_shape.setdefault(tuple(matrices[name].shape), name)
    chosen = list(by_shape.values())[:_DRAWN]
    return {name: matrix for name, matrix in matrices.items() if name in chosen}


def _first_two(values: Tensor) -> tuple[float, float]:
    """s1 and s2; s2 is 0 for a matrix of one row or column."""
    first, second, *_ = (*values.tolist(), 0.0)
    return first, second


def _shape(matrix: Tensor) -> str:
    return f"{matrix.shape[0]} x {matrix.shape[1]}"


def _draw(ax: Any, sizes: list[int], lines: Mapping[str, list[float]], y: str) -> None:
    """Draw lines over the batch sizes by their labels."""
    places = place_on_axis(ax, [str(size) for size in sizes])
    for number, (label, values) in enumerate(lines.items()):
        ax.plot(places, values, label=label, **style(number))
    ax.set(xlabel="expected batch size", ylabel=y)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl analyze",
        description=__doc__,
        epilog="Every other option is one of dpl fit, such as --config and --data.init_args.root.",
        allow_abbrev=False,
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument(
        "--ckpt-path", "--ckpt_path", type=Path, help="checkpoint with the weights; default: the initial weights"
    )
    parser.add_argument("--batches", type=int, default=1, help="Poisson draws to average over; default: 1")
    parser.add_argument(
        "--batch-sizes",
        type=int,
        nargs="+",
        metavar="B",
        help="expected batch sizes to compare, for snr (default: the run's own), recovery and direction (default: "
        "256 to 8192 and the run's own)",
    )
    parser.add_argument("--out", type=Path, default=Path("analysis"), help="folder of the page; default: analysis")
    return parser
