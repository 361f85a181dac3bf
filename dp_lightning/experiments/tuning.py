"""Which runs a grid with a tuned axis needs: each point of the axis with the first seed, and the best with every seed.

The best point has the highest validation accuracy after the last step. It is chosen for each place of the grid, which
is a combination of points on the other axes.
"""

from collections.abc import Mapping, Sequence

from dp_lightning.experiments.grid import SEED, Grid
from dp_lightning.experiments.results import VALIDATION, Outcome

Place = tuple[str, ...]


def place_of(grid: Grid, labels: Mapping[str, str]) -> Place:
    """The labels of a run on all axes but the tuned one and the seed."""
    return tuple(label for axis, label in labels.items() if axis not in (grid.tuned, SEED))


def is_first(grid: Grid, labels: Mapping[str, str]) -> bool:
    """Whether a run has the first seed."""
    return SEED not in grid.axes or labels[SEED] == grid.axes[SEED][0].label


def chosen_points(grid: Grid, outcomes: Sequence[Outcome]) -> dict[Place, str | None]:
    """The best label of the tuned axis at each place.

    None where a run with the first seed is not finished, or has no validation accuracy.
    """
    assert grid.tuned is not None
    tried: dict[Place, dict[str, float | None]] = {}
    for outcome in outcomes:
        if is_first(grid, outcome.labels):
            found = VALIDATION(outcome.result) if outcome.finished and outcome.result is not None else None
            tried.setdefault(place_of(grid, outcome.labels), {})[outcome.labels[grid.tuned]] = found
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
    return [o for o in outcomes if o.labels[grid.tuned] == chosen[place_of(grid, o.labels)]]


def needed(grid: Grid, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The runs that the grid needs, as far as that is known, in their order: all of them without a tuned axis."""
    shown = {id(outcome) for outcome in at_chosen_points(grid, outcomes)}
    return [o for o in outcomes if id(o) in shown or (grid.tuned is not None and is_first(grid, o.labels))]
