"""`dpl verify` finds what was edited in the files of a run."""

import json
import shutil
from dataclasses import fields, replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from run_until_killed import Net
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.cli import main
from dp_lightning.commands.verify import verify
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.statement import ONE_PERSON, PrivacyStatement
from dp_lightning.private_run.resume import PRIVATE_RUN


def fit(folder, steps, ckpt_path=None):
    data = TensorDataset(torch.randn(60, 5), torch.arange(60) % 3)
    privacy = PrivacyCallback(expected_batch_size=20, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    checkpoints = ModelCheckpoint(folder / "checkpoints", save_top_k=-1, filename="{step}", save_last=True)
    trainer = pl.Trainer(
        callbacks=[privacy, checkpoints],
        max_steps=steps,
        max_epochs=-1,
        accelerator="cpu",
        logger=CSVLogger(folder, name="", version=""),
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Net(), DataLoader(data, batch_size=7), ckpt_path=ckpt_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that was resumed: checkpoints of steps 3, 6 and 9."""
    folder = tmp_path_factory.mktemp("whole")
    fit(folder, 6)
    fit(folder, 9, ckpt_path=folder / "checkpoints" / "last.ckpt")
    return folder


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


@pytest.mark.parametrize("weights", [True, False])
def test_a_run_without_weights_is_told(run, capsys, weights):
    for path in run.rglob("*.ckpt"):
        if not weights:
            path.unlink()
    with pytest.raises(SystemExit) as end:
        main(["verify", str(run)])
    assert end.value.code == 0
    assert ("no weights were checked" in capsys.readouterr().out) != weights


def failed(run, *heads):
    return [f"{subject}: {finding}" for subject, finding in verify(run, list(heads)) if finding is not None]


def statement(run):
    return run / "privacy_statement.json"


def of_statement(name, value):
    def edit(run):
        facts = json.loads(statement(run).read_text())
        assert facts[name] != value
        statement(run).write_text(json.dumps({**facts, name: value}))

    return edit


def of_page(old, new):
    def edit(run):
        page = statement(run).with_suffix(".md")
        text = page.read_text()
        assert old in text
        page.write_text(text.replace(old, new))

    return edit


def of_checkpoint(change, name="last.ckpt"):
    def edit(run):
        path = run / "checkpoints" / name
        saved = torch.load(path, weights_only=True)
        change(saved)
        torch.save(saved, path)

    return edit


def journals(run):
    return sorted(run.rglob("privacy_journal_*.jsonl"))


def of_journal(change, which=0):
    def edit(run):
        path = journals(run)[which]
        lines = path.read_bytes().splitlines(keepends=True)
        changed = change(lines)
        assert changed != lines
        path.write_bytes(b"".join(changed))

    return edit


def in_step(number, old, new):
    """In the line of a step, the first of which is 0."""

    def change(lines):
        return [line.replace(old, new) if place == number % len(lines) else line for place, line in enumerate(lines)]

    return change


def without_step(*numbers):
    def change(lines):
        gone = [number % len(lines) for number in numbers]
        return [line for place, line in enumerate(lines) if place not in gone]

    return change


def claims(saved):
    return saved[PRIVATE_RUN]["statement"]


def fewer_steps(saved):
    claims(saved)["ledger"] = [[1.0, 1 / 3, 1]]
    claims(saved)["lost_steps"] = 1 - saved["global_step"]


def all_fewer_steps(saved):
    fewer_steps(saved)
    saved["global_step"], claims(saved)["lost_steps"] = 1, 0


EDITS = {
    "epsilon of the statement": of_statement("epsilon", {"prv": 0.1, "rdp": 0.1, "pld": 0.1}),
    "one epsilon of the statement": lambda run: statement(run).write_text(
        json.dumps({**(facts := json.loads(statement(run).read_text())), "epsilon": {**facts["epsilon"], "prv": 0.5}})
    ),
    "delta": of_statement("delta", 1e-6),
    "sigma of the plan": of_statement("noise_multiplier", 9.0),
    "number of examples": of_statement("num_train", 6000),
    "batch size": of_statement("expected_batch_size", 2),
    "number of steps": of_statement("num_steps", 1),
    "ledger of the statement": of_statement("ledger", [[1.0, 1 / 3, 1]]),
    "sigma in the ledger of the statement": of_statement("ledger", [[9.0, 1 / 3, 9]]),
    "lost steps of the statement": of_statement("lost_steps", -5),
    "release": of_statement("release", "not for release: something"),
    "target": of_statement("target_epsilon", 0.01),
    "reproducible": of_statement("reproducible", True),
    "head of the statement": of_statement("journal_head", ""),
    "another head": of_statement("journal_head", "0" * 32),
    "run of the statement": of_statement("run", "another"),
    "weights of the statement": of_statement("weights", "0" * 64),
    "a field less": lambda run: statement(run).write_text(
        json.dumps(
            {name: value for name, value in json.loads(statement(run).read_text()).items() if name != "clipping"}
        )
    ),
    "a field more": lambda run: statement(run).write_text(
        json.dumps({**json.loads(statement(run).read_text()), "approved": "yes"})
    ),
    "way of another name": of_statement("examples", "at_once"),
    "clipping in words": of_statement("clipping", "flat"),
    "no statement": lambda run: statement(run).write_text("[1, 2]"),
    "statement of a checkpoint in words": of_checkpoint(lambda saved: saved[PRIVATE_RUN].update(statement="ok")),
    "no JSON": lambda run: statement(run).write_text("fine"),
    "epsilon of the page": of_page("-differentially private", "-differentially private (checked)"),
    "page taken away": lambda run: statement(run).with_suffix(".md").unlink(),
    "a weight": of_checkpoint(lambda saved: saved["state_dict"]["net.weight"][0, 0].add_(1e-3)),
    "a bit of a weight": of_checkpoint(
        lambda saved: saved["state_dict"]["net.bias"].view(torch.int32)[0].bitwise_xor_(1)
    ),
    "a weight by another name": of_checkpoint(
        lambda saved: saved["state_dict"].update(other=saved["state_dict"].pop("net.bias"))
    ),
    "a weight of an earlier checkpoint": of_checkpoint(
        lambda saved: saved["state_dict"]["net.weight"].zero_(), "step=3.ckpt"
    ),
    "digest of a checkpoint": of_checkpoint(lambda saved: claims(saved).update(weights="0" * 64)),
    "ledger of a checkpoint": of_checkpoint(fewer_steps),
    "ledger and steps of a checkpoint": of_checkpoint(all_fewer_steps),
    "sigma in the ledger of a checkpoint": of_checkpoint(lambda saved: claims(saved).update(ledger=[[9.0, 1 / 3, 9]])),
    "unit of privacy": of_statement("unit_of_privacy", ONE_PERSON),
    "clipping": of_statement("clipping", {"images_per_group": "4 images of each person"}),
    "head of a checkpoint": of_checkpoint(lambda saved: claims(saved).update(journal_head="")),
    "run of a checkpoint": of_checkpoint(lambda saved: claims(saved).update(run="another")),
    "steps of a checkpoint": of_checkpoint(lambda saved: saved.update(global_step=99)),
    "lost steps of a checkpoint": of_checkpoint(lambda saved: claims(saved).update(lost_steps=-3)),
    "statement of a checkpoint taken away": of_checkpoint(lambda saved: saved[PRIVATE_RUN].pop("statement")),
    "run of a checkpoint taken away": of_checkpoint(lambda saved: saved.pop(PRIVATE_RUN)),
    "checkpoint cut short": lambda run: (run / "checkpoints" / "last.ckpt").write_bytes(
        (run / "checkpoints" / "last.ckpt").read_bytes()[:-100]
    ),
    "weights of another run": lambda run: [
        fit(run / "other", 9),
        shutil.copy(run / "other" / "checkpoints" / "last.ckpt", run / "checkpoints"),
    ],
    "sigma in a journal": of_journal(in_step(2, b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0')),
    "q in a journal": of_journal(in_step(2, b"0.33333", b"0.00333")),
    "sigma of the last step": of_journal(in_step(-1, b'"noise_multiplier": 1.0', b'"noise_multiplier": 9.0'), 1),
    "a step of a journal less": of_journal(without_step(4)),
    "first steps of a journal less": of_journal(without_step(0, 1, 2), 1),
    "last steps of a journal less": of_journal(without_step(-1, -2)),
    "all steps of a journal less": of_journal(without_step(*range(9)), 1),
    "one name for all": of_journal(lambda lines: [line.replace(line[10:42], b"0" * 32) for line in lines]),
    "journal taken away": lambda run: journals(run)[0].unlink(),
    "journal of an earlier moment": lambda run: journals(run)[1].write_bytes(
        b"".join(journals(run)[1].read_bytes().splitlines(keepends=True)[:5])
    ),
}


def test_a_run_that_was_not_touched_holds(run, capsys):
    assert failed(run) == []
    with pytest.raises(SystemExit, match="0"):
        main(["verify", str(run)])
    assert "only a copy of the last step's name" in capsys.readouterr().out
    assert failed(run / "checkpoints" / "step=3.ckpt") == []


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_is_found(run, name, capsys):
    EDITS[name](run)
    assert failed(run)
    with pytest.raises(SystemExit, match="1"):
        main(["verify", str(run)])
    assert "FAILED" in capsys.readouterr().out


def altered(value):
    """Another value of the same kind."""
    if isinstance(value, torch.Tensor):
        return torch.ones_like(value) if not value.any() else torch.zeros_like(value)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 1
    if isinstance(value, dict):
        return {**value, "another": "value"}
    if isinstance(value, list | tuple):
        return type(value)([*value[1:]] if value else ["another"])
    return "another" if value is None else f"{value}, or another"


def leaves(values, place=()):
    """The places of all values in nested mappings and lists, and of those themselves."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in items:
        yield (*place, key)
        yield from leaves(value, (*place, key))


def edited(values, place):
    *above, last = place
    inner = values
    for key in above:
        inner = inner[key]
    inner[last] = altered(inner[last])


def test_an_edit_of_any_field_of_the_statement_is_found(run):
    whole = statement(run).read_text()
    for place in leaves(json.loads(whole)):
        facts = json.loads(whole)
        edited(facts, place)
        statement(run).write_text(json.dumps(facts))
        assert failed(run), place


@pytest.mark.parametrize("name", [item.name for item in fields(PrivacyStatement)])
def test_a_field_that_was_edited_in_both_files_of_the_statement_is_found(run, name):
    claims = PrivacyStatement.from_dict(json.loads(statement(run).read_text()))
    if name == "plan":
        forged = [replace(claims, plan=changed) for changed in plans(claims.plan)]
    elif name in ("ledger", "unprotected", "faults"):
        pytest.skip("the steps of the ledger are in the journal; more may be noted after the last checkpoint")
    elif name == "examples":
        forged = [replace(claims, examples="one_by_one")]
    else:
        forged = [replace(claims, **{name: altered(getattr(claims, name))})]
    for other in forged:
        other.write(run)
        assert failed(run), other


def plans(plan):
    others = {"accountant": "prv", "delta": 1e-4, "target_epsilon": 90.0, "expected_batch_size": 10}
    for item in fields(PrivacyPlan):
        yield replace(plan, **{item.name: others.get(item.name) or getattr(plan, item.name) + 1})


def test_a_result_that_does_not_fit_its_statement_is_found(run):
    facts = json.loads(statement(run).read_text())
    also = ("num_steps", "num_steps_planned", "accountant", "delta")
    result = {"epsilon": facts["epsilon"]["rdp"], **{name: facts[name] for name in also}, "test_accuracy_last": 0.5}
    (run / "result.json").write_text(json.dumps(result))
    assert failed(run) == []
    for name in ("epsilon", *also):
        (run / "result.json").write_text(json.dumps({**result, name: altered(result[name])}))
        assert failed(run), name
    (run / "result.json").write_text(json.dumps(result))
    statement(run).unlink()
    assert failed(run)


def test_a_whole_folder_of_an_earlier_moment_passes_and_a_kept_head_finds_it(tmp_path):
    fit(tmp_path, 3)
    earlier = shutil.copytree(tmp_path, tmp_path.parent / "earlier")
    fit(tmp_path, 6, ckpt_path=tmp_path / "checkpoints" / "last.ckpt")
    head = json.loads(statement(tmp_path).read_text())["journal_head"]
    assert failed(tmp_path, head) == []
    assert failed(earlier) == []
    assert failed(earlier, head)


def test_a_folder_without_a_run_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["verify", str(tmp_path)])
    assert "Give the folder of a private run" in capsys.readouterr().err
