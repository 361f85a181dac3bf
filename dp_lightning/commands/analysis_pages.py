"""The pages of `dpl analyze`, one function each: from a run to tables, figures and numbers."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from dp_lightning.commands.analysis_run import AnalysisRun
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.document import Document
from dp_lightning.experiments.figures import figure, place_on_axis, style

_WARNING = (
    "UNPROTECTED: these numbers are computed from raw gradients of the training data. No noise protects them. Do not "
    "release them, and do not choose settings of a private run by them."
)
# Matrices whose spectra and directions are drawn; more are hard to tell apart.
_DRAWN = 4
_TRIALS = 100
_STEPS = 5


@dataclass(frozen=True)
class Page:
    """What an analysis has found."""

    document: Document
    facts: dict[str, Any]
    """Numbers, by name."""


def snr(run: AnalysisRun, folder: Path) -> Page:
    """Norms of signal and noise by batch size."""
    rows, facts = [["B", "sigma", "signal", "noise", "signal / noise"]], []
    for size in run.batch_sizes if run.asked else [run.batch_size]:
        plan, measured = run.plan(size), run.measure(size)
        signal = statistics.fmean(measured.norms)
        noise = plan.noise_norm(num_parameters=measured.num_parameters, sensitivity=run.clip_plan.sensitivity)
        numbers = (plan.noise_multiplier, signal, noise, signal / noise)
        rows.append([str(size), *(f"{number:.3g}" for number in numbers)])
        names = ("batch_size", "noise_multiplier", "signal", "noise", "snr")
        facts.append(dict(zip(names, (size, *numbers), strict=True)))
    page = _page(run, "Signal and noise of the whole gradient")
    page.say("Signal is the norm of the clipped gradient divided by B, noise the root mean square norm of the noise.")
    page.table(rows)
    if len(facts) > 1:
        with figure(page, folder, "snr", "Norms of signal and noise, and their ratio, by batch size", panels=2) as axes:
            places = place_on_axis(axes[0], [str(fact["batch_size"]) for fact in facts])
            for number, name in enumerate(("signal", "noise")):
                axes[0].plot(places, [fact[name] for fact in facts], label=name, **style(number))
            axes[0].set_yscale("log")
            axes[0].legend(frameon=False)
            place_on_axis(axes[1], [str(fact["batch_size"]) for fact in facts])
            axes[1].plot(places, [fact["snr"] for fact in facts], **style(2))
            axes[1].axhline(1.0, color="black", linestyle="--", linewidth=1)
            _label(axes, "expected batch size", ["norm", "signal / noise"])
    return Page(page, {"by_batch_size": facts})


def spectrum(run: AnalysisRun, folder: Path) -> Page:
    """Singular values of each matrix, without and with noise, beside those of noise alone."""
    level = run.noise_level(run.plan(run.batch_size))
    matrices = _matrices(run)
    head = ["matrix", "m x n", "s1", "s2", "end of the noise", "values above it", "rank", "rank with noise"]
    rows, facts, drawn = [[*head, "entropy rank", "with noise"]], {}, {}
    for name, clean in matrices.items():
        noised = _with_noise(clean, level)
        values, seen = torch.linalg.svdvals(clean), torch.linalg.svdvals(noised)
        edge = bulk_edges(*clean.shape, noise_level=level)[1]
        ranks = {
            "effective": float(participation_ratio(values)),
            "effective_with_noise": float(participation_ratio(seen)),
            "entropy": float(entropy_rank(values)),
            "entropy_with_noise": float(entropy_rank(seen)),
        }
        above = int((seen > edge).sum())
        first, second = _first_two(values)
        numbers = [
            f"{first:.3g}",
            f"{second:.3g}",
            f"{edge:.3g}",
            str(above),
            *(f"{rank:.1f}" for rank in ranks.values()),
        ]
        rows.append([name, _shape(clean), *numbers])
        facts[name] = {"values": values.tolist(), "with_noise": seen.tolist(), "noise_edge": edge, "ranks": ranks}
        drawn[name] = (clean.shape, values, seen)
    page = _page(run, "Singular values of the gradient's matrices")
    page.say(
        f"B = {run.batch_size}. The rank is the paper's effective rank, (sum s)^2 / sum s^2; the entropy rank is that "
        "of Roy and Vetterli 2007. The end of the noise is that of the Marchenko-Pastur bulk."
    )
    page.table(rows)
    names = _largest(matrices)
    caption = "Singular values without noise (marks), with noise (bars), and the density of noise alone (line)"
    with figure(page, folder, "spectrum", caption, panels=len(names)) as axes:
        for ax, name in zip(axes, names, strict=True):
            shape, values, seen = drawn[name]
            low, high = bulk_edges(*shape, noise_level=level)
            grid = torch.linspace(low, high, 200)
            ax.hist(
                seen.numpy(),
                bins=max(10, len(seen) // 6),
                density=True,
                color=style(0)["color"],
                alpha=0.5,
                label="with noise",
            )
            density = bulk_density(grid, *shape, noise_level=level)
            ax.plot(grid.numpy(), density.numpy(), color="black", label="noise alone")
            ax.plot(
                values.numpy(), [0.0] * len(values), "|", color=style(1)["color"], markersize=12, label="without noise"
            )
            ax.set_title(f"{name} ({shape[0]} x {shape[1]})", fontsize=9)
            ax.legend(frameon=False, fontsize=8)
        _label(axes, "singular value", ["density"] * len(names))
    return Page(page, facts)


def recovery(run: AnalysisRun, folder: Path) -> Page:
    """From which batch size on each matrix passes Wedin's bound, and the spiked-matrix threshold."""
    sizes = run.batch_sizes
    sigmas = {size: run.plan(size).noise_multiplier for size in sizes}
    sensitivity = run.clip_plan.sensitivity
    matrices = _matrices(run)
    rows = [["matrix", "m x n", "s1", "s1 - s2", *(f"B = {size}" for size in sizes)]]
    facts: dict[str, Any] = {}
    for name, matrix in matrices.items():
        values = torch.linalg.svdvals(matrix)
        top, second = _first_two(values)
        gap = top - second
        cells, thresholds = [], {}
        for size in sizes:
            needed = {
                "recovery": recovery_batch_size(
                    gap, *matrix.shape, noise_multiplier=sigmas[size], sensitivity=sensitivity
                ),
                "detection": detection_batch_size(
                    top, *matrix.shape, noise_multiplier=sigmas[size], sensitivity=sensitivity
                ),
            }
            thresholds[size] = needed
            passed = [kind for kind, threshold in needed.items() if size >= threshold]
            cells.append("yes" if "recovery" in passed else "detected" if passed else "no")
        rows.append([name, _shape(matrix), f"{top:.3g}", f"{gap:.3g}", *cells])
        facts[name] = {"shape": list(matrix.shape), "top": top, "gap": gap, "thresholds": thresholds}
    rates = {
        kind: [sum(size >= fact["thresholds"][size][kind] for fact in facts.values()) / len(facts) for size in sizes]
        for kind in ("recovery", "detection")
    }
    for kind, values_ in rates.items():
        rows.append([f"{kind}: share of matrices", "", "", "", *(f"{100 * rate:.0f} %" for rate in values_)])
    page = _page(run, "Recovery of the first singular direction")
    page.say(
        f"Singular values at B = {run.batch_size}. yes: B is above sigma S (sqrt(m) + sqrt(n)) / (s1 - s2), where "
        "Wedin's bound begins to say something; it is sufficient, not necessary. detected: B is above "
        "sigma S (m n)^(1/4) / s1, where the leading singular vectors begin to correlate with the signal. Sigma is "
        "that of the privacy budget at each batch size."
    )
    page.table(rows)
    with figure(page, folder, "recovery", "Share of matrices that pass each threshold, by batch size") as (ax,):
        places = place_on_axis(ax, [str(size) for size in sizes])
        for number, (kind, shares) in enumerate(rates.items()):
            ax.plot(places, shares, label=kind, **style(number))
        ax.legend(frameon=False)
        _label([ax], "expected batch size", ["share of matrices"])
    return Page(page, {"noise_multipliers": sigmas, "matrices": facts, "rates": rates})


