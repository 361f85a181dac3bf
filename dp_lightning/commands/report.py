"""`dpl report`: a run as a page, or the tables and figures of a grid's runs beside the paper's numbers.

dpl report lightning_logs/version_0     writes report.html into the folder of the run
dpl report configs/grids/digits.yaml    writes <out>/report/<grid>/report.html, report.md and the figures
"""

import argparse
import hashlib
from collections.abc import Sequence
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.named_configs import path_of
from dp_lightning.commands.sweep import add_grid_options, outcomes_of, planned_runs
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.report import grid_report
from dp_lightning.experiments.runs import RUN_PAGE


def main(arguments: list[str]) -> None:
    """Write the page of a run or of a grid, and print where it is.

    Raises:
        DpLightningError: if there is no such run or grid, or an option does not belong to it.
    """
    options = _parser().parse_args(arguments[1:])
    if options.target.is_dir():
        _report_run(options.target, options)
    else:
        _report_grid(options.target, options)


def _report_run(folder: Path, options: argparse.Namespace) -> None:
    if options.override or options.out is not None:
        raise ConfigurationError("--out and --override belong to the report of a grid; leave them out for a run.")
    # Imported here to keep --help fast.
    from dp_lightning.commands.run_files import RunFiles
    from dp_lightning.commands.run_page import headline, run_page

    require_writable(folder, "The folder of the run")
    run = RunFiles.read(folder)
    if options.release and run.release != "ok":
        raise ConfigurationError(f"--release: {folder} is {run.release}. Leave --release out for a page of your own.")
    page = run_page(run, release=options.release)
    print(headline(run))
    print(f"Written to {page.write_html('report_release.html' if options.release else RUN_PAGE)}")


def _report_grid(path: Path, options: argparse.Namespace) -> None:
    if options.release:
        raise ConfigurationError("--release belongs to the report of a run; give a run's folder, or leave it out.")
    out = Path("sweeps") if options.out is None else options.out
    grid = Grid.load(path_of(path, grid=True))
    runs = planned_runs(grid, out, options.override)
    folder = out / "report" / _name(path, options.override)
    require_writable(folder, "--out")
    page = grid_report(grid, outcomes_of(runs), folder, override=options.override)
    page.publish("report")


def _name(grid: Path, override: Sequence[str]) -> str:
    """The name of the page's folder: with overrides, a grid has a separate page."""
    text = "\n".join(override)
    return grid.stem + (f"-{hashlib.sha256(text.encode()).hexdigest()[:8]}" if override else "")


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
    parser.add_argument(
        "--release",
        action="store_true",
        help="of a run: write report_release.html, without numbers computed from raw training examples",
    )
    add_grid_options(parser)
    return parser
