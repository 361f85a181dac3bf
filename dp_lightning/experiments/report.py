"""The page of a grid: tables and figures of its runs, beside the paper's numbers."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.document import Document, Link
from dp_lightning.experiments.drawings import DRAWINGS
from dp_lightning.experiments.grid import SEED, Grid
from dp_lightning.experiments.published import published
from dp_lightning.experiments.results import (
    BESIDE,
    LAST,
    Outcome,
    Panel,
    Quantity,
    Spread,
    correlation,
    panels,
    per_cent,
    shown_epsilon,
)
from dp_lightning.experiments.runs import RUN_PAGE
from dp_lightning.experiments.tuning import at_chosen_points, needed

_BEST = per_cent("test_accuracy_best")
_SCOPE = (
    "Every epsilon covers one run alone. Choosing among runs by their results on private data spends more than any "
    "one of them."
)


def grid_report(grid: Grid, outcomes: Sequence[Outcome], folder: Path, *, override: Sequence[str] = ()) -> Document:
    """Write the figures into a folder and return the page.

    Args:
        override: settings that every run has instead of the grid's; the page lists them.

    Raises:
        ConfigurationError: if matplotlib is not installed, or the grid names a table that the paper does not have.
    """
    paper = _paper(grid)
    page = Document(grid.title, folder)
    if paper and override:
        paper = {}
        page.say("The paper's numbers are left out: they belong to the grid's own settings.")
    asked = needed(grid, outcomes)
    finished = sum(outcome.finished for outcome in asked)
    page.say(f"{finished} of {len(asked)} runs are finished. Accuracies are in per cent on the test set.")
    page.say(_SCOPE)
    if override:
        page.say(f"With these settings instead of the grid's: {', '.join(override)}.")
    for number, panel in enumerate(panels(grid, at_chosen_points(grid, outcomes))):
        if panel.title:
            page.heading(panel.title)
        if not panel.results():
            text = "No run of these is finished" if panel.title else "No run is finished"
            page.say(f"{text}, or no {grid.tuned} is chosen yet." if grid.tuned else f"{text}.")
            continue
        _chosen(page, grid, panel)
        _accuracies(page, grid, panel, paper)
        name = grid.path.stem + (f"_{number + 1}" if panel.title else "")
        for kind in grid.report.figures:
            DRAWINGS[kind](page, f"{name}_{kind}", grid, panel, paper)
        if "snr" in grid.report.figures:
            _correlations(page, grid, panel)
    _missing(page, asked)
    _set_aside(page, outcomes)
    _not_for_release(page, outcomes)
    _runs(page, grid, outcomes)
    return page


def _paper(grid: Grid) -> Mapping[str, Mapping[str, list[float]]]:
    """The paper's accuracies by row and column, under the labels of the grid; empty if there are none."""
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


def _head(grid: Grid, panel: Panel) -> list[str]:
    axes = (grid.report.rows, grid.report.columns)
    return [" by ".join(axis for axis in axes if axis is not None) or "accuracy", *panel.columns]


def _chosen(page: Document, grid: Grid, panel: Panel) -> None:
    if grid.tuned is None:
        return
    labels = [point.label for point in grid.axes[grid.tuned]]
    page.say(
        f"The {grid.tuned} of every place is that with the highest validation accuracy after the last step, of "
        f"{', '.join(labels)} with the first seed. The first and the last of these are marked, since a better one may "
        "lie beyond; a dash is a place whose runs are not all finished, or have no validation accuracy:"
    )
    edges = {labels[0], labels[-1]} if len(labels) > 1 else set()

    def shown(outcomes: Sequence[Outcome]) -> str:
        found = {outcome.labels[grid.tuned or ""] for outcome in outcomes}
        return ", ".join(label + (" (edge)" if label in edges else "") for label in found) or "-"

    rows = [[row, *(shown(panel.outcomes[row, column]) for column in panel.columns)] for row in panel.rows]
    page.table([_head(grid, panel), *rows])


