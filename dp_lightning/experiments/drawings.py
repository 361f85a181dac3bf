"""The figures of a grid's page, each from the runs of a panel and the paper's numbers; none where there is no point."""

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Any

from dp_lightning.experiments.document import Document
from dp_lightning.experiments.figures import figure, place_on_axis, plain, style
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.results import BESIDE, LAST, Panel, Spread


def _draw_accuracy(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    caption = "Test accuracy after the last step"
    lines = _Lines(panel, paper, lambda found: (found.mean, found.deviation), 0)
    lines.draw(page, name, grid, caption, "the paper (best over epochs, dashed)", "test accuracy (%)")


def _draw_deviation(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    caption = "Standard deviation of the last test accuracy over seeds"
    lines = _Lines(panel, paper, lambda found: (found.deviation, None), 1)
    lines.draw(page, name, grid, caption, "the paper (dashed)", "standard deviation (points)")


class _Lines:
    """A line for each row over the columns, and the paper's beside it.

    Args:
        shown: height of a point and length of its error bar; a height of None is no point, a length of None no bar.
        of_pair: which number of the paper's pair is shown.
    """

    def __init__(
        self,
        panel: Panel,
        paper: Mapping[str, Any],
        shown: Callable[[Spread], tuple[float | None, float | None]],
        of_pair: int,
    ) -> None:
        self.panel, self.paper, self.of_pair = panel, paper, of_pair
        self.points = {row: [shown(panel.spread(row, column, LAST)) for column in panel.columns] for row in panel.rows}

    def draw(self, page: Document, name: str, grid: Grid, caption: str, papers: str, y: str) -> None:
        """Add the figure, unless no run has a point in it."""
        if all(height is None for points in self.points.values() for height, _ in points):
            return
        with figure(page, name, f"{caption}, and {papers}" if self.paper else caption) as (ax,):
            places = place_on_axis(ax, self.panel.columns)
            for number, (row, points) in enumerate(self.points.items()):
                known = [
                    (x, height, math.nan if bar is None else bar)
                    for x, (height, bar) in zip(places, points, strict=True)
                    if height is not None
                ]
                if known:
                    ax.errorbar(*zip(*known, strict=True), label=plain(row), capsize=3, **style(number))
                pairs = [self.paper.get(row, {}).get(column, []) for column in self.panel.columns]
                of = self.of_pair
                theirs = [(x, pair[of]) for x, pair in zip(places, pairs, strict=True) if len(pair) > of]
                if theirs:
                    label = None if known else plain(f"{row}, paper")
                    ax.plot(*zip(*theirs, strict=True), linestyle="--", alpha=0.6, label=label, **style(number))
            _finish(ax, grid.report.columns or "", y)


def _draw_curves(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    curves = {
        (row, column): [
            outcome.result
            for outcome in panel.outcomes[row, column]
            if outcome.finished and outcome.result and outcome.result.get("test_accuracy_curve")
        ]
        for row in panel.rows
        for column in panel.columns
    }
    columns = [column for column in panel.columns if any(curves[row, column] for row in panel.rows)]
    if not columns:
        return
    mean = ", mean over seeds" if any(len(known) > 1 for known in curves.values()) else ""
    with figure(page, name, f"Test accuracy by steps taken{mean}", panels=len(columns)) as axes:
        for ax, column in zip(axes, columns, strict=True):
            for number, row in enumerate(panel.rows):
                if known := curves[row, column]:
                    of_each = zip(*(result["test_accuracy_curve"] for result in known), strict=False)
                    heights = [100 * statistics.fmean(values) for values in of_each]
                    steps = known[0]["evaluated_after_steps"]
                    ax.plot(steps[: len(heights)], heights, label=plain(row), color=style(number)["color"])
            ax.set_title(plain(column if grid.report.columns is None else f"{grid.report.columns} {column}"))
            _finish(ax, "steps", "test accuracy (%)")


def _draw_snr(page: Document, name: str, grid: Grid, panel: Panel, paper: Mapping[str, Any]) -> None:
    found = {
        label: {row: sorted(panel.pairs(row, quantity, LAST)) for row in panel.rows}
        for label, quantity in BESIDE.items()
    }
    found = {label: lines for label, lines in found.items() if any(lines.values())}
    if not found:
        return
    caption = f"Accuracy beside {' and '.join(found)}"
    with figure(page, name, caption, panels=len(found)) as axes:
        for ax, (label, lines) in zip(axes, found.items(), strict=True):
            for number, (row, pairs) in enumerate(lines.items()):
                if pairs:
                    ax.plot(*zip(*pairs, strict=True), label=plain(row), **style(number))
            _finish(ax, label, "test accuracy (%)")


def _finish(ax: Any, x: str, y: str) -> None:
    ax.set(xlabel=plain(x), ylabel=y)
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize=8)


#: By their names in a grid's file.
DRAWINGS = {"accuracy": _draw_accuracy, "deviation": _draw_deviation, "curves": _draw_curves, "snr": _draw_snr}
