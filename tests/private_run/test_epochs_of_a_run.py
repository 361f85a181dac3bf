"""Lightning's epochs are those of the plan, however often a run stops within one and goes on."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from plain_run import Plain, Stop, held_out, loader, privacy, trainer
from torch.nn import functional as F

from dp_lightning.errors import ModelError

EPOCHS, STEPS = 3, 6  # steps of an epoch
WHOLE = [epoch for epoch in range(EPOCHS) for _ in range(STEPS)]  # the epoch of each step


class Places(Callback):
    """Notes the epoch of each step, and the epochs that began and ended; asks to stop after ``step``."""

    def __init__(self, step=None):
        self.step, self.steps, self.begun, self.ended = step, [], [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.begun.append(trainer.current_epoch)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps.append(trainer.current_epoch)
        if trainer.global_step == self.step:
            trainer.should_stop = True

    def on_train_epoch_end(self, trainer, pl_module):
        self.ended.append(trainer.current_epoch)


def run(folder, *callbacks, resumes=False, target=3.0, module=None, **kwargs):
    """A run of EPOCHS epochs that keeps its last checkpoint."""
    callback = privacy(expected_batch_size=10, target_epsilon=target, noise_multiplier=None)
    checkpoints = ModelCheckpoint(dirpath=folder, save_last=True, enable_version_counter=False)
    made = trainer(folder, callback, *callbacks, checkpoints, **{"max_epochs": EPOCHS, **kwargs})
    path = folder / "last.ckpt" if resumes else None
    validation = held_out() if isinstance(module, Validated) else None
    made.fit(module or Plain(), loader(), validation, ckpt_path=path, weights_only=True if resumes else None)
    return callback.ledger


@pytest.mark.parametrize("stops", [[1], [8], [6], [2, 4, 13], [5, 6, 7], [17]], ids=str)
def test_a_run_that_was_stopped_takes_all_of_its_steps(tmp_path, stops):
    places = [Places(step) for step in [*stops, None]]
    for part, place in enumerate(places):
        ledger = run(tmp_path, place, resumes=part > 0, enable_checkpointing=True)
    assert ledger.num_steps == len(WHOLE)
    assert [step for place in places for step in place.steps] == WHOLE
    assert [epoch for place in places for epoch in place.begun] == [0, 1, 2]
    assert places[-1].ended[-1] == 2


@pytest.mark.parametrize("kept", [{"max_epochs": EPOCHS}, {"max_epochs": -1, "max_steps": 14}], ids=["epochs", "steps"])
def test_a_finished_run_is_extended_within_its_last_epoch(tmp_path, kept):
    first, second = Places(), Places()
    run(tmp_path, first, enable_checkpointing=True, max_epochs=-1, max_steps=9)
    ledger = run(tmp_path, second, resumes=True, target=6.0, enable_checkpointing=True, **kept)
    assert first.steps + second.steps == WHOLE[: ledger.num_steps]
    assert ledger.num_steps == kept.get("max_steps", len(WHOLE))


def test_a_second_fit_of_a_trainer_goes_on_where_the_plan_does(tmp_path):
    callback, places, module = privacy(expected_batch_size=10), Places(8), Plain()
    made = trainer(tmp_path, callback, places, max_epochs=EPOCHS)
    made.fit(module, loader())
    places.step = None
    made.fit(module, loader())
    assert places.steps == WHOLE


def test_steps_that_a_crash_has_lost_count_in_their_epochs(tmp_path):
    """They are not taken again, and the epochs stay those of the plan."""
    with pytest.raises(RuntimeError, match="stopped"):
        run(tmp_path, Places(), Stop(8), enable_checkpointing=True)
    places = Places()
    ledger = run(tmp_path, places, resumes=True, enable_checkpointing=True)
    assert places.steps == WHOLE[8:]
    assert ledger.num_steps == len(WHOLE)


class Validated(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))


@pytest.mark.parametrize("step", [5, 6, 12])
def test_early_stopping_goes_on_from_a_checkpoint_of_any_step(tmp_path, step):
    """Also from one of an epoch's last step, which was saved before the metric that it waits for was there."""
    every = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(RuntimeError, match="stopped"):
        run(
            tmp_path,
            EarlyStopping("val", patience=99),
            every,
            Stop(step),
            module=Validated(),
            enable_checkpointing=True,
        )
    (tmp_path / f"step={step}.ckpt").replace(tmp_path / "last.ckpt")
    places, stopping = Places(), EarlyStopping("val", patience=99)
    ledger = run(tmp_path, places, stopping, resumes=True, module=Validated(), enable_checkpointing=True)
    assert places.steps == WHOLE[step:]
    assert ledger.num_steps == len(WHOLE)


def test_an_epoch_that_code_cuts_is_refused(tmp_path):
    class Skips(Plain):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    callback = privacy(expected_batch_size=10)
    with pytest.raises(ModelError, match=r"An epoch ended after 3 of its steps.*on_train_batch_start returns -1"):
        trainer(tmp_path, callback).fit(Skips(), loader())
    assert callback.ledger.num_steps == 3


def test_schedules_of_epochs_follow_the_plan(tmp_path):
    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    module = Scheduled()
    run(tmp_path, Places(8), module=Scheduled(), enable_checkpointing=True)
    run(tmp_path, resumes=True, module=module, enable_checkpointing=True)
    assert module.optimizers().param_groups[0]["lr"] == pytest.approx(0.5**EPOCHS)
