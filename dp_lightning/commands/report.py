"""`dpl report`: a run as a page, or the tables and figures of a grid's runs beside the paper's numbers.

dpl report lightning_logs/version_0     writes report.html into the folder of the run
dpl report digits                       writes <out>/report/<grid>/report.html, report.md and the figures
"""

import argparse
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.configs import path_of
from dp_lightning.commands.sweep import add_grid_options, planned_runs, spent_together
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.report import grid_report


def main(arguments: list[str]) -> None:
    """Write the page of a run or of a grid, and print where it is.

    Raises:
        DpLightningError: if there is no such run or grid.
    """
    options = _parser().parse_args(arguments[1:])
    target: Path = options.target
    if target.is_dir():
        # Imported here, so that --help answers at once.
        from dp_lightning.commands.run_page import run_page

        require_writable(target, "The folder of the run")
        page, headline = run_page(target)
        print(headline)
        print(f"Written to {page.write_html('report.html')}")
        return
    grid = Grid.load(path_of(target, grid=True))
    runs = planned_runs(grid, options.out, options.override)
    folder = options.out / "report" / grid.path.stem
    require_writable(folder, "--out")
    page = grid_report(grid, runs, folder, override=options.override, spent=spent_together(runs))
    page.publish("report")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "target", type=Path, metavar="RUN|GRID", help="the folder of a run, or the file or name of a grid"
    )
    add_grid_options(parser)
    return parser
