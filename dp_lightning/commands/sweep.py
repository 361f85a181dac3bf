"""`dpl sweep`: the runs of a grid, each an ordinary `dpl fit` in its own folder.

Finished runs are not repeated, and interrupted runs resume from their last checkpoint, so the same command starts a
grid, resumes it, and runs what was added to it.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.configs import path_of
from dp_lightning.errors import ConfigurationError, DpLightningError
from dp_lightning.experiments.grid import SEED, Cell, Grid
from dp_lightning.experiments.launchers import LAUNCHERS, launched
from dp_lightning.experiments.results import Run, needed, places, shown_duration, shown_epsilon
from dp_lightning.experiments.runs import RunFolder


def main(arguments: list[str]) -> None:
    """Run the grid, or print what would be run.

    Raises:
        SystemExit: with 1 if a run has failed.
    """
    options = _parser().parse_args(arguments[1:])
    grid = Grid.load(path_of(options.grid, grid=True))
    runs = planned_runs(grid, options.out, options.override)
    if options.dry_run:
        _print_prices(grid, needed(grid, runs))
    else:
        require_writable(options.out, "--out")
    if options.release_best:
        from dp_lightning.commands.private_choice import release_best

        release_best(runs, options)
    if options.dry_run or options.release_best:
        return
    failed = _launch(grid, needed(grid, runs), options)
    runs = [run.read() for run in runs]
    if not failed and grid.tuned is not None and SEED in grid.axes:
        if any(place.chosen is None for place in places(grid, runs)):
            raise ConfigurationError(
                f"{grid.path}: {grid.tuned} is chosen by validation accuracy, and some runs have none. Keep some "
                "training images for it: val_fraction of the data (or of its images) above 0."
            )
        failed = _launch(grid, needed(grid, runs), options)
    print(spent_together(runs))
    if failed:
        names = "".join(f"\n  {run.cell.name}: {run.folder.log}" for run in failed)
        print(f"{len(failed)} runs failed; their logs say why. The same command resumes them:{names}", file=sys.stderr)
        sys.exit(1)
    print("All runs are finished. dpl report, with the same grid, --out and --override, writes tables and figures.")


def spent_together(runs: Sequence[Run]) -> str:
    """What all runs have spent on the same data, attempts that were set aside included; empty before the first step."""
    from dp_lightning.commands.total import total_epsilon
    from dp_lightning.privacy.journal import journals_in

    folders = [run.folder.path for run in runs if journals_in(run.folder.path)]
    try:
        return f"{total_epsilon(folders).sentence}." if folders else ""
    except DpLightningError as error:
        return f"What all runs have spent together is unknown: {error}"


def planned_runs(grid: Grid, out: Path, override: Sequence[str]) -> list[Run]:
    """The runs of a grid with their whole configurations, in folders in ``out``.

    Args:
        override: Settings of every run, as ``name=value``.

    Raises:
        DpLightningError: for a setting that does not parse, and two runs with the same settings.
    """
    # Imported here, so that --help answers at once.
    from dp_lightning.commands.fit_settings import SettingsReader

    read = SettingsReader()
    runs: list[Run] = []
    cells: dict[str, Cell] = {}
    for cell in grid.cells([f"--{text}" for text in override]):
        try:
            settings = read(cell.arguments)
        except DpLightningError as error:
            raise type(error)(f"{grid.path}, run {cell.name}: {error}") from error
        # Where a run writes does not change what it does.
        settings["trainer"].pop("default_root_dir", None)
        folder = RunFolder.of(out, cell.name, settings)
        runs.append(Run(cell, settings, folder, folder.result))
        if (other := cells.setdefault(json.dumps(settings, sort_keys=True, default=str), cell)) is not cell:
            raise ConfigurationError(f"{grid.path}: the runs {other.name} and {cell.name} have the same settings.")
    return runs


def _launch(grid: Grid, runs: Sequence[Run], options: argparse.Namespace) -> list[Run]:
    """Launch the runs that are not finished, print a line when one ends, and return the runs that failed."""
    waiting = {str(run.folder.path): run for run in runs if not run.finished}
    print(f"{grid.title}: {len(runs)} runs, {len(runs) - len(waiting)} finished, in {options.out}", flush=True)
    for run in waiting.values():
        run.folder.prepare(run.settings)
    failed, started = [], time.monotonic()
    with launched(list(waiting), options.launcher, options.launcher_option, options.jobs) as results:
        for number, (folder, status) in enumerate(results, start=1):
            run = waiting[folder].read()
            left = (time.monotonic() - started) / number * (len(waiting) - number)
            print(f"[{number}/{len(waiting)}] {_outcome(run, status)}; about {shown_duration(left)} left", flush=True)
            if not run.finished:
                failed.append(run)
    return failed


def _outcome(run: Run, status: int) -> str:
    result = run.result
    if result is None or not run.finished:
        return f"{run.cell.name} FAILED with status {status}, see {run.folder.log}"
    accuracy = result["test_accuracy_last"]
    shown = "no test set" if accuracy is None else f"test accuracy {100 * accuracy:.1f} %"
    epsilon = shown_epsilon(result["epsilon"]) + ("" if result["release"] == "ok" else f" ({result['release']})")
    return f"{run.cell.name}: {shown}, epsilon {epsilon}, {shown_duration(result['seconds'])}"


def _print_prices(grid: Grid, runs: Sequence[Run]) -> None:
    from dp_lightning.commands.pricing import Pricing

    print(f"{grid.title}: {len(runs)} runs")
    price = Pricing()
    left = 0.0
    for run in runs:
        print(f"\n{run.cell.name}" + (" (finished)" if run.finished else ""))
        print(f"  {shlex.join(['dpl', 'fit', *run.cell.arguments])}")
        try:
            plan, seconds = price(run.settings)
        except DpLightningError as error:
            print(f"  no price: {error}", flush=True)
            continue
        left += 0.0 if run.finished or seconds is None else seconds
        print(
            f"  epsilon {shown_epsilon(plan.epsilon())}, delta {plan.delta:g}, sigma {plan.noise_multiplier:.4g}, "
            f"{plan.num_steps} steps, {'time unknown' if seconds is None else f'about {shown_duration(seconds)} here'}",
            flush=True,
        )
    if grid.tuned is not None and len(grid.axes.get(SEED, ())) > 1:
        print(f"\nThen the other seeds run at the best {grid.tuned} of each place, which is not counted here.")
    print(f"\nIn total about {shown_duration(left)} on one device like this one. Each epsilon covers one run alone.")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("grid", type=Path, metavar="GRID", help="a file, or a name that `dpl configs` lists, as digits")
    add_grid_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the commands and what each run costs")
    best = "release the best of a secret number of runs with settings drawn from the grid, at the epsilon of the choice"
    parser.add_argument("--release-best", action="store_true", help=best)
    expected = "mean number of runs, for --release-best (default: 10)"
    parser.add_argument("--expected-runs", type=float, default=10.0, metavar="M", help=expected)
    number = "distribution of that number; Poisson may give no run (default: logarithmic)"
    parser.add_argument("--number", choices=("logarithmic", "poisson"), default="logarithmic", help=number)
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="local", help="default: local")
    parser.add_argument("--jobs", type=int, help="runs at a time, for local (default: one per GPU) and slurm")
    further = "for slurm, such as slurm_partition=gpu; for ray, such as num_gpus=1"
    parser.add_argument("--launcher-option", action="append", default=[], metavar="NAME=VALUE", help=further)
    return parser


def add_grid_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `dpl sweep` and `dpl report` share: they determine the folders of the runs."""
    parser.add_argument("--out", type=Path, default=Path("sweeps"), help="folder of the runs of a grid")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of every run, such as trainer.max_epochs=1; dpl report needs the same ones",
    )
