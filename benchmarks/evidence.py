"""Writes the reports of finished grids into `docs/evidence`, with the machine, the date and the hours that they took.

    dpl sweep configs/grids/orthogonalization.yaml --out sweeps --jobs 2
    python benchmarks/evidence.py orthogonalization --out sweeps

What leads to the folders of the runs is left out: they are on the machine that made the runs.
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
# The column of the table of runs that is of use where the runs are.
_LEFT_OUT = "files"


def page(markdown: str, said: str) -> str:
    """The report's Markdown with a paragraph below its title, without its last paragraph and the links to runs."""
    title, _, rest = markdown.partition("\n\n")
    blocks = [_without_links(block) if f" | {_LEFT_OUT} |" in block else block for block in rest.strip().split("\n\n")]
    return "\n\n".join([title, said, *(block for block in blocks if not block.startswith("dpl report "))]) + "\n"


def _without_links(table: str) -> str:
    rows = [row.removeprefix("| ").removesuffix(" |").split(" | ") for row in table.splitlines()]
    places = [place for place, name in enumerate(rows[0]) if name != _LEFT_OUT]
    return "\n".join("| " + " | ".join(row[place] for place in places) + " |" for row in rows)


def made(name: str, outcomes: Sequence[Outcome], machine: str) -> str:
    """Where and when the runs of a grid were made, and how long they took."""
    results = [outcome.result for outcome in outcomes if outcome.result is not None]
    hours = sum(result["seconds"] for result in results) / 3600
    ended = max((logs / "result.json").stat().st_mtime for o in outcomes if (logs := o.folder.logs) is not None)
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
