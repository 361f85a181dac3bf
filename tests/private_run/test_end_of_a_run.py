"""Faults of a run, and what a run leaves behind when it ends badly or is refused."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from plain_run import Plain, loader, privacy, trainer, written

from dp_lightning.errors import BudgetError, ModelError
from dp_lightning.privacy.statement import PrivacyStatement


def test_a_second_fit_is_refused_when_the_budget_is_spent_and_leaves_no_statement(tmp_path):
    callback = privacy()
    trainer(tmp_path, callback).fit(Plain(), loader())
    statement = callback.private_run.folder / "privacy_statement.json"
    statement.unlink()
    with pytest.raises(BudgetError, match="9"):
        trainer(tmp_path, callback).fit(Plain(), loader())
    assert callback.ledger.num_steps == 9
    assert not statement.exists()


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

    callback = privacy()
    run = trainer(tmp_path, callback, OnExceptionCheckpoint(tmp_path), max_epochs=1, enable_checkpointing=True)
    said = {"refused": "a step ended by an error (ModelError)", "error": "the run ended by an error (RuntimeError)"}
    said["weights"] = "weights are not finite"
    if fault == "weights":
        run.fit(EndsBadly(), loader())
    else:
        with pytest.raises((ModelError, RuntimeError)):
            run.fit(EndsBadly(), loader())
        saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=True)["private_run"]["statement"]
        assert said[fault] in PrivacyStatement.from_dict(saved).release
    assert written(callback)["release"].startswith("not for release")
    assert said[fault] in written(callback)["release"]


HOOKS = ("on_train_batch_start", "on_before_zero_grad", "on_before_optimizer_step", "optimizer_step")


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("trained", [True, False])
def test_a_parameter_frozen_or_unfrozen_during_the_run_is_refused(tmp_path, trained, hook):
    class Changes(Plain):
        """In the second step."""

    def change(module, *args):
        if module.global_step == 1:
            module.net[0].weight.requires_grad_(not trained)
        if hook == "optimizer_step":
            Plain.optimizer_step(module, *args)

    setattr(Changes, hook, change)
    module = Changes()
    module.net[0].weight.requires_grad_(trained)
    what = "frozen" if trained else "unfrozen"
    with pytest.raises(ModelError, match=rf"^net\.0\.weight was {what} during the private run"):
        trainer(tmp_path, privacy(expected_batch_size=60)).fit(module, loader())


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