def newton_schulz(run: AnalysisRun, folder: Path) -> Page:
    """How near the iterates come to the polar factor, without and with noise."""
    level = run.noise_level(run.plan(run.batch_size))
    matrices = _matrices(run)
    rows = [["matrix", "m x n", "gradient", *(f"k = {k}" for k in range(_STEPS + 1))]]
    facts: dict[str, Any] = {}
    for name, clean in matrices.items():
        noised = _with_noise(clean, level)
        facts[name] = {}
        for kind, matrix in (("without noise", clean), ("with noise", noised)):
            cosines = newton_schulz_cosines(matrix, steps=_STEPS).tolist()
            facts[name][kind] = cosines
            rows.append([name, _shape(clean), kind, *(f"{cosine:.3f}" for cosine in cosines)])
    page = _page(run, "Convergence of Newton-Schulz")
    page.say(
        f"B = {run.batch_size}. The cosine between the k-th iterate with the coefficients of Muon and the polar factor "
        "U V^T; k = 0 is the gradient itself."
    )
    page.table(rows)
    names = _largest(matrices)
    caption = "Cosine between Newton-Schulz iterates and the polar factor"
    with figure(page, folder, "newton_schulz", caption, panels=2) as axes:
        for ax, kind in zip(axes, ("without noise", "with noise"), strict=True):
            for number, name in enumerate(names):
                ax.plot(range(_STEPS + 1), facts[name][kind], label=name, **style(number))
            ax.set_title(kind)
            ax.set_ylim(0, 1.02)
            ax.legend(frameon=False, fontsize=8)
        _label(axes, "steps k", ["cosine"] * 2)
    return Page(page, facts)


