"""`dpl sweep`: the runs of a grid, each an ordinary `dpl fit` in its own folder.

Finished runs are not repeated, and interrupted runs resume from their last checkpoint, so the same command starts a
grid, resumes it, and runs what was added to it.
"""

import argparse
import json
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dp_lightning.atomic_files import require_writable
from dp_lightning.commands.configs import path_of, with_paths
from dp_lightning.errors import ConfigurationError, DpLightningError
from dp_lightning.experiments.grid import SEED, Cell, Grid
from dp_lightning.experiments.launchers import LAUNCHERS
from dp_lightning.experiments.results import Outcome, needed, places, shown_duration, shown_epsilon
from dp_lightning.experiments.runs import RunFolder, components, is_finished


class PlannedRun(NamedTuple):
    """A run of a grid: its options of ``dpl fit`` with the overrides, all its settings, and its folder."""

    cell: Cell
    arguments: tuple[str, ...]
    settings: dict[str, Any]
    folder: RunFolder


def main(arguments: list[str]) -> None:
    """Run the grid, or print what would be run.

    Raises:
        SystemExit: with 1 if a run has failed; with 130 or 143 after SIGINT or SIGTERM.
    """
    options = _parser().parse_args(arguments[1:])
    grid = Grid.load(path_of(options.grid, grid=True))
    runs = planned_runs(grid, options.out, options.override)
    if options.dry_run:
        _print_prices(grid, _needed(grid, runs))
        return
    require_writable(options.out, "--out")
    failed = _make(grid, _needed(grid, runs), options)
    if not failed and grid.tuned is not None and SEED in grid.axes:
        missing = [place.labels for place in places(grid, outcomes_of(runs)) if place.chosen is None]
        if missing:
            raise ConfigurationError(
                f"{grid.path}: {grid.tuned} is chosen by validation accuracy, and the runs of "
                f"{' '.join(missing[0].values())} have none. Keep some training images for it: val_fraction of the "
                "data (or of its images) above 0."
            )
        failed = _make(grid, _needed(grid, runs), options)
    print(spent_together(outcomes_of(runs)))
    if failed:
        names = "".join(f"\n  {run.cell.name}: {run.folder.log}" for run in failed)
        print(
            f"{len(failed)} runs failed; their logs say why. The same command resumes them. If a log says that a run "
            f"cannot resume, remove its folder first:{names}",
            file=sys.stderr,
        )
        sys.exit(1)
    overrides = [option for text in options.override for option in ("--override", text)]
    again = shlex.join(["dpl", "report", str(options.grid), "--out", str(options.out), *overrides])
    print(f"All runs are finished. For tables and figures: {again}")


