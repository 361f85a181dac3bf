"""The trainer's counts of batches are those of the plan, wherever they are read during a private fit."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import N, Plain, loader, privacy, trainer
from torch.utils.data import DataLoader

from dp_lightning.errors import ConfigurationError


class OneCycle(Plain):
    """Its schedule ends with the run."""

    def __init__(self):
        super().__init__()
        self.found, self.rates = [], []

    def note(self):
        self.found.append(self.trainer.estimated_stepping_batches)

    def training_step(self, batch, batch_idx):
        self.log("steps", float(self.trainer.estimated_stepping_batches))
        return super().training_step(batch, batch_idx)

    def on_train_batch_start(self, batch, batch_idx):
        self.note()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note()

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self):
        self.note()
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"max_epochs": 3}, 9),
        ({"max_epochs": 3, "max_steps": 7}, 7),
        ({"max_epochs": 2, "max_steps": 50}, 6),
        ({"max_epochs": -1, "max_steps": 4}, 4),
        ({"max_epochs": None, "max_steps": 4}, 4),
    ],
)
def test_a_schedule_of_the_whole_run(tmp_path, mode, settings, steps):
    run = trainer(tmp_path, privacy(max_physical_batch_size=7, examples=mode), **settings)
    module = OneCycle()
    run.fit(module, loader())
    assert run.global_step == steps
    assert set(module.found) == {steps}
    assert len(module.found) > 2 * steps
    assert float(run.callback_metrics["steps"]) == steps
    assert len(module.rates) == steps
    assert max(module.rates[1:-1]) == pytest.approx(0.1, rel=0.3)
    assert module.rates[-1] == pytest.approx(0.1 / 25 / 1e4)
    assert type(run) is pl.Trainer


@pytest.mark.parametrize("num_train", [None, N])
def test_epochs_are_counted_in_examples(tmp_path, num_train):
    # floor(3 * 60 / 25) = 7, and not 3 times 2 or 3.
    module = OneCycle()
    trainer(tmp_path, privacy(expected_batch_size=25, num_train=num_train), max_epochs=3).fit(module, loader())
    assert set(module.found) == {7}


@pytest.mark.parametrize("num_train", [None, N])
def test_a_run_that_goes_on_for_longer(tmp_path, num_train):
    checkpoint = ModelCheckpoint(tmp_path, filename="half")
    run = trainer(tmp_path, privacy(num_train=num_train), checkpoint, enable_checkpointing=True, max_epochs=2)
    run.fit(OneCycle(), loader())

    class Longer(OneCycle):
        def configure_optimizers(self):
            self.note()
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Longer()
    run = trainer(tmp_path, privacy(num_train=num_train), max_epochs=5)
    run.fit(module, loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
    assert run.global_step == 15
    assert set(module.found) == {15}


def test_the_trainer_counts_by_itself_after_an_error_and_for_the_next_fit(tmp_path):
    class Fails(OneCycle):
        def on_train_epoch_end(self):
            raise RuntimeError("later")

    class Mine(pl.Trainer):
        pass

    run = Mine(
        callbacks=[privacy()],
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        default_root_dir=tmp_path,
        accelerator="cpu",
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="later"):
            run.fit(Fails(), loader())
        assert type(run) is Mine


@pytest.fixture
def _loaders_as_before():
    """Lightning changes the classes of loaders while one is made, and leaves them so where that raises."""
    before = {kind: dict(vars(kind)) for kind in all_subclasses(DataLoader)}
    yield
    for kind, attributes in before.items():
        for name in set(vars(kind)) - set(attributes):
            delattr(kind, name)
        for name in ("__init__", "__setattr__", "__delattr__"):
            if name in attributes:
                setattr(kind, name, attributes[name])


def all_subclasses(kind):
    return {kind}.union(*map(all_subclasses, kind.__subclasses__()))


@pytest.mark.usefixtures("_loaders_as_before")
def test_the_loader_is_asked_for_too_early(tmp_path):
    class Asks(Plain):
        def configure_optimizers(self):
            self.trainer.fit_loop.setup_data()

    with pytest.raises(ConfigurationError, match="estimated_stepping_batches"):
        trainer(tmp_path, privacy()).fit(Asks(), loader())
