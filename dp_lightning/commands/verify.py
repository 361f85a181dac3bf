"""`dpl verify`: checks from the files alone whether statement, journals and checkpoints of a run belong together.

The files are checked against each other. A statement is rendered and accounted again from its own numbers, and compared
with the checkpoint of the same steps. The last step that it names must be in the journal, the journal's steps up to it
must be those of its ledger, and the weights must have its digest. Someone who rewrites all files can make them agree; a
copy of the name of the last step that is kept elsewhere (``--head``) reveals that.
"""

import argparse
import hashlib
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dp_lightning.errors import DataError, DpLightningError
from dp_lightning.foreign_text import read_json
from dp_lightning.privacy.exported import EXPORTED, statement_of
from dp_lightning.privacy.journal import Steps, journal_name, read_journal, spent_in, up_to
from dp_lightning.privacy.statement import STATEMENT_FILE, PrivacyStatement
from dp_lightning.privacy.weights import digest_of
from dp_lightning.private_run.resume import RUNS, SavedRun
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

# Fields in which an earlier checkpoint of the same steps may say less, and those that follow or may differ.
_NOTED_LATER, _FOLLOWING = ("unprotected", "faults"), ("release", "weights")

Finding = tuple[str, str | None]
"""What was checked, and what is wrong with it; None if nothing is."""


def main(arguments: list[str]) -> None:
    """Print which checks hold and which fail; exits with 1 if one fails."""
    options = _parser().parse_args(arguments[1:])
    place = Path(options.run)
    found = list(verify(place, options.head))
    for subject, finding in found:
        print(f"{'ok    ' if finding is None else 'FAILED'}  {subject}{'' if finding is None else f': {finding}'}")
    failed = sum(finding is not None for _, finding in found)
    if place.is_dir() and not any(place.rglob("*.ckpt")) and not (place / EXPORTED).exists():
        print("note    there is no checkpoint and no export, so no weights were checked")
    print(
        f"\n{failed} of {len(found)} checks failed."
        if failed
        else f"\nAll {len(found)} checks hold. Files that were all rolled back or rewritten would pass too: only a "
        "copy of the last step's name that is kept elsewhere (--head) reveals that."
    )
    sys.exit(1 if failed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl verify",
        description="Check the files of a run against each other: statement, journals, checkpoints. Exits with 1 if a "
        "check fails.",
        allow_abbrev=False,
    )
    parser.add_argument("run", help="the folder of a run or of an export, or a checkpoint")
    kept = "the name of the last step, from a statement that was kept elsewhere; may be repeated"
    parser.add_argument("--head", action="append", default=[], help=kept)
    return parser


def verify(place: Path, heads: Iterable[str] = ()) -> Iterator[Finding]:
    """Check a run's folder with everything below it, an export, or a checkpoint.

    Args:
        heads: Names of steps that must be in a journal.

    Raises:
        DataError: if there is nothing to check.
    """
    # The newest run of a plain Trainer's folder, or the folder itself.
    runs = sorted(place.glob(f"{RUNS}/*/{STATEMENT_FILE}"), key=lambda path: path.stat().st_mtime)
    statement = place / STATEMENT_FILE if (place / STATEMENT_FILE).exists() or not runs else runs[-1]
    checkpoints = [place] if place.is_file() else sorted(place.rglob("*.ckpt"))
    if not checkpoints and not statement.exists():
        raise DataError(f"{place} has no {STATEMENT_FILE} and no checkpoint. Give the folder of a private run.")
    found = _Found()
    for path in checkpoints:
        yield from _of_checkpoint(path, path.name if path == place else str(path.relative_to(place)), found)
    if (place / EXPORTED).exists():
        yield from _of_export(place / EXPORTED, found)
    if statement.exists():
        yield from _of_statement(statement, found)
    for head in heads:
        held = any(head.strip().lower() in steps for steps in found.journals.values() if not isinstance(steps, str))
        yield f"a journal has the step {head}", _unless(held, "none has it: they are older, or of another run")


@dataclass
class _Found:
    """The content of the files that were read so far.

    Attributes:
        journals: The steps of each journal by its path, or what is wrong with it.
        statements: The statements of checkpoints, by name.
        digests: The digests of the weights in checkpoints and exports.
        exported: The statement in the metadata of exported weights.
    """

    journals: dict[Path, Steps | str] = field(default_factory=dict)
    statements: dict[str, PrivacyStatement] = field(default_factory=dict)
    digests: set[str] = field(default_factory=set)
    exported: PrivacyStatement | None = None


def _of_checkpoint(path: Path, name: str, found: _Found) -> Iterator[Finding]:
    try:
        saved = PrivateCheckpointIO().load_checkpoint(path)
        run = SavedRun.read(saved)
        if run is None:
            raise DataError("it is not a checkpoint of a private run")
    except DataError as error:
        yield f"{name} can be read", str(error)
        return
    claims, taken, digest = run.statement, saved.get("global_step"), digest_of(saved["state_dict"])
    found.digests.add(digest)
    found.statements[name] = claims
    yield (
        f"{name}: its weights match its statement",
        _unless(digest == claims.weights, "they have another digest"),
    )
    counted = claims.ledger.num_steps
    yield (
        f"{name}: its {taken} steps are in the ledger",
        _unless(taken is not None and taken <= counted - claims.lost_steps <= counted, f"the ledger has {counted}"),
    )
    yield from _against_journal(name, claims, path.parent, found.journals)


