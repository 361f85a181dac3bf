"""Lightning's epochs are those of the plan, however often a run is interrupted within one and resumed."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from plain_run import Plain, Stop, held_out, loader, privacy, trainer
from torch.nn import functional as F

EPOCHS, STEPS = 3, 6  # steps of an epoch
WHOLE = [epoch for epoch in range(EPOCHS) for _ in range(STEPS)]  # the epoch of each step


class Places(Callback):
    """Notes the epoch of each step, and the epochs that began and ended."""

    def __init__(self):
        self.steps, self.begun, self.ended = [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.begun.append(trainer.current_epoch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(trainer.current_epoch)

    def on_train_epoch_end(self, trainer, pl_module):
        self.ended.append(trainer.current_epoch)


def run(folder, *callbacks, resumes=None, target=3.0, module=None, max_epochs=EPOCHS):
    """The ledger of a run with a checkpoint of each step."""
    callback = privacy(expected_batch_size=10, target_epsilon=target, noise_multiplier=None)
    every = ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    made = trainer(folder, callback, *callbacks, every, max_epochs=max_epochs, enable_checkpointing=True)
    path = folder / f"step={resumes}.ckpt" if resumes else None
    validation = held_out() if isinstance(module, Validated) else None
    made.fit(module or Plain(), loader(), validation, ckpt_path=path, weights_only=True)
    return callback.ledger


def interrupted(folder, *callbacks, at, **kwargs):
    with pytest.raises(RuntimeError, match="stopped"):
        run(folder, *callbacks, Stop(at), **kwargs)


@pytest.mark.parametrize("stops", [[6], [2, 4, 13]], ids=str)
def test_a_run_that_was_interrupted_takes_all_of_its_steps(tmp_path, stops):
    places, before = Places(), None
    for stop in stops:
        interrupted(tmp_path, places, at=stop, resumes=before)
        before = stop
    assert run(tmp_path, places, resumes=before).num_steps == len(WHOLE)
    assert (places.steps, places.begun, places.ended) == (WHOLE, [0, 1, 2], [0, 1, 2])


class Validated(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize("step", [5, 6])
def test_early_stopping_resumes_from_a_checkpoint_of_any_step(tmp_path, step):
    """That of an epoch's last step was saved before the metric that early stopping waits for was there."""
    interrupted(tmp_path, EarlyStopping("val", patience=99), at=step, module=Validated())
    places = Places()
    ledger = run(tmp_path, places, EarlyStopping("val", patience=99), resumes=step, module=Validated())
    assert places.steps == WHOLE[step:]
    assert ledger.num_steps == len(WHOLE)


def test_schedules_of_epochs_follow_the_plan(tmp_path):
    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Scheduled()
    interrupted(tmp_path, at=8, module=Scheduled())
    run(tmp_path, resumes=8, module=module)
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.5**EPOCHS)
