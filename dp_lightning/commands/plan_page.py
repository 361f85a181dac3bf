"""A plan as text of at most 80 columns, as a JSON object, and as a page with a picture."""

import textwrap
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from dp_lightning.commands.plan_cells import Basis, Cell, Matrices
from dp_lightning.experiments.document import Document
from dp_lightning.experiments.figures import figure, place_on_axis, style
from dp_lightning.experiments.results import shown_duration

WIDTH = 80
# Shapes that are drawn; more are hard to tell apart.
_DRAWN = 4

Rows = list[list[str]]


def as_dict(basis: Basis, cells: Sequence[Cell]) -> dict[str, Any]:
    """Numbers by name. Thresholds are shares of ``bound``, in the order of the matrices."""
    return {
        "name": basis.name,
        "num_train": basis.num_train,
        "unit": basis.unit,
        "delta": basis.delta,
        "accountant": basis.accountant,
        "clipping": basis.clip_plan.describe(),
        "num_parameters": basis.num_parameters,
        "matrices": [vars(matrices) for matrices in basis.matrices],
        "seconds_per_example": basis.seconds_per_example,
        "device": basis.device,
        "runs": [
            {
                "epsilon": cell.epsilon,
                "epochs": cell.epochs,
                "expected_batch_size": cell.plan.expected_batch_size,
                "num_steps": cell.plan.num_steps,
                "sample_rate": cell.plan.sample_rate,
                "noise_multiplier": cell.plan.noise_multiplier,
                "noise_level": cell.noise_level,
                "noise_norm_over_clipping_norm": cell.noise_over_clipping,
                "recovery": [cell.recovery(matrices) for matrices in basis.matrices],
                "detection": [cell.detection(matrices) for matrices in basis.matrices],
                "seconds": cell.seconds,
            }
            for cell in cells
        ],
    }


def text_of(basis: Basis, cells: Sequence[Cell]) -> str:
    """The plan for a terminal."""
    parts = [f"Plan: {basis.name}"]
    for part in _parts(basis, cells):
        if isinstance(part, str):
            parts.append("\n".join(textwrap.wrap(part, WIDTH)))
        else:
            widths = [max(map(len, column)) for column in zip(*part, strict=True)]
            parts.append(
                "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in part)
            )
    return "\n\n".join(parts)


def page_of(basis: Basis, cells: Sequence[Cell], folder: Path) -> Document:
    """The page, its picture written to ``folder``."""
    page = Document(f"Plan: {basis.name}", folder)
    for part in _parts(basis, cells):
        if isinstance(part, str):
            page.say(part)
        else:
            page.table(part)
    _draw(page, basis, cells)
    return page


def _parts(basis: Basis, cells: Sequence[Cell]) -> Iterator[str | Rows]:
    """Paragraphs and tables in order."""
    clip = basis.clip_plan.describe()
    d = "" if basis.num_parameters is None else f", {basis.num_parameters:,} trained parameters (d)"
    yield (
        f"N = {basis.num_train:,} {basis.unit}, delta {basis.delta:g}, {basis.accountant.upper()} accountant, "
        f"{str(clip['kind']).replace('_', ' ')} clipping at C = {basis.clip_plan.max_grad_norm:g}{d}. No image was "
        "read, and nothing was trained."
    )
    yield _table_of_runs(basis, cells)
    yield _legend(basis)
    if not basis.matrices:
        return
    yield (
        "What a matrix needs, as a share of the most that clipping leaves of its gradient: its first singular "
        "direction is recovered if s1 - s2 of the mean clipped gradient exceeds the share (Wedin 1972; sufficient, "
        "not necessary), and begins to be detected if s1 exceeds the share times the last column (Benaych-Georges and "
        "Nadakuditi 2012). No gradient reaches a share above 1."
    )
    for line, run in groupby(cells, key=_line):
        sizes = list(run)
        columns = _columns_that_fit(basis, sizes)
        for start in range(0, len(sizes), columns):
            yield f"At {line}:"
            yield _table_of_matrices(basis, sizes[start : start + columns])


