"""Faults of a run, and what a run leaves behind when it ends badly or is refused."""

import copy

import pytest
import torch
from lightning.pytorch.callbacks import Callback, OnExceptionCheckpoint
from plain_run import Plain, Stop, examples, loader, privacy, trainer, written

from dp_lightning.errors import BudgetError, ConfigurationError, ModelError
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


@pytest.mark.parametrize(
    ("hook", "trained"), [("on_train_batch_start", True), ("on_train_batch_start", False), ("optimizer_step", True)]
)
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


# A second fit of one callback continues its run

TARGET = {"noise_multiplier": None, "target_epsilon": 5.0, "accountant": "rdp"}


def stopped(tmp_path, callback, **kwargs):
    """The module after two steps of a fit that an error has ended."""
    module = Plain()
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(tmp_path, callback, Stop(2), **kwargs).fit(module, loader())
    return module


def test_a_longer_second_fit_is_planned_for_the_same_target(tmp_path):
    callback = privacy(**TARGET)
    module = stopped(tmp_path, callback, max_epochs=1)
    first = callback.plan
    trainer(tmp_path, callback, max_epochs=3).fit(module, loader())
    assert callback.ledger.num_steps == 3 * first.num_steps
    assert callback.plan.noise_multiplier > first.noise_multiplier
    assert 4.9 < callback.private_run.budget.spent() <= 5.0
    assert callback.ledger.totals == {
        (first.noise_multiplier, first.sample_rate): 2,
        (callback.plan.noise_multiplier, first.sample_rate): 3 * first.num_steps - 2,
    }


def test_steps_of_an_earlier_fit_are_not_lost_and_neither_is_its_fault(tmp_path):
    """Lightning counts anew in each Trainer."""
    callback = privacy()
    trainer(tmp_path, callback).fit(stopped(tmp_path, callback), loader())
    said = callback.statement()
    assert (said.ledger.num_steps, said.lost_steps) == (9, 0)
    assert "the run ended by an error (RuntimeError)" in said.release


def test_a_fit_that_was_refused_binds_no_later_one(tmp_path):
    callback, module = privacy(**TARGET), Plain()
    module.configure_optimizers = lambda: []
    with pytest.raises(ConfigurationError, match="optimizers"):
        trainer(tmp_path, callback).fit(module, loader())
    assert callback.ledger.num_steps == 0
    trainer(tmp_path, callback).fit(Plain(), loader(examples(40)))
    assert (callback.plan.num_train, callback.ledger.num_steps) == (40, callback.plan.num_steps)
    assert callback.statement().release == "ok"


def test_a_run_does_not_go_on_beyond_its_target_after_steps_of_another(tmp_path):
    callback = privacy(**TARGET)
    module = stopped(tmp_path, callback)
    trainer(tmp_path, privacy(**{**TARGET, "target_epsilon": 8.0}), max_epochs=2).fit(module, loader())
    with pytest.raises(BudgetError, match=r"above privacy\.target_epsilon 5"):
        trainer(tmp_path, callback).fit(module, loader())
    assert callback.ledger.num_steps == 2
