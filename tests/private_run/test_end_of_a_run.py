"""Faults of a run, and what a run leaves behind when it ends badly or is refused."""

import copy
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
        assert said[fault] in PrivacyStatement.from_dict(saved).release
    statement = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert statement["release"].startswith("not for release")
    assert said[fault] in statement["release"]


HOOKS = ("on_train_epoch_start", "on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_frozen_or_unfrozen_during_the_run_is_refused(tmp_path, trained, hook):
    class Changes(Callback):
        """In the second step."""

    def change(self, trainer, pl_module, *args):
        if trainer.global_step == 1:
            pl_module.net[0].weight.requires_grad_(not trained)

    setattr(Changes, hook, change)
    module = Plain()
    module.net[0].weight.requires_grad_(trained)
    what = "frozen" if trained else "unfrozen"
    with pytest.raises(ModelError, match=rf"^net\.0\.weight was {what} during the private run"):
        trainer(tmp_path, privacy(expected_batch_size=60), Changes()).fit(module, loader())


@pytest.mark.parametrize("trained", [True, False])
def test_so_is_one_in_the_optimizers_step(tmp_path, trained):
    class Changes(Plain):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
            self.net[0].weight.requires_grad_(not trained)

    module = Changes()
    module.net[0].weight.requires_grad_(trained)
    with pytest.raises(ModelError, match=r"^net\.0\.weight was (un)?frozen during the private run"):
        trainer(tmp_path, privacy()).fit(module, loader())


def test_what_joins_the_module_during_the_run_may_require_gradients(tmp_path):
    class Copies(Callback):
        """As averages, probes and the best weights are kept."""

        def on_train_start(self, trainer, pl_module):
            pl_module.average = copy.deepcopy(pl_module.net)

        def on_train_epoch_end(self, trainer, pl_module):
            pl_module.best = copy.deepcopy(pl_module.net)

    run = trainer(tmp_path, privacy(), Copies())
    run.fit(Plain(), loader())
    assert run.global_step == 9


def test_a_refused_fit_leaves_no_statement(tmp_path):
    callback = privacy()
    trainer(tmp_path, callback).fit(Plain(), loader())
    (tmp_path / "privacy_statement.json").unlink()
    with pytest.raises(BudgetError):
        trainer(tmp_path, callback).fit(Plain(), loader())
    assert not (tmp_path / "privacy_statement.json").exists()