def _of_export(path: Path, found: _Found) -> Iterator[Finding]:
    try:
        found.exported = statement_of(path)
        finding = _unless(found.exported is not None, "it has none")
    except DataError as error:
        finding = str(error)
    yield f"{path.name} has the statement of its tensors", finding
    if found.exported is not None:
        found.digests.add(found.exported.weights)


def _of_statement(path: Path, found: _Found) -> Iterator[Finding]:
    try:
        facts = read_json(path)
        claims = PrivacyStatement.from_dict(facts)
        again, markdown = claims.to_dict(), claims.to_markdown()
    except Exception as error:  # an edited field may have any type
        yield f"{path.name} can be read", f"{type(error).__name__}: {error}"
        return
    differing = _differing(facts, again)
    yield f"{path.name}: epsilon, and all else that follows from its numbers", _differs("recomputed, it", differing)
    page = path.with_suffix(".md")
    same_text = page.is_file() and page.read_bytes() == markdown.encode()
    yield f"{page.name} agrees with {path.name}", _unless(same_text, "it is missing, or differs")
    if found.digests:
        yield (
            f"{path.name}: a checkpoint or an export has its weights",
            _unless(claims.weights in found.digests, "none here has weights with its digest"),
        )
    same = [
        (name, _differing_at_the_same_steps(claims, other))
        for name, other in found.statements.items()
        if (other.run, other.journal_head) == (claims.run, claims.journal_head)
    ]
    if same:
        # A run that lost steps may have left checkpoints with and without them.
        name, differing = min(same, key=lambda pair: len(pair[1]))
        yield f"{path.name}: everything in it agrees with {name}, which has the same steps", _differs("it", differing)
    if found.exported is not None:
        differing = _differing(replace(claims, files={}).saved(), found.exported.saved())
        yield f"{EXPORTED} has the same statement", _differs("it", differing)
    for name, digest in claims.files.items():  # those that were written with the statement of an export
        file = path.with_name(name)
        unchanged = file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest
        yield f"{name} is unchanged", _unless(unchanged, "it is missing, or was edited")
    yield from _against_journal(path.name, claims, path.parent, found.journals)


def _against_journal(
    name: str, claims: PrivacyStatement, folder: Path, journals: dict[Path, Steps | str]
) -> Iterator[Finding]:
    path = folder / journal_name(claims.run)
    if path not in journals:
        try:
            journals[path] = read_journal(path, claims.run)
        except (DpLightningError, OSError) as error:
            journals[path] = str(error)
        steps = journals[path]
        yield f"{path.name} in {folder.name}", steps if isinstance(steps, str) else None
    steps = journals[path]
    if isinstance(steps, str):
        return
    before = up_to(claims.journal_head, steps)
    places = [step.place for step in before.values()]
    in_rounds = all(place in (0, last + 1) and place < claims.plan.bands for last, place in pairwise([-1, *places]))
    counted = spent_in(before.values()) == claims.ledger.totals and len(before) == claims.ledger.num_steps
    yield (
        f"{name}: its {claims.ledger.num_steps} steps are those of the journal up to its last step",
        _unless(
            counted and in_rounds and claims.journal_head in steps,
            f"the journal has {len(before)} steps up to there" if in_rounds else "a round has a wrong number of steps",
        ),
    )
    if claims.plan.bands > 1:
        norm, count = math.hypot(*claims.noise_coefficients), len(claims.noise_coefficients)
        held = _unless(norm <= 1 + 1e-9 and count <= claims.plan.bands, f"{count} of them have the norm {norm:.6g}")
        yield f"{name}: its noise coefficients, at most {claims.plan.bands}, have a norm of at most one", held


def _differing_at_the_same_steps(claims: PrivacyStatement, checkpoint: PrivacyStatement) -> list[str]:
    now, then = claims.to_dict(), checkpoint.to_dict()
    kept = {name: set(then[name]) <= set(now[name]) for name in _NOTED_LATER}
    return [name for name in _differing(now, then) if not kept.get(name) and name not in _FOLLOWING]


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The names whose values differ between two mappings."""
    absent = object()
    return sorted(name for name in {*one, *other} if not _equal(one.get(name, absent), other.get(name, absent)))


def _equal(one: Any, other: Any) -> bool:
    """Whether two values are the same, up to rounding that may differ between machines."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return type(one) is type(other) and bool(one == other)


def _differs(what: str, names: list[str]) -> str | None:
    return _unless(not names, f"{what} differs in {', '.join(names)}")


def _unless(holds: bool, finding: str) -> str | None:
    return None if holds else finding
