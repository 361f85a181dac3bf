"""The figures of a grid's page, each from the runs of a panel and the paper's numbers."""

import statistics
from collections.abc import Callable, Mapping
from typing import Any

from dp_lightning.experiments.document import Document
from dp_lightning.experiments.figures import figure, place_on_axis, plain, style
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.results import BESIDE, LAST, Panel, Spread


def _draw_accuracy(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    caption = f"Test accuracy after the last step{', and the paper (best over epochs, dashed)' if paper else ''}"
    with figure(page, name, caption) as (ax,):
        _lines(ax, panel, paper, lambda found: (found.mean, found.deviation or 0.0), 0)
        _finish(ax, grid.report.columns or "", "test accuracy (%)")


def _draw_deviation(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    caption = f"Standard deviation of the last test accuracy over seeds{', and the paper (dashed)' if paper else ''}"
    with figure(page, name, caption) as (ax,):
        _lines(ax, panel, paper, lambda found: (found.deviation, None), 1)
        _finish(ax, grid.report.columns or "", "standard deviation (points)")


def _lines(
    ax: Any,
    panel: Panel,
    paper: Mapping[str, Any],
    shown: Callable[[Spread], tuple[float | None, float | None]],
    of_pair: int,
) -> None:
    """A line for each row over the columns, and the paper's beside it.

    Args:
        shown: height of a point and length of its error bar; a height of None draws no point.
        of_pair: which number of the paper's pair is shown.
    """
    places = place_on_axis(ax, panel.columns)
    for number, row in enumerate(panel.rows):
        known, theirs = [], []
        for x, column in zip(places, panel.columns, strict=True):
            height, bar = shown(panel.spread(row, column, LAST))
            if height is not None:
                known.append((x, height, bar))
            pair = paper.get(row, {}).get(column, [])
            if len(pair) > of_pair:
                theirs.append((x, pair[of_pair]))
        if known:
            xs, heights, bars = zip(*known, strict=True)
            lengths = None if bars[0] is None else bars
            ax.errorbar(xs, heights, lengths, label=plain(row), capsize=3, **style(number))
        if theirs:
            label = None if known else plain(f"{row}, paper")
            ax.plot(*zip(*theirs, strict=True), linestyle="--", alpha=0.6, label=label, **style(number))


def _draw_curves(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    with figure(page, name, "Test accuracy by steps taken, mean over seeds", panels=len(panel.columns)) as axes:
        for ax, column in zip(axes, panel.columns, strict=True):
            for number, row in enumerate(panel.rows):
                results = [o.result for o in panel.outcomes[row, column] if o.finished and o.result]
                known = [result for result in results if result.get("test_accuracy_curve")]
                if known:
                    curves = zip(*(result["test_accuracy_curve"] for result in known), strict=False)
                    mean = [100 * statistics.fmean(values) for values in curves]
                    steps = known[0]["evaluated_after_steps"]
                    ax.plot(steps[: len(mean)], mean, label=plain(row), color=style(number)["color"])
            ax.set_title(plain(column if grid.report.columns is None else f"{grid.report.columns} {column}"))
            _finish(ax, "steps", "test accuracy (%)")


def _draw_snr(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    with figure(page, name, "Accuracy beside steps and signal-to-noise ratio", panels=2) as axes:
        for ax, (label, quantity) in zip(axes, BESIDE.items(), strict=True):
            for number, row in enumerate(panel.rows):
                if known := sorted(panel.pairs(row, quantity, LAST)):
                    ax.plot(*zip(*known, strict=True), label=plain(row), **style(number))
            _finish(ax, label, "test accuracy (%)")


def _finish(ax: Any, x: str, y: str) -> None:
    ax.set(xlabel=plain(x), ylabel=y)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)


#: By their names in a grid's file.
DRAWINGS = {"accuracy": _draw_accuracy, "deviation": _draw_deviation, "curves": _draw_curves, "snr": _draw_snr}
