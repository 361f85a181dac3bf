"""The page of a grid: tables and figures of its runs, beside the paper's numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from dp_lightning.experiments.document import Document, figure, style
from dp_lightning.experiments.grid import SEED, Grid
from dp_lightning.experiments.results import (
    BESIDE,
    BEST,
    LAST,
    Place,
    Run,
    grouped,
    needed,
    places,
    published,
    shown_epsilon,
)

Paper = Mapping[str, Mapping[str, list[float]]]
"""The paper's accuracies and their deviations by row and column, under the labels of the grid."""


def grid_report(
    grid: Grid, runs: Sequence[Run], folder: Path, *, override: Sequence[str] = (), spent: str = ""
) -> Document:
    """The page of a grid, in a folder.

    Args:
        override: Settings that every run has instead of the grid's; the page lists them.
        spent: Sentence on the epsilon that all runs have spent together.

    Raises:
        ConfigurationError: if matplotlib is not installed.
    """
    values = published()["accuracy"][grid.published]["values"] if grid.published else {}
    paper: Paper = {str(row): {str(x): numbers for x, numbers in columns.items()} for row, columns in values.items()}
    page = Document(grid.title, folder)
    asked = needed(grid, runs)
    page.say(
        f"{sum(run.finished for run in asked)} of {len(asked)} runs are finished. Accuracies are in per cent "
        "on the test set."
    )
    page.say(
        "Every epsilon in a table covers one run alone. Choosing among runs by their results on private data spends "
        f"more than any one of them. {spent}"
    )
    if override:
        left_out = " The paper's numbers are left out: they belong to the grid's own settings." if paper else ""
        page.say(f"With these settings instead of the grid's: {', '.join(override)}.{left_out}")
        paper = {}
    found = places(grid, runs)
    if any(run.finished for place in found for run in place.runs):
        _means(page, grid, found, paper)
        _draw_accuracy(page, grid, found, paper)
        _draw_curves(page, grid, found)
    else:
        page.say("No run is finished" + (f", or no {grid.tuned} is chosen yet." if grid.tuned else "."))
    _runs(page, grid, runs, asked)
    return page


def _in_paper(paper: Paper, grid: Grid, place: Place) -> list[float]:
    """The paper's accuracy at a place, and its deviation where the paper has one; empty if it has neither."""
    row, column = (place.labels.get(str(axis), "") for axis in grid.rows_and_columns)
    return paper.get(row, {}).get(column, [])


def _means(page: Document, grid: Grid, found: Sequence[Place], paper: Paper) -> None:
    """A row for each place: the point of the tuned axis, the mean accuracies, and the paper's."""
    count = len(grid.axes.get(SEED, ()))
    page.say(
        f"Accuracy, {f'mean ± standard deviation over {count} seeds' if count > 1 else 'one run each'}: after the last "
        "step, and the best over evaluations, which is chosen on the test set, so it is not an estimate for new images."
        + (" The paper's numbers are best accuracies over epochs." if paper else "")
    )
    if grid.tuned is not None:
        labels = [point.label for point in grid.axes[grid.tuned]]
        page.say(
            f"The {grid.tuned} is that with the highest validation accuracy after the last step, of "
            f"{', '.join(labels)} with the first seed. A dash is a place whose runs are not all finished, or have no "
            "validation accuracy."
        )
    tuned = [] if grid.tuned is None else [grid.tuned]
    rows = [[*found[0].labels, *tuned, "last", "best", *(["paper"] if paper else [])]]
    for place in found:
        chosen = [place.chosen or "-" for _ in tuned]
        theirs = [" ± ".join(f"{number:.1f}" for number in _in_paper(paper, grid, place)) or "-"] if paper else []
        rows.append([*place.labels.values(), *chosen, _cell(place, LAST), _cell(place, BEST), *theirs])
    page.table(rows)


def _cell(place: Place, key: str) -> str:
    if not (values := place.values(key)):
        return "-"
    text = f"{place.mean(key):.1f}" + (f" ± {place.deviation(key):.1f}" if len(values) > 1 else "")
    planned = len(place.runs)
    return text if len(values) == planned else f"{text} ({len(values)} of {planned})"


def _panels(grid: Grid, found: Sequence[Place], *further: str | None) -> dict[str, list[Place]]:
    """The places by their labels on the axes that are neither rows nor columns, and on further ones, in words."""
    shown = grid.rows_and_columns
    axes = [*(axis for axis in found[0].labels if axis not in shown), *(axis for axis in further if axis is not None)]
    return {
        ", ".join(f"{axis} {label}" for axis, label in zip(axes, labels, strict=True)): here
        for labels, here in grouped(found, axes).items()
    }


