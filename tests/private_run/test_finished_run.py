"""A run whose steps are all taken ends without another one, with its statement."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, Stop, loader, privacy, trainer

from dp_lightning.commands.verify import verify
from dp_lightning.errors import BudgetError


class CrashAfter(Stop):
    """Before the next step, or at the end where there is none."""

    def on_train_end(self, trainer, *args):
        self.on_train_batch_start(trainer)


def fit(folder, callback, *others, saved=4, checkpoint=None, **kwargs):
    """A run of 9 steps with a checkpoint after each ``saved``."""
    writer = ModelCheckpoint(folder / "checkpoints", filename="{step}", every_n_train_steps=saved, save_top_k=-1)
    module = Plain()
    run = trainer(folder, callback, writer, *others, enable_checkpointing=True, **kwargs)
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
def test_a_run_that_died_behind_its_last_step_is_stated(tmp_path, saved, lost, settings, capsys):
    crash(tmp_path, privacy(**settings), after=9, saved=saved)
    checkpoint = tmp_path / "checkpoints" / f"step={9 - lost}.ckpt"
    weights = torch.load(checkpoint, weights_only=True)["state_dict"]
    for _ in range(2):  # as often as one likes
        (tmp_path / "privacy_statement.json").unlink()
        run, module = fit(tmp_path, privacy(**settings), checkpoint=checkpoint)
        assert "9 steps of the plan are taken: this fit writes the statement" in capsys.readouterr().out
        assert run.global_step == 9 - lost
        assert all(torch.equal(weights[name], value) for name, value in module.state_dict().items())
        found = statement(tmp_path)
        assert (found["num_steps"], found["num_steps_planned"], found["lost_steps"]) == (9, 9, lost)
        assert found["release"] == "ok"
        assert failed(tmp_path) == []
    fit(tmp_path / "another", privacy(), max_epochs=1)


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
