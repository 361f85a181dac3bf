"""What a private run writes: no array of raw examples, and no number that was logged while training."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from plain_run import Plain, loader, privacy, trainer
from torch.nn import functional as F
from torchmetrics import MeanMetric

from dp_lightning.callbacks.nothing_raw import LoggedNumbers
from dp_lightning.errors import ConfigurationError, ModelError


class Seen(Plain):
    """Reads its own training loss past what withholds it."""

    def __init__(self):
        super().__init__()
        self.seen, self.bank = MeanMetric(), None

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.seen.update(loss)
        self.log("train_loss", self.seen, on_step=False, on_epoch=True)
        self.log("loss", loss)
        return loss


def saved(tmp_path, module, *callbacks):
    path = tmp_path / "end.ckpt"
    run = trainer(tmp_path, privacy(), *callbacks, max_epochs=1)
    run.fit(module, loader())
    run.save_checkpoint(path)
    return torch.load(path, weights_only=True)


def raw(module):
    """The mean of the losses, as self.seen and the logger have it."""
    return float(module.trainer.fit_loop.epoch_loop._results["training_step.loss"].value)


class InAState(Callback):
    def state_dict(self):
        return {"deep": [{"best": self.value}]}

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.value = self.take(pl_module)


STATES = {
    "a logged number": (raw, r"the number at callbacks\[.*\['deep'\]\[0\]\['best'\], which was logged as 'loss'"),
    "as a tensor": (lambda m: torch.tensor(raw(m)), "which was logged as 'loss'"),
    "an array": (lambda m: torch.zeros(3), r"an array at callbacks"),
    "of NumPy": (lambda m: torch.zeros(2, 2).numpy(), r"an array at callbacks"),
}


@pytest.mark.parametrize("case", STATES)
def test_a_callbacks_state_with_something_raw_is_not_written(tmp_path, case):
    take, words = STATES[case]
    kind = type("Keeps", (InAState,), {"take": staticmethod(take)})
    with pytest.raises(ModelError, match=words):
        saved(tmp_path, Seen(), kind())
    assert not list(tmp_path.glob("*.ckpt"))


def test_other_numbers_are_written(tmp_path):
    kind = type("Counts", (InAState,), {"take": staticmethod(lambda m: [m.trainer.global_step, 0.5, 1 / 3, 0.1234567])})
    state = saved(tmp_path, Seen(), kind())["callbacks"]["Counts"]
    assert state == {"deep": [{"best": [3, 0.5, 1 / 3, 0.1234567]}]}


@pytest.mark.parametrize(
    ("put", "words"),
    [
        (lambda checkpoint: checkpoint.update(bank=torch.randn(4, 5)), "an array at bank"),
        (lambda checkpoint: checkpoint["state_dict"].update(bank=torch.randn(4, 5)), "not the model's: bank"),
        (lambda checkpoint: checkpoint["hyper_parameters"].update(x=torch.randn(4)), r"hyper_parameters\['x'\]"),
    ],
)
def test_arrays_that_a_module_puts_into_a_checkpoint_are_not_written(tmp_path, put, words):
    class Puts(Seen):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

        def on_save_checkpoint(self, checkpoint):
            put(checkpoint)

    with pytest.raises(ModelError, match=words):
        saved(tmp_path, Puts())
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_checkpoint_of_an_exception_is_looked_at_too(tmp_path):
    class Fails(Seen):
        def on_train_epoch_end(self):
            raise RuntimeError("stops")

        def on_save_checkpoint(self, checkpoint):
            checkpoint["bank"] = torch.randn(4, 5)

    run = trainer(tmp_path, privacy(), OnExceptionCheckpoint(tmp_path), enable_checkpointing=True)
    with pytest.raises(ModelError, match="an array at bank"):
        run.fit(Fails(), loader())
    assert not list(tmp_path.glob("*.ckpt"))


def test_a_file_name_with_a_training_number_is_refused(tmp_path):
    named = ModelCheckpoint(tmp_path, filename="{epoch}-{train_loss:.4f}", save_on_train_epoch_end=True)
    with pytest.raises(ModelError, match="'train_loss'"):
        trainer(tmp_path, privacy(), named, enable_checkpointing=True).fit(Seen(), loader())
    assert not list(tmp_path.glob("*.ckpt"))


def test_arrays_in_hyperparameters_are_refused_before_the_start(tmp_path):
    class Weighted(Plain):
        def __init__(self, class_weights):
            super().__init__()
            self.save_hyperparameters()

    with pytest.raises(ConfigurationError, match=r"class_weights of Weighted .*ignore=\['class_weights'\]"):
        trainer(tmp_path, privacy()).fit(Weighted(torch.ones(3)), loader())
    trainer(tmp_path, privacy(), max_epochs=1).fit(Weighted([1.0, 1.0, 1.0]), loader())


def test_metrics_that_are_saved_with_the_model_are_refused(tmp_path):
    module = Seen()
    module.seen.persistent(True)
    with pytest.raises(ModelError, match=r"metric seen saves its state.*persistent\(False\)"):
        trainer(tmp_path, privacy()).fit(module, loader())


def test_numbers_of_a_long_run_are_known_by_their_tags():
    logged = LoggedNumbers()
    numbers = torch.rand(10_000, generator=torch.Generator().manual_seed(0))
    for number in numbers:
        logged.note("loss", number)
        logged.note("norm", 10 + number[None])
    assert logged.tag_of(float(numbers[0])) == logged.tag_of(float(numbers[-1])) == "loss"
    assert logged.tag_of(float(10 + numbers[3])) == "norm"
    assert logged.tag_of(0.123456789) is None
    assert logged.tag_of(float("nan")) is logged.tag_of(1e300) is None