def _table_of_runs(basis: Basis, cells: Sequence[Cell]) -> Rows:
    head = ["epsilon", "epochs", "B", "T", "sigma", "noise sd"]
    head += ["norm / C"] * (basis.num_parameters is not None) + ["time"] * (basis.seconds_per_example is not None)
    rows = [head]
    for cell in cells:
        numbers = [f"{cell.epsilon:.4g}", f"{cell.epochs:.4g}", str(cell.plan.expected_batch_size)]
        numbers += [str(cell.plan.num_steps), f"{cell.plan.noise_multiplier:.4g}", f"{cell.noise_level:.3g}"]
        if cell.noise_over_clipping is not None:
            numbers.append(f"{cell.noise_over_clipping:.3g}")
        if cell.seconds is not None:
            numbers.append(shown_duration(cell.seconds))
        rows.append(numbers)
    return rows


def _legend(basis: Basis) -> str:
    said = "noise sd is the standard deviation of the noise in each coordinate of the gradient, sigma S / B with S = C."
    if basis.num_parameters is not None:
        said += (
            " norm / C is the norm of the noise, sigma S sqrt(d) / B, over C; that of the mean clipped gradient is at "
            "most 1."
        )
    if basis.seconds_per_example is not None:
        said += (
            f" time is that of T private steps on {basis.device}, with {1000 * basis.seconds_per_example:.3g} ms for "
            "each of B examples; image files, evaluations and checkpoints come on top."
        )
    return said


def _columns_that_fit(basis: Basis, cells: Sequence[Cell]) -> int:
    """How many batch sizes a table of matrices has room for."""
    others = max(len(_shape(matrices)) for matrices in basis.matrices) + len("  matrices  detected")
    each = max(len(f"  B = {cell.plan.expected_batch_size}") for cell in cells)
    return max((WIDTH - others) // each, 1)


def _table_of_matrices(basis: Basis, cells: Sequence[Cell]) -> Rows:
    rows = [["m x n", "matrices", *(f"B = {cell.plan.expected_batch_size}" for cell in cells), "detected"]]
    for matrices in basis.matrices:
        shares = [cell.recovery(matrices) for cell in cells]
        factor = cells[0].detection(matrices) / shares[0]
        rows.append([_shape(matrices), str(matrices.count), *(f"{s:.2g}" for s in shares), f"x {factor:.2f}"])
    return rows


def _draw(page: Document, basis: Basis, cells: Sequence[Cell]) -> None:
    lines = {line: list(run) for line, run in groupby(cells, key=_line)}
    first = next(iter(lines.values()))
    drawn = sorted(basis.matrices, key=lambda matrices: -matrices.rows * matrices.columns)[:_DRAWN]
    caption = "Noise multiplier and steps by batch size; the noise in the gradient"
    caption += ", and what a matrix needs to be recovered" if drawn else ""
    with figure(page, "plan", caption, panels=4 if drawn else 3) as (sigma, steps, noise, *needed):
        known = basis.num_parameters is not None
        for number, (line, run) in enumerate(lines.items()):
            sizes = [str(cell.plan.expected_batch_size) for cell in run]
            heights = (
                (sigma, "noise multiplier", [cell.plan.noise_multiplier for cell in run]),
                (steps, "steps", [float(cell.plan.num_steps) for cell in run]),
                (
                    noise,
                    "norm of the noise / C" if known else "noise in each coordinate",
                    [cell.noise_over_clipping or cell.noise_level for cell in run],
                ),
            )
            for ax, label, values in heights:
                ax.plot(place_on_axis(ax, sizes), values, label=line, **style(number))
                ax.set(xlabel="expected batch size", ylabel=label, yscale="log")
        sigma.legend(frameon=False, fontsize=8)
        for ax in needed:
            for number, matrices in enumerate(drawn):
                places = place_on_axis(ax, [str(cell.plan.expected_batch_size) for cell in first])
                ax.plot(places, [cell.recovery(matrices) for cell in first], label=_shape(matrices), **style(number))
            ax.axhline(1.0, color="black", linestyle="--", linewidth=1)
            ax.set(xlabel="expected batch size", ylabel="share needed for recovery", yscale="log")
            ax.set_title(_line(first[0]), fontsize=9)
            ax.legend(frameon=False, fontsize=8)


def _line(cell: Cell) -> str:
    """What the cells of one line of the picture have in common."""
    target = cell.plan.target_epsilon
    spends = f"sigma {cell.plan.noise_multiplier:.4g}" if target is None else f"epsilon {target:g}"
    return f"{spends}, {cell.length}"


def _shape(matrices: Matrices) -> str:
    return f"{matrices.rows} x {matrices.columns}"