def _needed(grid: Grid, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """The runs that the grid needs: where an axis is tuned, the other seeds wait for the choice by the first seed."""
    folders = {outcome.folder.path for outcome in needed(grid, outcomes_of(runs))}
    return [run for run in runs if run.folder.path in folders]


def outcomes_of(runs: Sequence[PlannedRun]) -> list[Outcome]:
    """What is in the folders of the runs."""
    return [Outcome.read(run.cell.labels, run.folder) for run in runs]


def spent_together(outcomes: Sequence[Outcome]) -> str:
    """What all runs have spent on the same data, attempts that were set aside included; empty before the first step."""
    from dp_lightning.commands.total import total_epsilon

    folders = [outcome.folder.path for outcome in outcomes if any(outcome.folder.path.rglob("privacy_journal_*.jsonl"))]
    try:
        return f"{total_epsilon(folders).sentence}." if folders else ""
    except DpLightningError as error:
        return f"What all runs have spent together is unknown: {error}"


def _make(grid: Grid, runs: Sequence[PlannedRun], options: argparse.Namespace) -> list[PlannedRun]:
    """Launch the runs that are not finished, and return the runs that failed."""
    waiting = [run for run in runs if not run.folder.finished]
    print(f"{grid.title}: {len(runs)} runs, {len(runs) - len(waiting)} finished, in {options.out}", flush=True)
    for run in waiting:
        run.folder.prepare(run.settings)
    return _launch(waiting, options) if waiting else []


def planned_runs(grid: Grid, out: Path, override: Sequence[str]) -> list[PlannedRun]:
    """The runs of a grid with their whole configurations, in folders in ``out``.

    Args:
        override: Settings of every run, as ``name=value``.

    Raises:
        DpLightningError: for a setting that does not parse, or two runs with the same settings.
    """
    # Imported here, so that --help answers at once.
    from dp_lightning.commands.composition import Composer

    taken = {name for points in grid.axes.values() for point in points for name in point.settings}
    for text in override:
        name, equals, _ = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--override {name}: give name=value, such as trainer.max_epochs=1.")
        if name in taken:  # labels and tables would show the values of the axis for runs with another one
            raise ConfigurationError(f"--override {name}: an axis of {grid.path} sets it. Change it in a copy.")
    extra = [f"--{text}" for text in override]
    compose = Composer()
    runs: list[PlannedRun] = []
    cells: dict[str, Cell] = {}
    for cell in grid.cells():
        place = f"{grid.path}, run {cell.name}"
        try:
            settings = compose(with_paths(["fit", *cell.arguments, *extra])[1:])
        except DpLightningError as error:
            raise type(error)(f"{place}: {error}") from error
        # Where a run writes does not change what it does.
        settings["trainer"].pop("default_root_dir", None)
        keepers = components(settings["trainer"], "callbacks")
        shared = any(callback["init_args"].get("dirpath") is not None for callback in keepers)
        if shared or settings.get("ckpt_path") is not None:
            raise ConfigurationError(
                f"{place}: {'dirpath of a callback' if shared else 'ckpt_path'} is set. Each run of a grid starts "
                "without a checkpoint and keeps its own ones in its folder; remove it."
            )
        runs.append(PlannedRun(cell, (*cell.arguments, *extra), settings, RunFolder.of(out, cell.name, settings)))
        if (other := cells.setdefault(json.dumps(settings, sort_keys=True, default=str), cell)) is not cell:
            raise ConfigurationError(f"{grid.path}: the runs {other.name} and {cell.name} have the same settings.")
    return runs


def _launch(runs: Sequence[PlannedRun], options: argparse.Namespace) -> list[PlannedRun]:
    """Launch the runs, print a line when a run ends, and return the runs that failed."""
    by_folder = {str(run.folder.path): run for run in runs}
    launcher_options = dict(_option(text) for text in options.launcher_option)
    if options.jobs is not None:
        launcher_options["jobs"] = options.jobs
    failed, started = [], time.monotonic()
    # Closing the results stops the runs, so they are closed whatever interrupts the loop.
    with _ended_by_signals(), closing(LAUNCHERS[options.launcher](list(by_folder), launcher_options)) as results:
        for number, (folder, status) in enumerate(results, start=1):
            run = by_folder[folder]
            left = (time.monotonic() - started) / number * (len(runs) - number)
            print(f"[{number}/{len(runs)}] {_outcome(run, status)}; about {shown_duration(left)} left", flush=True)
            if not run.folder.finished:
                failed.append(run)
    return failed


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C end the sweep cleanly: its local runs save checkpoints."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _outcome(run: PlannedRun, status: int) -> str:
    result = run.folder.result
    if result is None or not is_finished(result):
        return f"{run.cell.name} FAILED with status {status}, see {run.folder.log}"
    accuracy = result["test_accuracy_last"]
    shown = "no test set" if accuracy is None else f"test accuracy {100 * accuracy:.1f} %"
    epsilon = shown_epsilon(result["epsilon"]) + ("" if result["release"] == "ok" else f" ({result['release']})")
    return f"{run.cell.name}: {shown}, epsilon {epsilon}, {shown_duration(result['seconds'])}"


def _print_prices(grid: Grid, runs: Sequence[PlannedRun]) -> None:
    from dp_lightning.commands.pricing import Pricing

    print(f"{grid.title}: {len(runs)} runs")
    price = Pricing()
    left = []
    for run in runs:
        finished = run.folder.finished
        print(f"\n{run.cell.name}" + (" (finished)" if finished else ""))
        print(f"  {shlex.join(['dpl', 'fit', *run.arguments])}")
        try:
            plan, seconds = price(run.settings)
        except DpLightningError as error:
            print(f"  no price: {error}", flush=True)
            continue
        if seconds is not None:
            left.append(0.0 if finished else seconds)
        print(
            f"  epsilon {shown_epsilon(plan.epsilon())}, delta {plan.delta:g}, sigma {plan.noise_multiplier:.4g}, "
            f"{plan.num_steps} steps, {'time unknown' if seconds is None else f'about {shown_duration(seconds)} here'}",
            flush=True,
        )
        if run.settings["privacy"].get("reproducible"):
            print("  not for release: privacy.reproducible is set", flush=True)
    if grid.tuned is not None and len(grid.axes.get(SEED, ())) > 1:
        print(f"\nThen the other seeds run at the best {grid.tuned} of each place, which is not counted here.")
    print(
        (f"\nIn total about {shown_duration(sum(left))} on one device like this one" if left else "\nNo time is known")
        + (f", without {len(runs) - len(left)} runs whose time is unknown" if len(left) < len(runs) else "")
        + ". Each epsilon covers one run alone."
    )


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ConfigurationError(f"--launcher-option {text}: give name=value, such as timeout_min=600.")
    return name, yaml.safe_load(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dpl sweep", description=__doc__, allow_abbrev=False)
    parser.add_argument("grid", type=Path, metavar="GRID", help="a file, or a name that `dpl configs` lists, as digits")
    add_grid_options(parser)
    parser.set_defaults(out=Path("sweeps"))
    parser.add_argument("--dry-run", action="store_true", help="print the commands and what each run costs")
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="local", help="default: local")
    parser.add_argument("--jobs", type=int, help="runs at a time, for local (default: one per GPU) and slurm")
    parser.add_argument(
        "--launcher-option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for slurm, such as slurm_partition=gpu; for ray, such as num_gpus=1",
    )
    return parser


def add_grid_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that `dpl sweep` and `dpl report` share: they determine the folders of the runs."""
    parser.add_argument("--out", type=Path, help="folder of the runs of a grid; default: sweeps")
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of every run, such as trainer.max_epochs=1; dpl report needs the same ones",
    )
