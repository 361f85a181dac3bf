"""The results of a grid's runs, averaged over seeds, and which runs a grid with a tuned axis needs.

A tuned axis is tried at each of its points with the first seed; the best point, by validation accuracy after the last
step, runs with every seed. The best point is chosen for each place of the grid: each combination of points on the other
axes.
"""

import functools
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, NamedTuple

import yaml

from dp_lightning.experiments.grid import SEED, Grid
from dp_lightning.experiments.runs import RunFolder, is_finished

# The label of a single row or column, where there is no axis.
_ALL = "all runs"

Quantity = Callable[[Mapping[str, Any]], float | None]
Place = tuple[str, ...]


@functools.cache
def published() -> dict[str, Any]:
    """The tables of Shanmugam et al. 2026 as ``published.yaml`` holds them."""
    text = files("dp_lightning.experiments").joinpath("published.yaml").read_text(encoding="utf-8")
    tables: dict[str, Any] = yaml.safe_load(text)
    return tables


@dataclass(frozen=True)
class Outcome:
    """A run of a grid, its folder and its result."""

    labels: Mapping[str, str]
    folder: RunFolder
    result: Mapping[str, Any] | None

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return is_finished(self.result)

    def is_at(self, axis: str | None, label: str) -> bool:
        """Whether the run has this label on the axis; true if there is no axis."""
        return axis is None or self.labels[axis] == label

    @classmethod
    def read(cls, labels: Mapping[str, str], folder: RunFolder) -> "Outcome":
        """Read the folder of a run."""
        return cls(labels, folder, folder.result)


class Spread(NamedTuple):
    """A quantity over the seeds of one place in a table.

    Attributes:
        mean: None if no finished run has the quantity.
        deviation: Standard deviation of a sample, n - 1; None for fewer than two runs.
        runs: Number of finished runs that have the quantity.
        planned: Number of runs that the place has.
    """

    mean: float | None
    deviation: float | None
    runs: int
    planned: int


@dataclass(frozen=True)
class Panel:
    """The runs that share their points on all axes but the rows, the columns, the tuned one and the seed.

    Attributes:
        title: The points that the runs share; empty if there is no other axis.
        outcomes: The runs by row and column.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    outcomes: Mapping[tuple[str, str], tuple[Outcome, ...]]

    def results(self, row: str, column: str) -> list[Mapping[str, Any]]:
        """The results of the finished runs of one place."""
        return [o.result for o in self.outcomes[row, column] if o.finished and o.result is not None]

    def spread(self, row: str, column: str, quantity: Quantity) -> Spread:
        """Mean and standard deviation of a quantity over the seeds of one place."""
        known = [value for result in self.results(row, column) if (value := quantity(result)) is not None]
        mean = statistics.fmean(known) if known else None
        deviation = statistics.stdev(known) if len(known) > 1 else None
        return Spread(mean, deviation, len(known), len(self.outcomes[row, column]))

    def pairs(self, row: str, x: Quantity, y: Quantity) -> list[tuple[float, float]]:
        """The means of two quantities at the columns that have both."""
        found = [(self.spread(row, column, x).mean, self.spread(row, column, y).mean) for column in self.columns]
        return [(x, y) for x, y in found if x is not None and y is not None]

    def correlation(self, row: str, x: Quantity, y: Quantity) -> float | None:
        """Pearson's r of the means of two quantities over the columns; None for fewer than three."""
        pairs = self.pairs(row, x, y)
        try:
            return statistics.correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else None
        except statistics.StatisticsError:  # one of them does not vary
            return None


def panels(grid: Grid, outcomes: Sequence[Outcome]) -> Iterator[Panel]:
    """One panel for each combination of points on the axes that are neither rows, columns, tuned nor the seed."""
    rows, columns = grid.report.rows, grid.report.columns
    others = [axis for axis in grid.axes if axis not in (rows, columns, grid.tuned, SEED)]
    row_labels, column_labels = (
        (_ALL,) if axis is None else tuple(point.label for point in grid.axes[axis]) for axis in (rows, columns)
    )
    for shared in itertools.product(*([point.label for point in grid.axes[axis]] for axis in others)):
        mine = [o for o in outcomes if all(o.labels[a] == label for a, label in zip(others, shared, strict=True))]
        places = {
            (row, column): tuple(o for o in mine if o.is_at(rows, row) and o.is_at(columns, column))
            for row in row_labels
            for column in column_labels
        }
        title = ", ".join(f"{axis} {label}" for axis, label in zip(others, shared, strict=True))
        yield Panel(title, row_labels, column_labels, places)


def is_first(grid: Grid, labels: Mapping[str, str]) -> bool:
    """Whether a run has the first seed."""
    return SEED not in grid.axes or labels[SEED] == grid.axes[SEED][0].label


def _place_of(grid: Grid, labels: Mapping[str, str]) -> Place:
    """The labels of a run on all axes but the tuned one and the seed."""
    return tuple(label for axis, label in labels.items() if axis not in (grid.tuned, SEED))


def chosen_points(grid: Grid, outcomes: Sequence[Outcome]) -> dict[Place, str | None]:
    """The best label of the tuned axis at each place.

    None where a run with the first seed is not finished, or has no validation accuracy.
    """
    assert grid.tuned is not None
    tried: dict[Place, dict[str, float | None]] = {}
    for outcome in outcomes:
        if is_first(grid, outcome.labels):
            found = VALIDATION(outcome.result) if outcome.finished and outcome.result is not None else None
            tried.setdefault(_place_of(grid, outcome.labels), {})[outcome.labels[grid.tuned]] = found
    chosen: dict[Place, str | None] = {}
    for place, of_label in tried.items():
        known = {label: value for label, value in of_label.items() if value is not None}
        chosen[place] = max(known, key=lambda label: known[label]) if len(known) == len(of_label) else None
    return chosen


def at_chosen_points(grid: Grid, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The runs that tables and figures show: all of them without a tuned axis."""
    if grid.tuned is None:
        return list(outcomes)
    chosen = chosen_points(grid, outcomes)
    return [o for o in outcomes if o.labels[grid.tuned] == chosen[_place_of(grid, o.labels)]]


def needed(grid: Grid, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The runs that the grid needs, as far as that is known, in their order: all of them without a tuned axis."""
    shown = {id(outcome) for outcome in at_chosen_points(grid, outcomes)}
    return [o for o in outcomes if id(o) in shown or (grid.tuned is not None and is_first(grid, o.labels))]


def per_cent(key: str) -> Quantity:
    """The accuracy that ``result.json`` has under a key, in per cent."""
    return lambda result: None if result.get(key) is None else 100 * result[key]


#: Accuracy after the last step on test images, the best one over evaluations, and the last one on validation images.
LAST, BEST, VALIDATION = map(per_cent, ("test_accuracy_last", "test_accuracy_best", "val_accuracy_last"))
#: Quantities that accuracy is compared with, by name.
BESIDE: Mapping[str, Quantity] = {
    "steps": lambda result: float(result["num_steps"]),
    "signal-to-noise ratio, first epoch": lambda result: result.get("snr_first_epoch"),
}


def shown_epsilon(epsilon: float | str) -> str:
    """Epsilon with three decimals, rounded up: what is shown is never below what was spent."""
    return epsilon if isinstance(epsilon, str) else f"{math.ceil(1000 * epsilon) / 1000:.3f}"


def shown_duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
