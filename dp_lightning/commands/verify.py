"""`dpl verify`: whether the statement, the journals and the checkpoints of a run belong together, from the files alone.

What is checked follows from what one file says of another: a statement is rendered and accounted again from its own
numbers, the heads that it names have to stand in the journal and to count the steps of its ledger, and the weights have
to be those of its digest. The unit of privacy and the clipping are compared with the checkpoint of the same weights.
Not compared are the optimizer's state and an average of the weights. Who writes all files anew can make them fit. A
copy of the heads that is kept elsewhere shows that too (``--head``).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dp_lightning.errors import DataError, DpLightningError
from dp_lightning.foreign_text import LARGEST_JSON, read_json, read_text
from dp_lightning.privacy.journal import Steps, journal_name, read_journal, spent_in, stands_for, up_to
from dp_lightning.privacy.statement import STATEMENT, PrivacyStatement
from dp_lightning.privacy.weights import digest_of
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

_FILE = "privacy_statement.json"
#: The weights that `dpl export` writes.
EXPORTED = "model.safetensors"
# What a run's statements say once for all of its steps, and no number of the journal tells.
_CONSTANT = ("unit_of_privacy", "clipping", "sensitivity", "examples")


def main(arguments: list[str]) -> None:
    """Print what holds and what does not; exits with 1 where something does not."""
    options = _parser().parse_args(arguments[1:])
    found = list(verify(Path(options.run), options.head))
    for subject, finding in found:
        print(f"{'ok    ' if finding is None else 'FAILED'}  {subject}{'' if finding is None else f': {finding}'}")
    failed = sum(finding is not None for _, finding in found)
    print(
        f"\n{failed} of {len(found)} checks failed."
        if failed
        else f"\nAll {len(found)} checks hold. Files that were all put back to an earlier moment, or all written anew, "
        "would pass too: only a copy of the last steps' names, kept elsewhere and given by --head, shows that."
    )
    sys.exit(1 if failed else 0)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dpl verify",
        allow_abbrev=False,
        description="Check the files of a run against each other: statement, journals, checkpoints. Exits with 1 where "
        "something does not hold.",
    )
    parser.add_argument("run", help="the folder of a run or of an export, or a checkpoint")
    parser.add_argument(
        "--head",
        action="append",
        default=[],
        help="a name of one of the last steps, as a statement that was kept elsewhere has it; may be repeated",
    )
    return parser


Finding = tuple[str, str | None]
"""What was checked, and what is wrong with it; None for nothing."""


def verify(place: Path, heads: list[str]) -> Iterator[Finding]:
    """Check a run's folder, an export, or a checkpoint, and what is below it.

    Raises:
        DataError: where there is nothing to check.
    """
    statement = place / _FILE
    checkpoints = [place] if place.is_file() else sorted(place.rglob("*.ckpt"))
    if not checkpoints and not statement.is_file():
        raise DataError(f"{place} has no {_FILE} and no checkpoint below it. Give the folder of a private run.")
    journals: dict[Path, Steps | str] = {}
    digests: dict[str, PrivacyStatement | None] = {}
    exported = place / EXPORTED
    if exported.is_file():
        digests[_digest_of_file(exported)] = None
    for path in checkpoints:
        yield from _of_checkpoint(path, path.name if path == place else str(path.relative_to(place)), journals, digests)
    if statement.is_file():
        yield from _of_statement(statement, journals, digests, with_weights=bool(checkpoints or digests))
    for head in heads:
        held = any(head in steps for steps in journals.values() if isinstance(steps, dict))
        yield f"the step {head} is in a journal", None if held else "none holds it: the files are older, or others"


def _of_checkpoint(
    path: Path, name: str, journals: dict[Path, Steps | str], digests: dict[str, PrivacyStatement | None]
) -> Iterator[Finding]:
    try:
        saved = PrivateCheckpointIO().load_checkpoint(path)
        claims = PrivacyStatement.from_saved(saved[STATEMENT])
        state_dict, state = dict(saved["state_dict"]), dict(saved["callbacks"]["PrivacyCallback"])
        taken = int(saved["global_step"])
    except DpLightningError as error:
        yield f"{name} can be read", str(error)
        return
    except Exception as error:  # the file may hold anything
        yield f"{name} has a privacy statement", f"it has none that can be read ({type(error).__name__}: {error})"
        return
    digest = digest_of(state_dict)
    digests[digest] = claims
    yield (
        f"{name}: its weights are those of its statement",
        _unless(digest == claims.weights, "they have another digest"),
    )
    same = state.get("ledger") == claims.ledger.state_dict() and tuple(state.get("heads", ())) == claims.journal_heads
    yield (
        f"{name}: its ledger is that of its statement",
        _unless(same and state.get("run") == claims.run, "the run would go on from other steps"),
    )
    lost = claims.lost_steps
    yield (
        f"{name}: its {taken} steps are in the ledger",
        _unless(lost >= 0 and taken + lost == claims.ledger.num_steps, f"the ledger has {claims.ledger.num_steps}"),
    )
    yield from _against_journal(name, claims, path.parent, journals)


def _of_statement(
    path: Path, journals: dict[Path, Steps | str], digests: dict[str, PrivacyStatement | None], *, with_weights: bool
) -> Iterator[Finding]:
    try:
        facts = read_json(path)
        claims = PrivacyStatement.from_dict(facts)
        again, markdown = claims.to_dict(), claims.to_markdown()
    except Exception as error:  # the file may hold anything
        yield f"{path.name} can be read", f"{type(error).__name__}: {error}"
        return
    differing = sorted(name for name in {*facts, *again} if not _equal(facts.get(name), again.get(name)))
    yield (
        f"{path.name}: epsilon and all that follows from its numbers",
        _unless(not differing, f"{', '.join(differing)} would be otherwise"),
    )
    page = path.with_suffix(".md")
    yield (
        f"{page.name} says the same",
        _unless(_text_of(page) == markdown, "it is missing, or says something else"),
    )
    if with_weights:
        yield (
            f"{path.name}: a file has its weights",
            _unless(claims.weights in digests, "no checkpoint or export below has weights of that digest"),
        )
    if (same := digests.get(claims.weights)) is not None:
        differing = [name for name in _CONSTANT if not _equal(getattr(claims, name), getattr(same, name))]
        yield (
            f"{path.name}: the unit of privacy and the clipping are its checkpoint's",
            _unless(not differing, f"{', '.join(differing)} would be otherwise"),
        )
    yield from _against_journal(path.name, claims, path.parent, journals)


def _digest_of_file(path: Path) -> str:
    from safetensors.torch import load_file

    try:
        return digest_of(load_file(path))
    except Exception as error:  # the file may hold anything
        return f"unknown: {error}"


def _against_journal(
    name: str, claims: PrivacyStatement, folder: Path, journals: dict[Path, Steps | str]
) -> Iterator[Finding]:
    path = folder / journal_name(claims.run)
    if path not in journals:
        journals[path] = _read(path, claims.run)
        steps = journals[path]
        yield f"{path.name} in {folder.name}", steps if isinstance(steps, str) else None
    steps = journals[path]
    if isinstance(steps, str):
        return
    yield (
        f"{name}: its earlier runs are those that the run's name stands for",
        _unless(stands_for(claims.run, claims.ledger.earlier), "they were edited"),
    )
    missing = [head for head in claims.journal_heads if head not in steps]
    before = up_to(claims.journal_heads, steps)
    counted = spent_in(before) == claims.ledger.totals
    yield (
        f"{name}: its {claims.ledger.num_steps} steps are those of the journal up to its last one",
        f"the journal lacks {', '.join(missing)}"
        if missing
        else _unless(counted and bool(claims.journal_heads), f"the journal has {len(before)} steps until there"),
    )


def _read(path: Path, run: str) -> Steps | str:
    try:
        return read_journal(path, run)[0]
    except FileNotFoundError:
        return "it is missing"
    except (DpLightningError, OSError) as error:
        return str(error)


def _text_of(path: Path) -> str | None:
    try:
        return read_text(path, most=LARGEST_JSON)
    except (OSError, DataError):
        return None


def _equal(one: Any, other: Any) -> bool:
    """Numbers to what another machine may round otherwise."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= 1e-6 * max(abs(one), abs(other))
    return type(one) is type(other) and bool(one == other)


def _unless(holds: bool, finding: str) -> str | None:
    return None if holds else finding
