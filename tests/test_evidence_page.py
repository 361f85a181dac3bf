"""The page of evidence shows what the reports of its grids say, and these are complete."""

import math
import re

import pytest
from pages import ROOT, read, tables

from dp_lightning.experiments.grid import Grid

pytestmark = pytest.mark.docs

REPORTS = sorted((ROOT / "docs" / "evidence").glob("*.md"))
SECTIONS = re.split(r"^## ", read("docs/evidence.md"), flags=re.MULTILINE)[1:]


def shown(table):
    return [table.head, *(tuple(cell.text for cell in row) for row in table.rows)]


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.stem)
def test_a_report_has_all_runs_of_its_grid(path):
    grid, text = Grid.load(ROOT / "configs" / "grids" / f"{path.stem}.yaml"), path.read_text()
    assert text.startswith(f"# {grid.title}\n\n`dpl sweep configs/grids/{grid.path.name}`, ")
    finished, asked = map(int, re.search(r"(\d+) of (\d+) runs are finished", text).groups())
    axes = {axis: len(points) for axis, points in grid.axes.items()}
    seeds, tried = axes.pop("seed"), axes.pop(grid.tuned)
    assert finished == asked == math.prod(axes.values()) * (tried + seeds - 1)
    (runs,) = [table for table in tables(text) if table.head[: len(grid.axes)] == tuple(grid.axes)]
    assert len(runs.rows) == finished
    assert all((path.parent / picture).is_file() for picture in re.findall(r"!\[.*?\]\((.*?)\)", text))


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.partition("\n")[0])
def test_a_table_of_accuracies_is_one_of_a_report_in_the_same_section(section):
    reports = re.findall(r"\(evidence/(\w+\.md)\)", section)
    theirs = [shown(table) for name in reports for table in tables((ROOT / "docs" / "evidence" / name).read_text())]
    for table in tables(section):
        if any("±" in cell.text for row in table.rows for cell in row):
            assert shown(table) in theirs


def test_every_report_is_linked():
    assert sorted(set(re.findall(r"\(evidence/(\w+\.md)\)", read("docs/evidence.md")))) == [p.name for p in REPORTS]