def _accuracies(page: Document, grid: Grid, panel: Panel, paper: Mapping[str, Mapping[str, list[float]]]) -> None:
    head = _head(grid, panel)

    def say(text: str, quantity: Quantity) -> None:
        page.say(text)
        rows = [[row, *(_cell(panel.spread(row, column, quantity)) for column in panel.columns)] for row in panel.rows]
        page.table([head, *rows])

    count = len(grid.axes.get(SEED, ()))
    seeds = f"mean ± standard deviation over {count} seeds" if count > 1 else "one run each"
    say(f"Accuracy after the last step, {seeds}:", LAST)
    early = sum(map(_evaluated_early, panel.results()))
    if early:
        page.say(
            f"{early} of these runs were last evaluated before their last step; the table has that accuracy. Set "
            "trainer.check_val_every_n_epoch to a divisor of trainer.max_epochs."
        )
    say("Best accuracy over evaluations. It is chosen on the test set, so it is not an estimate for new images:", _BEST)
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


def _correlations(page: Document, grid: Grid, panel: Panel) -> None:
    if grid.report.columns is None:
        return
    found = {row: [correlation(panel, row, LAST, quantity) for quantity in BESIDE.values()] for row in panel.rows}
    if all(value is None for values in found.values() for value in values):
        return
    page.say(f"Pearson's r of the mean accuracy with each of these, over {grid.report.columns}:")
    rows = [[row, *("-" if value is None else f"{value:+.2f}" for value in values)] for row, values in found.items()]
    page.table([[grid.report.rows or "", *BESIDE], *rows])


def _missing(page: Document, outcomes: Sequence[Outcome]) -> None:
    missing = [outcome for outcome in outcomes if not outcome.finished]
    if not missing:
        return
    page.heading("Missing")
    page.say(f"{len(missing)} runs are not finished:")
    rows = [["run", "steps, from its last result", "log"]]
    for outcome in missing:
        steps = "-" if outcome.result is None else _steps(outcome.result)
        log = str(outcome.folder.log) if outcome.folder.log.is_file() else "not started"
        rows.append([outcome.name, steps, log])
    page.table(rows)


def _set_aside(page: Document, outcomes: Sequence[Outcome]) -> None:
    again = [outcome for outcome in outcomes if outcome.folder.abandoned]
    if not again:
        return
    page.heading("Attempts that were set aside")
    page.say(
        f"{len(again)} runs were restarted after an attempt that left no intact checkpoint. The steps of that attempt "
        "are in no epsilon on this page; do not release anything from its folder, abandoned_0 and so on."
    )
    rows = [[outcome.name, str(outcome.folder.abandoned), outcome.folder.path.name] for outcome in again]
    page.table([["run", "attempts set aside", "folder"], *rows])


def _not_for_release(page: Document, outcomes: Sequence[Outcome]) -> None:
    found = [(o, o.result["release"]) for o in outcomes if o.finished and o.result and o.result["release"] != "ok"]
    if not found:
        return
    page.heading("Not for release")
    page.say(f"The privacy statements of {len(found)} runs say that they must not be released:")
    page.table([["run", "statement"], *([outcome.name, release] for outcome, release in found)])


def _evaluated_early(result: Mapping[str, Any]) -> bool:
    evaluated = result.get("evaluated_after_steps") or [result["num_steps"]]
    return bool(evaluated[-1] < result["num_steps"])


def _steps(result: Mapping[str, Any]) -> str:
    """The number of steps taken, and how many were planned if that differs."""
    taken, planned = result["num_steps"], result["num_steps_planned"]
    return str(taken) if taken == planned else f"{taken} of {planned}"


def _runs(page: Document, grid: Grid, outcomes: Sequence[Outcome]) -> None:
    head = [*grid.axes, "last", "best", "epsilon", "delta", "steps", "seconds", "folder", "statement", "page"]
    rows: list[list[str | Link]] = [[*head]]
    for outcome in outcomes:
        if outcome.finished and (result := outcome.result) is not None:
            accuracies = ("-" if value is None else f"{value:.1f}" for value in (LAST(result), _BEST(result)))
            spent = (shown_epsilon(result["epsilon"]), f"{result['delta']:g}")
            cost = (_steps(result), f"{result['seconds']:.0f}", outcome.folder.path.name)
            rows.append([*outcome.labels.values(), *accuracies, *spent, *cost, *_links(outcome)])
    if len(rows) > 1:
        page.heading("Runs")
        page.table(rows)
        page.say("dpl report with the log folder of a run writes its page.")


def _links(outcome: Outcome) -> list[str | Link]:
    """Links to what is there of a run's statement and its page."""
    folder = outcome.folder.logs
    files = {"statement": "privacy_statement.md", "page": RUN_PAGE}
    return [
        Link(text, folder / name) if folder is not None and (folder / name).is_file() else "-"
        for text, name in files.items()
    ]
