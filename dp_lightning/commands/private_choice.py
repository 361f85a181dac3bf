"""`dpl sweep GRID --release-best`: a random number of runs of a grid, of which the best one alone is released.

How many runs there are, and which settings each takes, follows from a secret key. The key stands in a file until all
runs have ended, so that the same command goes on after an interruption; nothing tells how many there are. A run that
was interrupted begins anew, since the price is that of runs as they were planned.
"""

import argparse
import hashlib
import math
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dp_lightning.atomic_files import replacing
from dp_lightning.commands.fit_settings import prepare_to_train
from dp_lightning.commands.pricing import plan_of
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.launchers import launched
from dp_lightning.experiments.results import VALIDATION, Run
from dp_lightning.experiments.runs import RunFolder
from dp_lightning.foreign_text import read_json
from dp_lightning.privacy.choice import draw_number, epsilon_of_choice
from dp_lightning.privacy.statement import STATEMENT_FILE, PrivacyStatement
from dp_lightning.private_run.resume import SavedRun
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

#: Why a run that was not chosen may not be released.
NOT_CHOSEN = "it is one of the runs of a private choice, of which another one is released"
_KEY = "choice.key"


def release_best(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Draw runs of a grid, start those that are not finished, and release the best one when all have ended.

    Args:
        runs: the runs of the grid, whose settings are drawn from with replacement.
        options: of the command; a dry run prints the price alone.

    Raises:
        ConfigurationError: where these settings cannot be chosen among, or an earlier choice has ended.
    """
    facts, delta = _facts(runs, options)
    epsilon = epsilon_of_choice(**facts, delta=delta)
    print(
        f"What is released is ({epsilon:.4g}, {delta:g})-DP by Renyi: the best, by validation accuracy, of a number of "
        f"runs that comes from the {options.number} distribution with mean {options.expected_runs:g} and stays secret. "
        "So no progress is shown.",
        flush=True,
    )
    if options.dry_run:
        return
    folders = _drawn(runs, options)
    waiting = [str(folder.path) for folder in folders if not folder.finished]
    with launched(waiting, options.launcher, options.launcher_option, options.jobs) as results:
        for _ in results:
            pass
    scores = [_score(folder) for folder in folders]
    best = scores.index(max(scores)) if max(scores, default=-math.inf) > -math.inf else None
    for number, folder in enumerate(folders):
        _mark(folder, facts if number == best else None)
    (options.out / _KEY).unlink()
    if best is None:
        print("No run is released.")
    else:
        print(f"The best run is in {folders[best].path}. Release what dpl export writes of it, and of no other run.")


def _facts(runs: Sequence[Run], options: argparse.Namespace) -> tuple[dict[str, Any], float]:
    """What the price depends on besides delta, as ``PrivacyStatement.choice`` has it, and delta.

    Raises:
        ConfigurationError: where runs have other data, another delta, or no images that are held out for the score.
    """
    plans = []
    for run in runs:
        cli, num_train = prepare_to_train(run.settings)
        if getattr(cli.datamodule, "val_dataset", None) is None:
            raise ConfigurationError(
                f"--release-best chooses by validation images, and {run.cell.name} has none: set data's val_fraction."
            )
        if run.settings["data"] != runs[0].settings["data"]:
            raise ConfigurationError("--release-best compares scores, and the runs have different settings of data.")
        plans.append(plan_of(run.settings["privacy"], run.settings["trainer"], num_train=num_train))
    for name in ("delta", "num_train"):
        if len(found := {getattr(plan, name) for plan in plans}) > 1:
            raise ConfigurationError(f"--release-best needs one {name}, and the runs have {sorted(found)}.")
    rounds = sorted({plan.rounds(plan.noise_multiplier) for plan in plans})
    return {"distribution": options.number, "expected_runs": options.expected_runs, "runs": rounds}, plans[0].delta


def _drawn(runs: Sequence[Run], options: argparse.Namespace) -> list[RunFolder]:
    """The folders of the drawn runs, prepared; the same ones as long as the key's file exists."""
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / _KEY
    if not file.exists():
        if any(options.out.glob("choice-*")):
            text = f"The choice in {options.out} has ended, and another spends its epsilon again: give another --out."
            raise ConfigurationError(text)
        with replacing(file) as raw:
            raw.write(secrets.token_bytes(32))
        file.chmod(0o600)
    key, folders = file.read_bytes(), []
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(key, "big")))
    for number in range(draw_number(options.expected_runs, options.number, generator)):
        name = hashlib.blake2b(number.to_bytes(8, "big"), key=key, digest_size=8).hexdigest()  # it tells no draw
        folder = RunFolder(options.out.resolve() / f"choice-{name}")
        if not folder.finished:
            shutil.rmtree(folder.path, ignore_errors=True)
        folder.path.mkdir(exist_ok=True)
        folder.prepare(runs[int(generator.integers(len(runs)))].settings)
        folders.append(folder)
    return folders


def _score(folder: RunFolder) -> float:
    """Validation accuracy after the last step; the lowest number for a run that failed or has none."""
    result = folder.result if folder.finished else None
    value = None if result is None else result.get(VALIDATION)
    return -math.inf if value is None or math.isnan(value) else float(value)


def _mark(folder: RunFolder, facts: dict[str, Any] | None) -> None:
    """Change the statements of a run, in its checkpoints and in its folder; no facts are those of one not chosen."""

    def change(statement: PrivacyStatement) -> PrivacyStatement:
        if facts is None:
            return replace(statement, faults=tuple(sorted({*statement.faults, NOT_CHOSEN})))
        plan = replace(statement.plan, accountant="rdp", target_epsilon=None)
        return replace(statement, plan=plan, choice=facts)

    for path in folder.root.rglob("*.ckpt"):
        checkpoint = PrivateCheckpointIO().load_checkpoint(path)
        if (saved := SavedRun.read(checkpoint)) is not None:
            replace(saved, statement=change(saved.statement)).write(checkpoint)
            PrivateCheckpointIO().save_checkpoint(checkpoint, path)
    for path in folder.root.rglob(STATEMENT_FILE):
        change(PrivacyStatement.from_dict(read_json(path))).write(path.parent)
