"""Writes the reports of finished grids into `docs/evidence`, with the machine, the date and the hours that they took.

dpl sweep configs/grids/orthogonalization.yaml --out sweeps --jobs 2
python benchmarks/evidence.py orthogonalization --out sweeps
"""

import argparse
import contextlib
import io
import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

from dp_lightning.commands.sweep import outcomes_of, planned_runs
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.report import grid_report
from dp_lightning.experiments.results import Outcome, needed

sys.path.insert(0, str(Path(__file__).parent))

from step import hardware

ROOT = Path(__file__).parents[1]
_GRIDS, _PAGES = ROOT / "configs" / "grids", ROOT / "docs" / "evidence"


def page(markdown: str, said: str) -> str:
    """The report's Markdown with a paragraph below its title, and without its last one, on the folders of the runs."""
    title, *blocks, _ = markdown.strip().split("\n\n")
    return "\n\n".join([title, said, *blocks]) + "\n"


def made(name: str, outcomes: Sequence[Outcome], machine: str) -> str:
    """Where and when the runs of a grid were made, and how long they took."""
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    hours = sum(result["seconds"] for result in results) / 3600
    ended = max(path.stat().st_mtime for o in outcomes for path in o.folder.root.rglob("result.json"))
    date = datetime.fromtimestamp(ended, tz=UTC).date()
    return f"`dpl sweep configs/grids/{name}.yaml`, {machine}, {date}: {hours:.1f} hours of runs."


def write(name: str, out: Path, machine: str) -> Path:
    """Write the page of a grid and its figures; returns the page.

    Raises:
        SystemExit: if a run of the grid is not finished.
    """
    grid = Grid.load(_GRIDS / f"{name}.yaml")
    outcomes = outcomes_of(planned_runs(grid, out, []))
    if missing := sum(not outcome.finished for outcome in needed(grid, outcomes)):
        sys.exit(f"{missing} runs of {name} are not finished in {out}; dpl sweep {grid.path} --out {out} makes them.")
    report = grid_report(grid, outcomes, out / "report" / name)
    with contextlib.redirect_stdout(io.StringIO()):
        report.publish("report")
    _PAGES.mkdir(exist_ok=True)
    for picture in report.folder.glob("*.svg"):
        shutil.copy(picture, _PAGES)
    (_PAGES / f"{name}.md").write_text(page(report.markdown(), made(name, outcomes, machine)))
    return _PAGES / f"{name}.md"


def main() -> None:
    """Write the pages that are asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="+", metavar="GRID", help="names of files in configs/grids, without .yaml")
    parser.add_argument("--out", type=Path, default=Path("sweeps"), help="folder of the runs (default: sweeps)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of a run, for the page (default: 1)")
    options = parser.parse_args()
    machine = hardware("cuda" if torch.cuda.is_available() else "cpu", options.threads).rpartition(",")[0]
    for name in options.grids:
        print(write(name, options.out, machine))


if __name__ == "__main__":
    main()
