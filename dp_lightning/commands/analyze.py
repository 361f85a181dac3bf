"""`dpl analyze`: signal and noise of a run's gradients, layer by layer (Shanmugam et al. 2026, Section 4).

It computes gradients of the training data without noise, for all parameters and at the parameters themselves, whatever
privacy.frozen_until and privacy.disk say. Its output goes to `unprotected/` and must not be released. The
signal-to-noise ratio that `dpl fit` logs as privacy/snr comes from privatized gradients alone.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dp_lightning.analysis import (
    bulk_density,
    bulk_edges,
    detection_norm,
    direction_recovery,
    participation_ratio,
    recovery_gap,
)
from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.commands.analysis_run import CHANGING, AnalysisRun
from dp_lightning.commands.configs import with_paths
from dp_lightning.experiments.document import Document, figure

_WARNING = (
    "UNPROTECTED: these numbers are computed from raw gradients of the training data. No noise protects them. Do not "
    "release them, and do not use them to choose the settings of a private run."
)
# Matrices whose spectra are drawn and whose directions are simulated.
_DRAWN = 4
_TRIALS = 100

Facts = dict[str, Any]


def main(arguments: list[str]) -> None:
    """Analyse and write a page; options unknown to the analysis are passed on to ``dpl fit``."""
    options, of_fit = _parser().parse_known_args(with_paths(arguments[1:]))
    folder: Path = options.out / "unprotected" / options.kind
    require_writable(folder, "--out")
    run = AnalysisRun(of_fit, options.ckpt_path, num_batches=options.batches, batch_sizes=options.batch_sizes)
    title, fill = KINDS[options.kind]
    page = Document(f"{title}: {type(run.module).__name__}, {type(run.data).__name__}", folder, warning=_WARNING)
    draws = "one Poisson draw" if run.num_batches == 1 else f"{run.num_batches} Poisson draws"
    page.say(f"Clipped gradients of {draws} at fixed parameters, {run.clip_plan.describe()['kind']} clipping.")
    if run.settings["bands"] != 1:
        page.say(
            "The noise is correlated over steps (privacy.bands). Its level, which takes the place of sigma S / B, is "
            "that in single gradients, the root mean square over the steps of the run. In the weights, much of it "
            "cancels."
        )
    if any(run.settings[name] for name in CHANGING):
        page.say("The noise multiplier and the clipping norm are those of the first steps.")
    facts = fill(run, page)
    with replacing(folder / "numbers.json") as file:
        file.write((json.dumps({"unprotected": page.warning, **facts}, indent=1) + "\n").encode())
    page.publish("page")


def _snr(run: AnalysisRun, page: Document) -> Facts:
    """Norms of signal and noise by batch size."""
    names = ("batch_size", "noise_multiplier", "signal", "noise", "snr")
    facts: list[dict[str, Any]] = []
    for size in run.batch_sizes if run.asked else [run.batch_size]:
        sigma, measured = run.plan(size).noise_multiplier, run.measure(size)
        signal = statistics.fmean(measured.norms)
        noise = run.noise_level(size) * math.sqrt(measured.num_parameters)
        facts.append(dict(zip(names, (size, sigma, signal, noise, signal / noise), strict=True)))
    page.say("Signal is the norm of the clipped gradient divided by B, noise the root mean square norm of the noise.")
    rows = [[str(fact["batch_size"]), *(f"{fact[name]:.3g}" for name in names[1:])] for fact in facts]
    page.table([["B", "sigma", "signal", "noise", "signal / noise"], *rows])
    return {"by_batch_size": facts}


def _spectrum(run: AnalysisRun, page: Document) -> Facts:
    """Singular values of each matrix, without and with noise, beside those of noise alone."""
    level = run.noise_level(run.batch_size)
    matrices = run.measure(run.batch_size).matrices
    rows = [["matrix", "m x n", "s1", "s2", "noise edge", "values above it", "rank", "rank with noise"]]
    facts: dict[str, Any] = {}
    for name, clean in matrices.items():
        noise = level * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
        values, seen = torch.linalg.svdvals(clean), torch.linalg.svdvals(clean + noise)
        edge = bulk_edges(*clean.shape, noise_level=level)[1]
        ranks = {"without_noise": float(participation_ratio(values)), "with_noise": float(participation_ratio(seen))}
        cells = [*(f"{number:.3g}" for number in (*_first_two(values), edge)), str(int((seen > edge).sum()))]
        rows.append([name, _shape(clean), *cells, *(f"{rank:.1f}" for rank in ranks.values())])
        facts[name] = {"values": values.tolist(), "with_noise": seen.tolist(), "noise_edge": edge, "ranks": ranks}
    page.say(
        f"B = {run.batch_size}. The rank is the paper's effective rank, (sum s)^2 / sum s^2. The noise edge is the "
        "upper edge of the Marchenko-Pastur bulk."
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
    levels = {size: run.noise_level(size) * size for size in sizes}  # at a batch size of one
    rows = [["matrix", "m x n", "s1", "s1 - s2", *(f"B = {size}" for size in sizes)]]
    facts: dict[str, Any] = {}
    for name, matrix in run.measure(run.batch_size).matrices.items():
        top, second = _first_two(torch.linalg.svdvals(matrix))
        gap = top - second
        thresholds: dict[int, dict[str, float]] = {}
        for size, level in levels.items():
            thresholds[size] = {
                "recovery": recovery_gap(*matrix.shape, noise_level=level) / gap if gap > 0 else math.inf,
                "detection": detection_norm(*matrix.shape, noise_level=level) / top if top > 0 else math.inf,
            }
        cells = [
            "yes" if size >= needed["recovery"] else "detected" if size >= needed["detection"] else "no"
            for size, needed in thresholds.items()
        ]
        rows.append([name, _shape(matrix), f"{top:.3g}", f"{gap:.3g}", *cells])
        facts[name] = {"shape": list(matrix.shape), "top": top, "gap": gap, "thresholds": thresholds}
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
    sigmas = {size: run.plan(size).noise_multiplier for size in sizes}
    return {"noise_multipliers": sigmas, "matrices": facts, "rates": rates}


def _direction(run: AnalysisRun, page: Document) -> Facts:
    """The cosine of the first singular vector with and without noise, by simulation."""
    levels = {size: run.noise_level(size) for size in run.batch_sizes}
    matrices = {name: matrix for name, matrix in run.measure(run.batch_size).matrices.items() if matrix.any()}
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
    return facts


#: Title and function of the page of each kind. A function adds tables and a figure, and returns the numbers by name.
KINDS: Mapping[str, tuple[str, Callable[[AnalysisRun, Document], Facts]]] = {
    "snr": ("Signal and noise of the whole gradient", _snr),
    "spectrum": ("Singular values of the gradient's matrices", _spectrum),
    "recovery": ("Recovery of the first singular direction", _recovery),
    "direction": ("Recovery of directions by simulation", _direction),
}


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
        "--batch_sizes",
        type=int,
        nargs="+",
        metavar="B",
        help="expected batch sizes to compare, for snr (default: the run's own), recovery and direction (default: "
        "256 to 8192 and the run's own)",
    )
    parser.add_argument("--out", type=Path, default=Path("analysis"), help="folder of the page; default: analysis")
    return parser
