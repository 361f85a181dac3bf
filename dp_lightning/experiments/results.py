"""The results of a grid's runs, averaged over seeds."""

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dp_lightning.experiments.grid import SEED, Grid
from dp_lightning.experiments.runs import RunFolder, is_finished

# The label of a single row or column, where there is no axis.
_ALL = "all runs"

Quantity = Callable[[Mapping[str, Any]], float | None]


@dataclass(frozen=True)
class Outcome:
    """A run of a grid, its folder and its result."""

    labels: Mapping[str, str]
    folder: RunFolder
    result: Mapping[str, Any] | None

    @property
    def name(self) -> str:
        """Its labels, as text."""
        return " ".join(self.labels.values())

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return is_finished(self.result)

    def is_at(self, axis: str | None, label: str) -> bool:
        """Whether it has this label on the axis; true if there is no axis."""
        return axis is None or self.labels[axis] == label

    @classmethod
    def read(cls, labels: Mapping[str, str], folder: RunFolder) -> "Outcome":
        """Read the folder of a run."""
        return cls(labels, folder, folder.result)


class Spread(NamedTuple):
    """A quantity over the seeds of one place in a table."""

    mean: float | None
    """None if no finished run has the quantity."""
    deviation: float | None
    """Standard deviation of a sample, n - 1; None for fewer than two runs."""
    runs: int
    """Finished runs that have the quantity."""
    planned: int


def spread(outcomes: Sequence[Outcome], quantity: Quantity) -> Spread:
    """Mean and standard deviation over the finished runs."""
    values = [quantity(o.result) for o in outcomes if o.finished and o.result is not None]
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known else None
    return Spread(mean, statistics.stdev(known) if len(known) > 1 else None, len(known), len(outcomes))


@dataclass(frozen=True)
class Panel:
    """The runs that share their points on all axes but the rows, the columns, the tuned one and the seed."""

    title: str
    """The points that they share; empty if there is no other axis."""
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    outcomes: Mapping[tuple[str, str], tuple[Outcome, ...]]
    """By row and column."""

    def spread(self, row: str, column: str, quantity: Quantity) -> Spread:
        """A quantity over the seeds of one place."""
        return spread(self.outcomes[row, column], quantity)

    def pairs(self, row: str, x: Quantity, y: Quantity) -> list[tuple[float, float]]:
        """The means of two quantities at the columns that have both."""
        found = [(self.spread(row, column, x).mean, self.spread(row, column, y).mean) for column in self.columns]
        return [(x, y) for x, y in found if x is not None and y is not None]

    def results(self) -> list[Mapping[str, Any]]:
        """The results of its finished runs."""
        return [o.result for found in self.outcomes.values() for o in found if o.finished and o.result is not None]


def panels(grid: Grid, outcomes: Sequence[Outcome]) -> Iterator[Panel]:
    """One panel for each combination of points on the axes that are neither rows, columns, tuned nor the seed."""
    rows, columns = grid.report.rows, grid.report.columns
    others = [axis for axis in grid.axes if axis not in (rows, columns, grid.tuned, SEED)]
    row_labels, column_labels = _labels(grid, rows), _labels(grid, columns)
    for shared in itertools.product(*([point.label for point in grid.axes[axis]] for axis in others)):
        mine = [o for o in outcomes if all(o.labels[a] == label for a, label in zip(others, shared, strict=True))]
        places = {
            (row, column): tuple(o for o in mine if o.is_at(rows, row) and o.is_at(columns, column))
            for row in row_labels
            for column in column_labels
        }
        title = ", ".join(f"{axis} {label}" for axis, label in zip(others, shared, strict=True))
        yield Panel(title, row_labels, column_labels, places)


def _labels(grid: Grid, axis: str | None) -> tuple[str, ...]:
    return (_ALL,) if axis is None else tuple(point.label for point in grid.axes[axis])


def per_cent(key: str) -> Quantity:
    """The accuracy that ``result.json`` has under a key, in per cent."""
    return lambda result: None if result.get(key) is None else 100 * result[key]


#: Accuracy after the last step.
LAST = per_cent("test_accuracy_last")
#: The same on validation images.
VALIDATION = per_cent("val_accuracy_last")
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


def correlation(panel: Panel, row: str, accuracy: Quantity, other: Quantity) -> float | None:
    """Pearson's r of the mean accuracy with another quantity over the columns; None for fewer than three."""
    pairs = panel.pairs(row, other, accuracy)
    try:
        return statistics.correlation(*zip(*pairs, strict=True)) if len(pairs) > 2 else None
    except statistics.StatisticsError:  # one of them does not vary
        return None