def _lines(grid: Grid, here: Sequence[Place]) -> dict[str, list[Place]]:
    """The places of each row, in the order of the columns."""
    row, _ = grid.rows_and_columns
    return {"".join(labels) or "all runs": line for labels, line in grouped(here, [row] if row else []).items()}


def _draw_accuracy(page: Document, grid: Grid, found: Sequence[Place], paper: Paper) -> None:
    """Draw a line for each row over the columns, with the paper's beside it, and over what accuracy may depend on."""
    y, (_, column) = "test accuracy after the last step (%)", grid.rows_and_columns
    panels = [(title, here, x) for title, here in _panels(grid, found).items() for x in (column or "", *BESIDE)]
    caption = f"Accuracy, mean and deviation over seeds{'; the best of the paper is dashed' if paper else ''}"
    with figure(page, f"{grid.path.stem}_accuracy", caption, panels=len(panels)) as axes:
        for ax, (title, here, label) in zip(axes, panels, strict=True):
            for number, (row, line) in enumerate(_lines(grid, here).items()):
                means, bars = ([value(place, LAST) for place in line] for value in (Place.mean, Place.deviation))
                if label in BESIDE:
                    ax.errorbar([place.mean(label) for place in line], means, bars, label=row, **style(number))
                else:
                    x = range(len(line))
                    ax.set_xticks(x, [place.labels.get(label, "") for place in line])
                    ax.errorbar(x, means, bars, label=row, **style(number))
                    theirs = [(_in_paper(paper, grid, place) or [math.nan])[0] for place in line]
                    ax.plot(x, theirs, linestyle="--", alpha=0.6, **style(number))
            ax.set(title=title, xlabel=BESIDE.get(label, label), ylabel=y)


def _draw_curves(page: Document, grid: Grid, found: Sequence[Place]) -> None:
    panels = _panels(grid, found, grid.rows_and_columns[1])
    name, caption = f"{grid.path.stem}_curves", "Test accuracy by steps taken, mean over seeds"
    with figure(page, name, caption, panels=len(panels)) as axes:
        for ax, (title, here) in zip(axes, panels.items(), strict=True):
            for number, (row, (place,)) in enumerate(_lines(grid, here).items()):
                results = [run.result or {} for run in place.runs if run.finished]
                known = [result for result in results if result.get("test_accuracy_curve")]
                if known:
                    of_each = zip(*(result["test_accuracy_curve"] for result in known), strict=False)
                    heights = [100 * statistics.fmean(values) for values in of_each]
                    steps = known[0]["evaluated_after_steps"][: len(heights)]
                    ax.plot(steps, heights, label=row, color=style(number)["color"])
            ax.set(title=title, xlabel="steps", ylabel="test accuracy (%)")


def _runs(page: Document, grid: Grid, runs: Sequence[Run], asked: Sequence[Run]) -> None:
    """A row for each run that is finished or needed, with what a reader has to know of it."""
    page.heading("Runs")
    rows = [[*grid.axes, "last", "best", "epsilon", "delta", "steps", "seconds", "note"]]
    for run in runs:
        result, folder = run.result, run.folder
        if not run.finished and run not in asked:
            continue
        notes = [] if run.finished else [f"not finished: {folder.log}" if folder.log.is_file() else "not started"]
        numbers = ["-"] * 6
        if result is not None:
            taken, planned = result["num_steps"], result["num_steps_planned"]
            numbers = ["-" if result[key] is None else f"{100 * result[key]:.1f}" for key in (LAST, BEST)]
            numbers += [shown_epsilon(result["epsilon"]), f"{result['delta']:g}"]
            numbers += [str(taken) if taken == planned else f"{taken} of {planned}", f"{result['seconds']:.0f}"]
            if (evaluated := (result.get("evaluated_after_steps") or [taken])[-1]) < taken:
                notes.append(f"last evaluated after step {evaluated}")
            if run.finished and result["release"] != "ok":
                notes.append(result["release"])
        if folder.abandoned:
            notes.append(f"{folder.abandoned} attempts set aside, whose steps are in no epsilon here: release nothing")
        rows.append([*run.labels.values(), *numbers, "; ".join(notes) or "-"])
    page.table(rows)
    page.say("The folder of a run begins with its labels; dpl report with its log folder writes its page.")
