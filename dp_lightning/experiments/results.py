"""The results of a grid's runs, averaged over seeds, and which runs a grid with a tuned axis needs.

A place of a grid is a combination of points on all axes but the tuned one and the seed. A tuned axis is tried at each
of its points with the first seed; the point that is best at a place, by validation accuracy after the last step, runs
there with every seed.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any, TypeVar

import yaml

from dp_lightning.experiments.grid import SEED, Cell, Grid
from dp_lightning.experiments.runs import RunFolder

#: Accuracy after the last step on test images, the best one over evaluations, and the last one on validation images.
LAST, BEST, VALIDATION = "test_accuracy_last", "test_accuracy_best", "val_accuracy_last"
#: Numbers that accuracy is compared with, in words.
BESIDE = {"num_steps": "steps", "snr_first_epoch": "signal-to-noise ratio, first epoch"}


def published() -> dict[str, Any]:
    """The tables of Shanmugam et al. 2026 as ``published.yaml`` holds them."""
    tables: dict[str, Any] = yaml.safe_load(files("dp_lightning.experiments").joinpath("published.yaml").read_text())
    return tables


@dataclass(frozen=True)
class Run:
    """A run of a grid.

    Attributes:
        cell: Labels of the run, and its options of ``dpl fit``.
        settings: Its whole configuration.
        folder: Folder of the run.
        result: The result in the folder when it was read; None if there was none.
    """

    cell: Cell
    settings: Mapping[str, Any]
    folder: RunFolder
    result: Mapping[str, Any] | None

    def read(self) -> "Run":
        """The run with the result that its folder has now."""
        return replace(self, result=self.folder.result)

    @property
    def labels(self) -> Mapping[str, str]:
        """Label of the run's point on each axis."""
        return self.cell.labels

    @property
    def finished(self) -> bool:
        """Whether the run is finished."""
        return self.result is not None and self.result["completed"]

    def value(self, key: str) -> float | None:
        """A number of the result, an accuracy in per cent; None if the run is not finished or lacks it."""
        value = self.result.get(key) if self.result is not None and self.finished else None
        return value if value is None or "accuracy" not in key else 100 * value


@dataclass(frozen=True)
class Place:
    """The runs of one place of a grid, which differ in the seed alone.

    Attributes:
        labels: The labels of the place's points.
        runs: The runs; none as long as the point on the tuned axis is not chosen.
        chosen: The label of that point; None if it is not chosen, or no axis is tuned.
    """

    labels: Mapping[str, str]
    runs: tuple[Run, ...]
    chosen: str | None

    def values(self, key: str) -> list[float]:
        """A number of the results of the finished runs that have it."""
        return [value for run in self.runs if (value := run.value(key)) is not None]

    def mean(self, key: str) -> float:
        """The mean of a number over the seeds; NaN if no finished run has it."""
        return statistics.fmean(values) if (values := self.values(key)) else math.nan

    def deviation(self, key: str) -> float:
        """The standard deviation of a sample, n - 1, of a number over the seeds; NaN for fewer than two runs."""
        return statistics.stdev(values) if len(values := self.values(key)) > 1 else math.nan


_Labelled = TypeVar("_Labelled", Run, Place)


def places(grid: Grid, runs: Sequence[Run]) -> list[Place]:
    """The places of a grid, in its order."""
    axes = [axis for axis in grid.axes if axis not in (grid.tuned, SEED)]
    found = []
    for labels, here in grouped(runs, axes).items():
        chosen = None if grid.tuned is None else _best(grid, grid.tuned, here)
        shown = here if grid.tuned is None else [run for run in here if run.labels[grid.tuned] == chosen]
        found.append(Place(dict(zip(axes, labels, strict=True)), tuple(shown), chosen))
    return found


def grouped(every: Sequence[_Labelled], axes: Sequence[str]) -> dict[tuple[str, ...], list[_Labelled]]:
    """The runs or places by their labels on some axes."""
    groups: dict[tuple[str, ...], list[_Labelled]] = {}
    for one in every:
        groups.setdefault(tuple(one.labels[axis] for axis in axes), []).append(one)
    return groups


def _is_first(grid: Grid, labels: Mapping[str, str]) -> bool:
    """Whether a run has the first seed."""
    return SEED not in grid.axes or labels[SEED] == grid.axes[SEED][0].label


def _best(grid: Grid, tuned: str, runs: Sequence[Run]) -> str | None:
    """The best label of the tuned axis at a place.

    None where a run with the first seed is not finished, or has no validation accuracy.
    """
    tried = {run.labels[tuned]: run.value(VALIDATION) for run in runs if _is_first(grid, run.labels)}
    known = {label: value for label, value in tried.items() if value is not None}
    return max(known, key=lambda label: known[label]) if len(known) == len(tried) else None


def needed(grid: Grid, runs: Sequence[Run]) -> list[Run]:
    """The runs that the grid needs, as far as that is known, in their order: all of them without a tuned axis."""
    shown = {run.folder.path for place in places(grid, runs) for run in place.runs}
    return [r for r in runs if r.folder.path in shown or (grid.tuned is not None and _is_first(grid, r.labels))]


def shown_epsilon(epsilon: float | str) -> str:
    """Epsilon with three decimals, rounded up: what is shown is never below what was spent."""
    return epsilon if isinstance(epsilon, str) else f"{math.ceil(1000 * epsilon) / 1000:.3f}"


def shown_duration(seconds: float) -> str:
    """Seconds, minutes or hours."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
