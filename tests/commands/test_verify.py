"""`dpl verify` finds what was edited in the files of a run."""

import json
import shutil
from dataclasses import fields, replace

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.cli import main
from dp_lightning.commands.verify import verify
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.schedules import Schedule
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.resume import PRIVATE_RUN


def fit(folder, steps, ckpt_path=None):
    checkpoints = ModelCheckpoint(folder / "checkpoints", save_top_k=-1, filename="{step}", save_last=True)
    logger = CSVLogger(folder, name="", version="")
    length = {"max_steps": steps, "max_epochs": -1}
    run = trainer(folder, privacy(), checkpoints, logger=logger, enable_checkpointing=True, **length)
    run.fit(Plain(), loader(), ckpt_path=ckpt_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was resumed: checkpoints of steps 3, 6 and 9, and journals in its folder and in theirs."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder, 6)
    fit(folder, 9, ckpt_path=folder / "checkpoints" / "last.ckpt")
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


def failed(run, *heads):
    return [f"{subject}: {finding}" for subject, finding in verify(run, list(heads)) if finding is not None]


def statement(run):
    return run / "privacy_statement.json"


def of_statement(text):
    """Write this text in the place of the statement."""
    return lambda run: statement(run).write_text(text(json.loads(statement(run).read_text())))


def of_checkpoint(change, name="last.ckpt"):
    def edit(run):
        path = run / "checkpoints" / name
        saved = torch.load(path, weights_only=True)
        change(saved)
        torch.save(saved, path)

    return edit


def of_claims(**values):
    """Edit the statement in the last checkpoint."""
    return of_checkpoint(lambda saved: claims(saved).update(values))


def of_journal(change, which=0):
    def edit(run):
        path = sorted(run.rglob("privacy_journal_*.jsonl"))[which]
        lines = path.read_bytes().splitlines(keepends=True)
        changed = change(lines)
        assert changed != lines
        path.write_bytes(b"".join(changed))

    return edit


def in_step(number, old, new):
    """In the line of a step, the first of which is 0."""
    return lambda lines: [*lines[:number], lines[number].replace(old, new), *lines[number + 1 :]]


def claims(saved):
    return saved[PRIVATE_RUN]["statement"]


def fewer_steps(saved):
    """The checkpoint and its ledger speak of one step."""
    claims(saved).update(ledger=[[1.0, 1 / 3, 1]], lost_steps=0)
    saved["global_step"] = 1


EDITS = {
    "epsilon of the statement": of_statement(lambda facts: json.dumps({**facts, "epsilon": {"prv": 0.1, "rdp": 0.1}})),
    "a field less": of_statement(lambda facts: json.dumps({n: v for n, v in facts.items() if n != "clipping"})),
    "a field more": of_statement(lambda facts: json.dumps({**facts, "approved": "yes"})),
    "no statement": of_statement(lambda facts: "[1, 2]"),
    "the page": lambda run: statement(run).with_suffix(".md").write_text("differentially private"),
    "a weight": of_checkpoint(lambda saved: next(iter(saved["state_dict"].values())).view(-1)[0].add_(1e-3)),
    "a weight of an earlier checkpoint": of_checkpoint(
        lambda saved: saved["state_dict"]["net.0.weight"].zero_(), "step=3.ckpt"
    ),
    "steps of a checkpoint": of_checkpoint(lambda saved: saved.update(global_step=99)),
    "lost steps of a checkpoint": of_claims(lost_steps=-3),
    "ledger and steps of a checkpoint": of_checkpoint(fewer_steps),
    "sigma in the ledger of a checkpoint": of_claims(ledger=[[9.0, 1 / 3, 9]]),
    "head of a checkpoint": of_claims(journal_head=""),
    "run of a checkpoint": of_claims(run="another"),
    "run of a checkpoint taken away": of_checkpoint(lambda saved: saved.pop(PRIVATE_RUN)),
    "checkpoint cut short": lambda run: (run / "checkpoints" / "last.ckpt").write_bytes(
        (run / "checkpoints" / "last.ckpt").read_bytes()[:-100]
    ),
    "weights of another run": lambda run: [
        fit(run / "other", 9),
        shutil.copy(run / "other" / "checkpoints" / "last.ckpt", run / "checkpoints"),
    ],
    "sigma in a journal": of_journal(in_step(2, b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0')),
    "q of the last step": of_journal(in_step(8, b"0.33333", b"0.00333"), 1),
    "last steps of a journal less": of_journal(lambda lines: lines[:7]),
    "journal taken away": lambda run: next(run.glob("privacy_journal_*.jsonl")).unlink(),
}


def test_a_run_that_was_not_touched_holds(run, capsys):
    for weights in (True, False):
        assert failed(run) == []
        with pytest.raises(SystemExit, match="0"):
            main(["verify", str(run)])
        said = capsys.readouterr().out
        assert "only a copy of the last step's name" in said
        assert ("no weights were checked" in said) != weights
        if weights:
            assert failed(run / "checkpoints" / "step=3.ckpt") == []
            shutil.rmtree(run / "checkpoints")


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found(run, name, capsys):
    EDITS[name](run)
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(run)])
    assert "FAILED" in capsys.readouterr().out


def altered(value):
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {**value, "another": "value"}
    if isinstance(value, list | tuple):
        return type(value)([*value[1:]] if value else ["another"])
    return "another" if value is None else f"{value}, or another"


def plans(plan):
    others = {"accountant": "prv", "delta": 1e-4, "target_epsilon": 90.0, "expected_batch_size": 10}
    others["noise_schedule"] = Schedule("linear", 0.5)
    for item in fields(PrivacyPlan):
        yield replace(plan, **{item.name: others.get(item.name) or getattr(plan, item.name) + 1})


# Steps of the ledger are in the journal, and more may be noted after the last checkpoint.
KEPT = {"ledger", "unprotected", "faults"}


@pytest.mark.parametrize("name", sorted({item.name for item in fields(PrivacyStatement)} - KEPT))
def test_a_field_that_was_edited_in_both_files_of_the_statement_is_found(run, name):
    claims = PrivacyStatement.from_dict(json.loads(statement(run).read_text()))
    others = {"plan": list(plans(claims.plan)), "examples": ["one_by_one"], "postprocessing": ["Kalman"]}
    others["choice"] = [{"distribution": "poisson", "expected_runs": 3.0, "runs": [[[2.0, 0.1, 3]]]}]
    for value in others.get(name) or [altered(getattr(claims, name))]:
        replace(claims, **{name: value}).write(run)
        assert failed(run), value


def test_a_whole_folder_of_an_earlier_moment_passes_and_a_kept_head_finds_it(tmp_path):
    fit(tmp_path, 3)
    earlier = shutil.copytree(tmp_path, tmp_path.parent / "earlier")
    fit(tmp_path, 6, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    head = json.loads(statement(tmp_path).read_text())["journal_head"]
    assert failed(tmp_path, head.upper()) == failed(earlier) == []
    assert failed(earlier, head)


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(tmp_path)])
    assert "Give the folder of a private run" in capsys.readouterr().err
