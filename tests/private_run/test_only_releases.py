"""Between two losses nothing but the optimizer, schedules and validation data change what a run trains."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from plain_run import Plain, examples, loader, privacy, trainer
from torch.utils.data import DataLoader

from dp_lightning.errors import ModelError
from dp_lightning.private_run.resume import SavedRun


class Buffered(Plain):
    def __init__(self):
        super().__init__()
        self.register_buffer("threshold", torch.zeros(()))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.5, total_steps=50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def validation_step(self, batch, batch_idx):
        self.threshold.copy_(self.net(batch[0]).mean())


def fit(tmp_path, *callbacks, module=None, **kwargs):
    module = module or Buffered()
    run = trainer(tmp_path, privacy(), *callbacks, **kwargs)
    run.fit(module, loader(), DataLoader(examples(30, seed=1), batch_size=30))
    return run


def test_schedules_momentum_and_validation_may_change_what_is_theirs(tmp_path):
    run = fit(tmp_path)
    assert run.callbacks[0].statement().release == "ok"


HOOKS = ("on_train_batch_start", "on_train_batch_end", "on_train_epoch_start", "on_train_epoch_end")
TOUCHES = {
    "threshold": lambda module: module.threshold.add_(1),
    r"net\[0\].weight": lambda module: module.net[0].weight.data.mul_(0.99),
    r"net\[2\].bias": lambda module: module.net[2].bias.detach().numpy().__imul__(0.5),
    "lr": lambda module: module.optimizers().param_groups[0].update(lr=0.1),
    "momentum_buffer": lambda module: module.optimizers().state[module.net[0].weight]["momentum_buffer"].mul_(0.5),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("name", TOUCHES)
def test_another_hand_is_refused_by_the_name_of_what_it_changes(tmp_path, hook, name):
    def touch(self, trainer, pl_module, *args):
        if trainer.global_step >= 2:
            TOUCHES[name](pl_module)

    kind = type("Touches", (Callback,), {hook: touch})
    with pytest.raises(ModelError, match=rf"{name} changed between two steps"):
        fit(tmp_path, kind(), check_val_every_n_epoch=10)


def test_validation_may_not_change_what_is_trained(tmp_path):
    class Trains(Callback):
        def on_validation_epoch_end(self, trainer, pl_module):
            if not trainer.sanity_checking:
                pl_module.net[0].bias.data.add_(1)

    with pytest.raises(ModelError, match=r"net\[0\].bias changed between two steps"):
        fit(tmp_path, Trains())


def test_weights_that_are_exchanged_for_a_validation_alone_are_allowed(tmp_path):
    class Swaps(Callback):
        def on_validation_epoch_start(self, trainer, pl_module):
            self.kept = [p.detach().clone() for p in pl_module.parameters()]
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.mul_(0.5)

        def on_validation_epoch_end(self, trainer, pl_module):
            with torch.no_grad():
                for parameter, kept in zip(pl_module.parameters(), self.kept, strict=True):
                    parameter.copy_(kept)

    run = fit(tmp_path, Swaps())
    assert run.callbacks[0].statement().release == "ok"


def test_what_changes_after_the_last_step_is_not_for_release(tmp_path):
    class Sharpens(Callback):
        def on_train_end(self, trainer, pl_module):
            pl_module.net[2].weight.data.mul_(10)

    run = fit(tmp_path, Sharpens(), check_val_every_n_epoch=10)
    said = run.callbacks[0].statement()
    assert "has changed self.net[2].weight after the last step" in said.release
    assert "not for release" in (tmp_path / "privacy_statement.json").read_text()


def test_a_fit_without_privacy_after_the_private_one_is_not_for_release(tmp_path):
    module = Plain()
    run = trainer(tmp_path, privacy())
    run.fit(module, loader())
    assert run.callbacks[0].statement().release == "ok"
    trainer(tmp_path, max_epochs=1).fit(module, loader())
    assert "after the last step" in run.callbacks[0].statement().release
    run.save_checkpoint(tmp_path / "after.ckpt")
    saved = torch.load(tmp_path / "after.ckpt", weights_only=True)
    assert SavedRun.read(saved).statement.faults


@pytest.mark.filterwarnings("ignore:.*weight averaging")
def test_lightnings_own_average_of_the_weights_is_post_processing(tmp_path):
    average = pl.callbacks.EMAWeightAveraging(decay=0.5)
    run = fit(tmp_path, average)
    assert torch.equal(run.model.net[0].weight, average._average_model.module.net[0].weight)
    said = run.callbacks[0].statement()
    assert said.release == "ok"
    assert "EMAWeightAveraging" in said.postprocessing
