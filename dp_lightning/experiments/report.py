"""The page of a grid: tables and figures of its runs, beside the paper's numbers."""

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.document import Document, Link
from dp_lightning.experiments.figures import figure, place_on_axis, style
from dp_lightning.experiments.grid import SEED, Grid
from dp_lightning.experiments.results import (
    BESIDE,
    BEST,
    LAST,
    Outcome,
    Panel,
    Quantity,
    Spread,
    at_chosen_points,
    needed,
    panels,
    published,
    shown_epsilon,
)
from dp_lightning.experiments.runs import RUN_PAGE

Paper = Mapping[str, Mapping[str, list[float]]]
"""The paper's accuracies and their deviations by row and column, under the labels of the grid."""


def grid_report(
    grid: Grid, outcomes: Sequence[Outcome], folder: Path, *, override: Sequence[str] = (), spent: str = ""
) -> Document:
    """The page of a grid, in a folder.

    Args:
        override: Settings that every run has instead of the grid's; the page lists them.
        spent: Sentence on the epsilon that all runs have spent together.

    Raises:
        ConfigurationError: if matplotlib is not installed, or the grid names a table that the paper does not have.
    """
    paper = _paper(grid)
    page = Document(grid.title, folder)
    asked = needed(grid, outcomes)
    page.say(
        f"{sum(outcome.finished for outcome in asked)} of {len(asked)} runs are finished. Accuracies are in per cent "
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
    for number, panel in enumerate(panels(grid, at_chosen_points(grid, outcomes))):
        if panel.title:
            page.heading(panel.title)
        if not any(panel.results(*place) for place in panel.outcomes):
            page.say("No run is finished" + (f", or no {grid.tuned} is chosen yet." if grid.tuned else "."))
            continue
        _tables(page, grid, panel, paper)
        name = grid.path.stem + (f"_{number + 1}" if panel.title else "")
        for kind in grid.report.figures:
            _FIGURES[kind](page, f"{name}_{kind}", grid, panel, paper)
        if "snr" in grid.report.figures:
            _correlations(page, grid, panel)
    _runs(page, grid, outcomes, asked)
    return page


def _paper(grid: Grid) -> Paper:
    name = grid.report.published
    if name is None:
        return {}
    tables = published()["accuracy"]
    if name not in tables:
        raise ConfigurationError(f"{grid.path}: report.published is {name!r}; choose from {', '.join(tables)}.")
    return {
        str(row): {str(column): value for column, value in values.items()}
        for row, values in tables[name]["values"].items()
    }


def _tables(page: Document, grid: Grid, panel: Panel, paper: Paper) -> None:
    axes = (grid.report.rows, grid.report.columns)
    head = [" by ".join(axis for axis in axes if axis is not None) or "accuracy", *panel.columns]
    if grid.tuned is not None:
        labels = [point.label for point in grid.axes[grid.tuned]]
        page.say(
            f"The {grid.tuned} of every place is that with the highest validation accuracy after the last step, of "
            f"{', '.join(labels)} with the first seed. The first and the last of these are marked, since a better one "
            "may lie beyond; a dash is a place whose runs are not all finished, or have no validation accuracy:"
        )
        edges = {labels[0], labels[-1]} if len(labels) > 1 else set()

        def chosen(outcomes: Sequence[Outcome]) -> str:
            found = dict.fromkeys(outcome.labels[str(grid.tuned)] for outcome in outcomes)
            return ", ".join(label + (" (edge)" if label in edges else "") for label in found) or "-"

        page.table([head, *([row, *(chosen(panel.outcomes[row, c]) for c in panel.columns)] for row in panel.rows)])

    def say(text: str, quantity: Quantity) -> None:
        page.say(text)
        cells = {row: [_cell(panel.spread(row, column, quantity)) for column in panel.columns] for row in panel.rows}
        page.table([head, *([row, *shown] for row, shown in cells.items())])

    count = len(grid.axes.get(SEED, ()))
    seeds = f"mean ± standard deviation over {count} seeds" if count > 1 else "one run each"
    say(f"Accuracy after the last step, {seeds}:", LAST)
    early = sum(_evaluated_early(result) for place in panel.outcomes for result in panel.results(*place))
    if early:
        page.say(
            f"{early} of these runs were last evaluated before their last step; the table has that accuracy. Set "
            "trainer.check_val_every_n_epoch to a divisor of trainer.max_epochs."
        )
    say("Best accuracy over evaluations. It is chosen on the test set, so it is not an estimate for new images:", BEST)
    if paper:
        page.say("The paper's numbers, which are best accuracies over epochs:")
        shown = [[row, *(_pair(paper[row].get(c)) for c in panel.columns)] for row in panel.rows if row in paper]
        page.table([head, *shown])


def _cell(found: Spread) -> str:
    if found.mean is None:
        return "-"
    text = f"{found.mean:.1f}" + ("" if found.deviation is None else f" ± {found.deviation:.1f}")
    return text if found.runs == found.planned else f"{text} ({found.runs} of {found.planned})"


def _pair(value: list[float] | None) -> str:
    return "-" if value is None else " ± ".join(f"{number:.1f}" for number in value)


def _evaluated_early(result: Mapping[str, Any]) -> bool:
    evaluated = result.get("evaluated_after_steps") or [result["num_steps"]]
    return bool(evaluated[-1] < result["num_steps"])


def _draw_lines(page: Document, name: str, grid: Grid, panel: Panel, paper: Paper, *, deviation: bool = False) -> None:
    """Draw a line for each row over the columns, of accuracies or of their deviations, and the paper's beside it."""
    y = "standard deviation of the last test accuracy" if deviation else "test accuracy after the last step"
    with figure(page, name, f"{y.capitalize()} (%){', and the best of the paper (dashed)' if paper else ''}") as (ax,):
        places = place_on_axis(ax, panel.columns)
        for number, row in enumerate(panel.rows):
            spreads = [panel.spread(row, column, LAST) for column in panel.columns]
            heights = [_number(s.deviation if deviation else s.mean) for s in spreads]
            bars = None if deviation else [_number(s.deviation) for s in spreads]
            ax.errorbar(places, heights, bars, label=row, capsize=3, **style(number))
            pairs = [paper.get(row, {}).get(column, []) for column in panel.columns]
            theirs = [pair[deviation] if len(pair) > deviation else math.nan for pair in pairs]
            ax.plot(places, theirs, linestyle="--", alpha=0.6, **style(number))
        ax.set(xlabel=grid.report.columns or "", ylabel=f"{y} (%)")


def _draw_deviation(page: Document, name: str, grid: Grid, panel: Panel, paper: Paper) -> None:
    _draw_lines(page, name, grid, panel, paper, deviation=True)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _draw_curves(page: Document, name: str, grid: Grid, panel: Panel, paper: Paper) -> None:
    with figure(page, name, "Test accuracy by steps taken, mean over seeds", panels=len(panel.columns)) as axes:
        for ax, column in zip(axes, panel.columns, strict=True):
            for number, row in enumerate(panel.rows):
                known = [result for result in panel.results(row, column) if result.get("test_accuracy_curve")]
                if known:
                    of_each = zip(*(result["test_accuracy_curve"] for result in known), strict=False)
                    heights = [100 * statistics.fmean(values) for values in of_each]
                    steps = known[0]["evaluated_after_steps"][: len(heights)]
                    ax.plot(steps, heights, label=row, color=style(number)["color"])
            ax.set(title=f"{grid.report.columns or ''} {column}", xlabel="steps", ylabel="test accuracy (%)")


def _draw_snr(page: Document, name: str, grid: Grid, panel: Panel, paper: Paper) -> None:
    with figure(page, name, f"Accuracy beside {' and '.join(BESIDE)}", panels=len(BESIDE)) as axes:
        for ax, (label, quantity) in zip(axes, BESIDE.items(), strict=True):
            for number, row in enumerate(panel.rows):
                if pairs := sorted(panel.pairs(row, quantity, LAST)):
                    ax.plot(*zip(*pairs, strict=True), label=row, **style(number))
            ax.set(xlabel=label, ylabel="test accuracy (%)")


# The figures by their names in a grid's file.
_FIGURES = {"accuracy": _draw_lines, "deviation": _draw_deviation, "curves": _draw_curves, "snr": _draw_snr}


def _correlations(page: Document, grid: Grid, panel: Panel) -> None:
    found = {row: [panel.correlation(row, quantity, LAST) for quantity in BESIDE.values()] for row in panel.rows}
    if all(value is None for values in found.values() for value in values):
        return
    page.say(f"Pearson's r of the mean accuracy with each of these, over {grid.report.columns}:")
    rows = [[row, *("-" if value is None else f"{value:+.2f}" for value in values)] for row, values in found.items()]
    page.table([[grid.report.rows or "", *BESIDE], *rows])


def _runs(page: Document, grid: Grid, outcomes: Sequence[Outcome], asked: Sequence[Outcome]) -> None:
    """A row for each run that is finished or needed, with what a reader has to know of it."""
    page.heading("Runs")
    rows: list[list[str | Link]] = [
        [*grid.axes, "last", "best", "epsilon", "delta", "steps", "seconds", "note", "files"]
    ]
    for outcome in outcomes:
        result, folder = outcome.result, outcome.folder
        if not outcome.finished and outcome not in asked:
            continue
        notes = [] if outcome.finished else [f"not finished: {folder.log}" if folder.log.is_file() else "not started"]
        numbers = ["-"] * 6
        if result is not None:
            taken, planned = result["num_steps"], result["num_steps_planned"]
            numbers = ["-" if value is None else f"{value:.1f}" for value in (LAST(result), BEST(result))]
            numbers += [shown_epsilon(result["epsilon"]), f"{result['delta']:g}"]
            numbers += [str(taken) if taken == planned else f"{taken} of {planned}", f"{result['seconds']:.0f}"]
            if outcome.finished and result["release"] != "ok":
                notes.append(result["release"])
        if folder.abandoned:
            notes.append(f"{folder.abandoned} attempts set aside, whose steps are in no epsilon here: release nothing")
        rows.append([*outcome.labels.values(), *numbers, "; ".join(notes) or "-", _link(outcome)])
    page.table(rows)
    page.say("dpl report with the log folder of a run writes its page.")


def _link(outcome: Outcome) -> str | Link:
    """A link to the page of a run, or else to its statement or its folder."""
    logs = outcome.folder.logs
    for text, name in (("page", RUN_PAGE), ("statement", "privacy_statement.md")):
        if logs is not None and (logs / name).is_file():
            return Link(text, logs / name)
    return Link("folder", outcome.folder.path) if outcome.folder.path.is_dir() else "-"
