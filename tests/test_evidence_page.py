"""The tables of accuracies on the page of evidence follow from the files with all runs, and these are complete."""

import csv
import math
import re
import statistics

import pytest
from pages import ROOT, read, tables

from dp_lightning.experiments.grid import Grid

pytestmark = pytest.mark.docs

FOLDER = ROOT / "docs" / "evidence"
GRIDS = ("literal_per_layer", "orthogonalization", "orthogonalization_epsilon", "orthogonalization_steps")
RUNS = {name: list(csv.DictReader((FOLDER / f"{name}.csv").open())) for name in GRIDS}
SECTIONS = re.split(r"^## ", read("docs/evidence.md"), flags=re.MULTILINE)[1:]
# The tables of accuracies under a heading: the file with their runs, and for each the runs of it that count.
SHOWN = {
    "The same number of epochs": ("orthogonalization", [{}]),
    "The same number of steps": ("orthogonalization_steps", [{}]),
    "Less and more privacy": ("orthogonalization_epsilon", [{"target_epsilon": "1.0"}, {"target_epsilon": "8.0"}]),
    "The literal reading of clipping by layer": ("literal_per_layer", [{}]),
}


def mean_and_deviation(runs):
    """Of the only learning rate that has runs with all three seeds, in per cent."""
    by_rate = {run["lr"]: [float(r["test_accuracy"]) for r in runs if r["lr"] == run["lr"]] for run in runs}
    (accuracies,) = [each for each in by_rate.values() if len(each) == 3]
    return statistics.mean(accuracies), statistics.stdev(accuracies)


@pytest.mark.parametrize("name", GRIDS)
def test_a_file_has_all_runs_of_its_grid(name):
    grid = Grid.load(ROOT / "configs" / "grids" / f"{name}.yaml")
    axes = {axis: len(points) for axis, points in grid.axes.items()}
    seeds, tried = axes.pop("seed"), axes.pop(grid.tuned)
    assert len(RUNS[name]) == math.prod(axes.values()) * (tried + seeds - 1)


@pytest.mark.parametrize("title", SHOWN)
def test_a_table_of_accuracies_follows_from_the_runs(title):
    (section,) = [section for section in SECTIONS if section.startswith(title)]
    name, selections = SHOWN[title]
    shown = [table for table in tables(section) if any("±" in cell.text for row in table.rows for cell in row)]
    for table, selected in zip(shown, selections, strict=True):
        for method, *cells in table.rows:
            for size, cell in zip(table.head[1:], cells, strict=True):
                wanted = {**selected, table.head[0].partition(" ")[0]: method.text}
                wanted |= {"batch_size": size} if size.isdigit() else {}
                runs = [run for run in RUNS[name] if wanted.items() <= run.items()]
                # The runs have one decimal.
                assert [*map(float, cell.text.split(" ± "))] == pytest.approx(mean_and_deviation(runs), abs=0.101)
