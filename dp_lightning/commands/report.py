"""`dpl report`: the tables and figures of a grid's runs, beside the paper's numbers."""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.named_configs import path_of
from dp_lightning.commands.sweep import add_grid_options, planned_runs
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.report import grid_report
from dp_lightning.experiments.results import Outcome


def main(arguments: list[str]) -> None:
    """Write ``<out>/report/<grid>/report.md``, ``report.html`` and the figures, and print the Markdown."""
    options = _parser().parse_args(arguments[1:])
    grid = Grid.load(path_of(options.grid, grid=True))
    runs = planned_runs(grid, options.out, options.override)
    folder: Path = options.out / "report" / _name(options.grid, options.override)
    require_writable(folder, "--out")
    found = [Outcome.read(run.cell.labels, run.folder) for run in runs]
    page = grid_report(grid, found, folder, override=options.override)
    page.publish("report")


def _name(grid: Path, override: Sequence[str]) -> str:
    """The name of the page's folder: with overrides, a grid has a separate page."""
    text = "\n".join(override)
    return grid.stem + (f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}" if override else "")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl report", description=__doc__, allow_abbrev=False)
    add_grid_options(parser)
    return parser
