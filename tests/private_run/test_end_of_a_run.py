"""Faults of a run, and what a run leaves behind when it ends badly or is refused."""

import json

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.errors import BudgetError, ModelError
from dp_lightning.privacy.statement import PrivacyStatement


def test_a_second_fit_is_refused_when_the_budget_is_spent(tmp_path):
    callback = privacy()
    trainer(tmp_path, callback).fit(Plain(), loader())
    with pytest.raises(BudgetError, match="9"):
        trainer(tmp_path, callback).fit(Plain(), loader())
    assert callback.ledger.num_steps == 9


@pytest.mark.parametrize("fault", ["refused", "error", "weights"])
def test_a_run_that_ends_badly_is_not_for_release(tmp_path, fault):
    class EndsBadly(Plain):
        def training_step(self, batch, batch_idx):
            if self.global_step == 2 and fault == "refused":
                self.net(batch[0])[0, 0].item()
            return super().training_step(batch, batch_idx)

        def on_train_batch_start(self, batch, batch_idx):
            if self.global_step == 2 and fault == "error":
                raise RuntimeError("of the user's own")

        def on_train_end(self):
            if fault == "weights":
                torch.nn.init.constant_(self.net[0].weight, torch.inf)

    run = trainer(tmp_path, privacy(), OnExceptionCheckpoint(tmp_path), max_epochs=1, enable_checkpointing=True)
    said = {"refused": "a step ended by an error (ModelError)", "error": "the run ended by an error (RuntimeError)"}
    said["weights"] = "weights are not finite"
    if fault == "weights":
        run.fit(EndsBadly(), loader())
    else:
        with pytest.raises((ModelError, RuntimeError)):
            run.fit(EndsBadly(), loader())
        saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["private_run"]["statement"]
        assert said[fault] in PrivacyStatement.from_saved(saved).release
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["release"].startswith("not for release")
    assert said[fault] in statement["release"]


def test_a_parameter_unfrozen_during_the_run_is_refused(tmp_path):
    class Unfreeze(Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            pl_module.net[0].weight.requires_grad_(trainer.current_epoch == 1)

    module = Plain()
    module.net[0].weight.requires_grad_(False)
    with pytest.raises(ModelError, match=r"self.net\[0\].weight changed between two steps"):
        trainer(tmp_path, privacy(), Unfreeze()).fit(module, loader())


def test_a_skipped_optimizer_step_is_refused(tmp_path):
    class Skips(Plain):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer_closure()

    with pytest.raises(ModelError, match=r"without an optimizer step|without a complete"):
        trainer(tmp_path, privacy()).fit(Skips(), loader())


def test_the_shown_epsilon_is_never_below_what_is_spent(tmp_path):
    class Shown(Callback):
        def on_train_batch_end(self, trainer, pl_module, *args):
            callback = trainer.callbacks[0]
            shown.append(callback.private_run.budget.bound - callback.ledger.epsilon(delta=1e-3, accountant="rdp"))

    shown = []
    trainer(tmp_path, privacy(expected_batch_size=2), Shown(), max_epochs=1).fit(Plain(), loader())
    assert len(shown) >= 30
    assert min(shown) >= -1e-9


def test_a_refused_fit_leaves_no_statement(tmp_path):
    callback = privacy()
    trainer(tmp_path, callback).fit(Plain(), loader())
    (tmp_path / "privacy_statement.json").unlink()
    with pytest.raises(BudgetError):
        trainer(tmp_path, callback).fit(Plain(), loader())
    assert not (tmp_path / "privacy_statement.json").exists()
