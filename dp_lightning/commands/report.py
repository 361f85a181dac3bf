"""`dpl report`: a run as a page, or the tables and figures of a grid's runs beside the paper's numbers.

dpl report lightning_logs/version_0     writes report.html into the folder of the run
dpl report digits                       writes <out>/report/<grid>/report.html, report.md and the figures
"""

import argparse
import hashlib
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.configs import path_of
from dp_lightning.commands.sweep import add_grid_options, outcomes_of, planned_runs, spent_together
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.report import grid_report


def main(arguments: list[str]) -> None:
    """Write the page of a run or of a grid, and print where it is.

    Raises:
        DpLightningError: if there is no such run or grid, or an option does not belong to it.
    """
    options = _parser().parse_args(arguments[1:])
    target: Path = options.target
    if target.is_dir():
        if options.override or options.out is not None:
            raise ConfigurationError("--out and --override belong to the report of a grid; leave them out for a run.")
        # Imported here, since the report of a grid needs no torch.
        from dp_lightning.commands.run_page import run_page

        require_writable(target, "The folder of the run")
        page, headline = run_page(target)
        print(headline)
        print(f"Written to {page.write_html('report.html')}")
        return
    out = Path("sweeps") if options.out is None else options.out
    grid = Grid.load(path_of(target, grid=True))
    outcomes = outcomes_of(planned_runs(grid, out, options.override))
    # With overrides, a grid has a separate page.
    other = f"-{hashlib.sha256(repr(options.override).encode()).hexdigest()[:8]}" if options.override else ""
    folder = out / "report" / f"{grid.path.stem}{other}"
    require_writable(folder, "--out")
    page = grid_report(grid, outcomes, folder, override=options.override, spent=spent_together(outcomes))
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
