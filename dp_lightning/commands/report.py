"""`dpl report`: the tables and figures of a grid's runs, beside the paper's numbers."""

import argparse
from pathlib import Path

from dp_lightning.commands.sweep import add_grid_options, planned_runs
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.report import grid_report
from dp_lightning.experiments.results import Outcome
from dp_lightning.files import replacing, require_writable


def main(arguments: list[str]) -> None:
    """Write ``<out>/report/<grid>/report.md``, ``report.html`` and the figures, and print the Markdown.

    Args:
        arguments: the command and its options.

    Raises:
        DpLightningError: naming the setting and the fix.
    """
    options = _parser().parse_args(arguments[1:])
    grid = Grid.load(options.grid)
    runs = planned_runs(grid, options.out, options.override)
    folder: Path = options.out / "report" / options.grid.stem
    require_writable(folder, "--out")
    page = grid_report(grid, [Outcome.read(run.cell.labels, run.folder) for run in runs], folder)
    for name, text in (("report.md", page.markdown()), ("report.html", page.html())):
        with replacing(folder / name) as file:
            file.write(text.encode())
    print(page.markdown())
    print(f"Written to {folder / 'report.html'}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl report", description=__doc__, allow_abbrev=False)
    add_grid_options(parser)
    return parser
