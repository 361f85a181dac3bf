"""A run whose steps are all taken ends without another one: with an evaluation, a checkpoint and its statement."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, Stop, held_out, loader, privacy, trainer

from dp_lightning.callbacks import RunRecord
from dp_lightning.commands.verify import verify
from dp_lightning.errors import BudgetError
from dp_lightning.privacy.journal import journals_in


class Validated(Plain):
    """Counts the batches of its validations."""

    def __init__(self):
        super().__init__()
        self.validated = 0

    def validation_step(self, batch, batch_idx):
        self.validated += not self.trainer.sanity_checking
        self.log("val/accuracy", 0.5)

    def val_dataloader(self):
        return held_out(60)


class CrashAfter(Stop):
    """Before the next step, or in the evaluation where there is none."""

    on_validation_start = Stop.on_train_batch_start


def fit(folder, callback, *others, saved=4, checkpoint=None, **kwargs):
    """A run of 9 steps with a checkpoint after each ``saved``."""
    writer = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=saved, save_top_k=-1)
    module = Validated()
    run = trainer(folder, callback, RunRecord(), writer, *others, enable_checkpointing=True, **kwargs)
    run.fit(module, loader(), ckpt_path=checkpoint, weights_only=True)
    return run, module


def crash(folder, callback, *, after, **kwargs):
    with pytest.raises(RuntimeError, match="stopped"):
        fit(folder, callback, CrashAfter(after), **kwargs)


def statement(folder):
    return json.loads((folder / "privacy_statement.json").read_text())


def failed(folder):
    return [f"{subject}: {finding}" for subject, finding in verify(folder, []) if finding is not None]


BUDGET = {"target_epsilon": 5.0, "noise_multiplier": None}


@pytest.mark.parametrize(("saved", "lost", "settings"), [(9, 0, {}), (4, 1, BUDGET)])
def test_a_run_that_died_behind_its_last_step_is_evaluated_and_stated(tmp_path, saved, lost, settings):
    crash(tmp_path, privacy(**settings), after=9, saved=saved)
    (tmp_path / "privacy_statement.json").unlink()
    # As often as one likes.
    for name in (f"step={9 - lost}.ckpt", f"finished-step={9 - lost}.ckpt"):
        checkpoint = tmp_path / "checkpoints" / name
        weights = torch.load(checkpoint, weights_only=True)["state_dict"]
        run, module = fit(tmp_path, privacy(**settings), checkpoint=checkpoint)
        assert (run.global_step, module.validated) == (9 - lost, 2)
        assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
        found = statement(tmp_path)
        assert (found["num_steps"], found["num_steps_planned"], found["lost_steps"]) == (9, 9, lost)
        assert found["release"] == "ok"
        result = json.loads((tmp_path / "result.json").read_text())
        assert (result["completed"], result["num_steps"]) == (True, 9)
        assert result["evaluated_after_steps"][-1:] == [9]
        assert result["epsilon"] == found["epsilon"]["rdp"]
        assert failed(tmp_path) == []
    # One entry for each evaluation of these steps.
    assert result["evaluated_after_steps"].count(9) == 1


def test_a_trainer_that_has_finished_a_run_trains_another(tmp_path):
    crash(tmp_path / "one", privacy(), after=9)
    callback = privacy()
    run, _ = fit(tmp_path / "one", callback, checkpoint=tmp_path / "one" / "checkpoints" / "step=8.ckpt")
    assert run.global_step == 8
    assert "run" not in vars(run.fit_loop)


def test_more_steps_than_the_target_allows_are_refused(tmp_path):
    crash(tmp_path, privacy(**BUDGET), after=9, saved=9)
    checkpoint = tmp_path / "checkpoints" / "step=9.ckpt"
    with pytest.raises(BudgetError, match="too little is left for another step"):
        fit(tmp_path, privacy(target_epsilon=4.9, noise_multiplier=None), checkpoint=checkpoint, max_epochs=4)
    with pytest.raises(BudgetError, match="9 are taken already"):
        fit(tmp_path, privacy(target_epsilon=6.0, noise_multiplier=None), checkpoint=checkpoint)
    callback = privacy(target_epsilon=6.0, noise_multiplier=None)
    fit(tmp_path, callback, checkpoint=checkpoint, max_epochs=4)
    assert callback.ledger.num_steps == 12
    assert callback.ledger.epsilon(delta=1e-3, accountant="rdp") <= 6.0


def left_journal(folder, callback, after):
    """The journal of a run that died before its first checkpoint."""
    crash(folder, callback, after=after, saved=99)
    assert not list((folder / "checkpoints").glob("*.ckpt"))
    (journal,) = journals_in(folder)
    return journal


@pytest.mark.parametrize(("after", "settings"), [(5, BUDGET), (9, {})])
def test_steps_of_a_run_without_a_checkpoint_stay_counted(tmp_path, after, settings):
    first, again = privacy(**settings), privacy(**settings)
    again.history.left = left_journal(tmp_path, first, after)
    folder = tmp_path / "again"  # as each start of dpl has a log folder of its own
    run, module = fit(folder, again, saved=99)
    assert again.run == first.run
    assert run.global_step == 9 - after
    assert module.validated > 0
    # The noise of the plan, which its last digit does not change.
    assert len(again.ledger.runs) == 1
    found = statement(folder)
    assert (found["num_steps"], found["lost_steps"], found["release"]) == (9, after, "ok")
    assert (folder / "result.json").is_file()


def test_steps_without_a_checkpoint_count_under_another_target(tmp_path):
    again = privacy(target_epsilon=8.0, noise_multiplier=None)
    again.history.left = left_journal(tmp_path, privacy(**BUDGET), 5)
    fit(tmp_path, again)
    (before, _, taken), (after, _, left) = again.ledger.runs
    assert (taken, left) == (5, 4)
    assert after < before
    assert 7.9 < again.ledger.epsilon(delta=1e-3, accountant="rdp") <= 8.0