def direction(run: AnalysisRun, folder: Path) -> Page:
    """The cosine of the first singular vector with and without noise, by simulation."""
    sizes = run.batch_sizes
    levels = {size: run.noise_level(run.plan(size)) for size in sizes}
    matrices = {name: matrix for name, matrix in _matrices(run).items() if matrix.any()}
    if not matrices:
        raise ConfigurationError("The gradients of all matrices are zero, so they have no direction. Give --ckpt-path.")
    rows = [["matrix", "m x n", *(f"B = {size}" for size in sizes)]]
    facts: dict[str, Any] = {}
    names = _largest(matrices)
    for name in names:
        values, shape = torch.linalg.svdvals(matrices[name]), matrices[name].shape
        found = {
            size: direction_recovery(values, *shape, noise_level=level, trials=_TRIALS)
            for size, level in levels.items()
        }
        facts[name] = {size: {"mean": float(c.mean()), "deviation": float(c.std())} for size, c in found.items()}
        cells = [f"{fact['mean']:.3f} ± {fact['deviation']:.3f}" for fact in facts[name].values()]
        rows.append([name, _shape(matrices[name]), *cells])
    page = _page(run, "Recovery of directions by simulation")
    page.say(
        f"Singular values at B = {run.batch_size}, of the {len(names)} largest matrices that are not zero. The cosine "
        f"between the first left singular vector with and without noise, mean and deviation over {_TRIALS} draws."
    )
    page.table(rows)
    with figure(page, folder, "direction", "Cosine of the first direction with and without noise") as (ax,):
        places = place_on_axis(ax, [str(size) for size in sizes])
        for number, name in enumerate(names):
            means, deviations = zip(*((f["mean"], f["deviation"]) for f in facts[name].values()), strict=True)
            ax.errorbar(places, means, deviations, label=name, capsize=3, **style(number))
        ax.legend(frameon=False, fontsize=8)
        _label([ax], "expected batch size", ["cosine"])
    return Page(page, facts)


PAGES: Mapping[str, Callable[[AnalysisRun, Path], Page]] = {
    "snr": snr,
    "spectrum": spectrum,
    "recovery": recovery,
    "newton-schulz": newton_schulz,
    "direction": direction,
}


def _page(run: AnalysisRun, title: str) -> Document:
    page = Document(f"{title}: {type(run.module).__name__}, {type(run.data).__name__}", _WARNING)
    draws = "one Poisson draw" if run.num_batches == 1 else f"{run.num_batches} Poisson draws"
    page.say(f"Clipped gradients of {draws} at fixed parameters, {run.clip_plan.describe()['kind']} clipping.")
    if run.settings.get("disk") is not None:
        page.say("privacy.disk is left out: the gradients are those at the parameters themselves.")
    return page


def _matrices(run: AnalysisRun) -> dict[str, Tensor]:
    """The gradients of the run's matrices at its batch size."""
    found = run.measure(run.batch_size).matrices
    if not found:
        raise ConfigurationError("The model trains no matrix, so there is no spectrum to look at.")
    return found


def _largest(matrices: Mapping[str, Tensor]) -> list[str]:
    """The largest matrices of different shapes, in the order of the network."""
    by_shape: dict[tuple[int, ...], str] = {}
    for name in sorted(matrices, key=lambda name: -matrices[name].numel()):
        by_shape.setdefault(tuple(matrices[name].shape), name)
    chosen = list(by_shape.values())[:_DRAWN]
    return [name for name in matrices if name in chosen]


def _first_two(values: Tensor) -> tuple[float, float]:
    """s1 and s2; a matrix of one row has no second one."""
    first, second, *_ = (*values.tolist(), 0.0)
    return first, second


def _with_noise(clean: Tensor, level: float) -> Tensor:
    """The matrix with noise of this level, the same for every matrix of its shape."""
    return clean + level * torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))


def _shape(matrix: Tensor) -> str:
    return f"{matrix.shape[0]} x {matrix.shape[1]}"


def _label(axes: Sequence[Any], x: str, ys: Sequence[str]) -> None:
    for ax, y in zip(axes, ys, strict=True):
        ax.set_xlabel(x)
        ax.set_ylabel(y)
