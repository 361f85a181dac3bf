"""What a private run writes: no array of raw examples, no object, and no number that was logged while training."""

import json
from argparse import Namespace
from collections import Counter, OrderedDict
from enum import StrEnum
from fractions import Fraction
from functools import partial
from pathlib import Path, PureWindowsPath

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.cli import LightningCLI
from plain_run import Plain, examples, loader, privacy, trainer
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, SequentialLR, StepLR
from torchmetrics import MeanMetric

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.lightning_modules import SmallCNNModule
from dp_lightning.private_run.checkpoint_contents import LoggedNumbers
from dp_lightning.private_run.resume import SavedRun
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO


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


def is_simple(value):
    return np.float32(Fraction(value).limit_denominator(1000)) == np.float32(value)


def raw(module):
    """The mean of the losses, as self.seen and the logger have it."""
    return float(module.trainer.fit_loop.epoch_loop._results["training_step.loss"].value)


class InAState(Callback):
    def state_dict(self):
        return {"deep": [{"best": self.value}]}

    def on_train_batch_end(self, trainer, pl_module, *args):
        value = self.take(pl_module)
        # One loss of fifty is a simple fraction by chance, as an accuracy is, and may be saved.
        number = value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        if not hasattr(self, "value") or not isinstance(number, float) or not is_simple(number):
            self.value = value


class Holder:
    """Plain to look at."""

    def __init__(self, rows):
        self.rows = rows


class RowsIn(dict):
    """A dict with an attribute."""


class Mode(StrEnum):
    FAST = "fast"


def attributed(value, rows):
    value.rows = rows
    return value


N_IMAGES = 60
RDP = {"expected_batch_size": 20, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
ROWS = examples(500).tensors[0]  # 2,500 numbers
HOLDERS = {
    "an object": (Holder(ROWS), "an object of type Holder"),
    "bytes": (ROWS.numpy().tobytes(), "an object of type bytes"),
    "a bytearray": (bytearray(ROWS.numpy().tobytes()), "an object of type bytearray"),
    "a data set": (examples(), "an object of type TensorDataset"),
    "a module": (nn.Linear(2, 2), "an object of type Linear"),
    "an attribute of a dict": (attributed(OrderedDict(a=1), ROWS), "an array"),
    "a class of dicts": (attributed(RowsIn(a=1), ROWS), "an object of type RowsIn"),
    "a text with an attribute": (attributed(Mode("fast"), ROWS), "an object of type Mode"),
    "a partial": (partial(torch.optim.SGD, lr=ROWS), "an object of type partial"),
    "a method": (Holder(ROWS).__init__, "an object of type method"),
    "a class": (torch.optim.SGD, "an object of type type"),
    "a function": (F.relu, "an object of type function"),
    "a Namespace": (Namespace(lr=0.1), "an object of type Namespace"),
    "a key": ({Holder(1): 2}, "an object of type Holder"),
    "an array of one object": (np.array([None], dtype=object), "an array"),
}


STATES = {
    **{name: (lambda m, value=value: value, f"{words} at callbacks") for name, (value, words) in HOLDERS.items()},
    "many numbers": (lambda m: ROWS.repeat(5, 1).tolist(), r"more than 10,000 values in all at callbacks\['Keeps'\]"),
    "a set of numbers": (lambda m: set(torch.rand(11_000, dtype=torch.float64).tolist()), "10,000 values"),
    "keys of numbers": (lambda m: {row: 0 for row in map(tuple, torch.rand(2500, 5).tolist())}, "10,000 values"),
    "a long text": (lambda m: str(ROWS.repeat(5, 1).tolist()), "more than 100,000 characters of text in all"),
    "a view of an array": (lambda m: ROWS[0, 0], "an array at callbacks"),
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


class Scores(Callback):
    """Counts, and keeps the best score, as many callbacks do."""

    def __init__(self):
        self.count, self.best = 0, torch.tensor(0.0)

    def on_train_batch_end(self, trainer, pl_module, *args):
        self.count += 1

    def state_dict(self):
        return {"count": self.count, "best": self.best, "file": None, "kind": "max"} if self.count else {}

    def load_state_dict(self, state_dict):
        self.count = state_dict["count"]


def named(folder):
    """What the statement of a folder names as outside the guarantee."""
    return json.loads((folder / "privacy_statement.json").read_text())["unprotected"]


def test_the_statement_names_the_states_of_users_callbacks(tmp_path, capsys):
    every = ModelCheckpoint(tmp_path, every_n_epochs=1, save_top_k=-1)
    stop = EarlyStopping("val_loss", strict=False)
    run = trainer(tmp_path, privacy(), Scores(), every, stop, enable_checkpointing=True, max_epochs=2)
    run.fit(Plain(), loader())
    expected = ["state of Scores in checkpoints", "train_loss"]
    assert named(tmp_path) == expected
    assert "outside the guarantee: state of Scores in checkpoints, train_loss" in capsys.readouterr().out
    assert "`state of Scores in checkpoints`, `train_loss`" in (tmp_path / "privacy_statement.md").read_text()
    for path in tmp_path.glob("*.ckpt"):
        checkpoint = torch.load(path, weights_only=True)
        assert list(SavedRun.read(checkpoint).statement.unprotected) == expected
    # a run that goes on without the callback still says it: the earlier checkpoints are there
    again = trainer(tmp_path / "again", privacy(), max_epochs=3)
    again.fit(Plain(), loader(), ckpt_path=next(tmp_path.glob("*epoch=1*.ckpt")))
    assert named(tmp_path / "again") == expected


def test_an_empty_state_and_a_run_without_checkpoints_name_nothing(tmp_path):
    class Empty(Scores):
        def state_dict(self):
            return {}

    end = ModelCheckpoint(tmp_path)
    trainer(tmp_path, privacy(), Empty(), end, enable_checkpointing=True, max_epochs=1).fit(Plain(), loader())
    trainer(tmp_path / "none", privacy(), Scores(), max_epochs=1).fit(Plain(), loader())
    assert named(tmp_path) == named(tmp_path / "none") == ["train_loss"]


def test_a_checkpoint_behind_the_end_of_the_fit_is_named_in_its_statement(tmp_path):
    checkpoint = saved(tmp_path, Plain(), Scores())
    assert (
        list(SavedRun.read(checkpoint).statement.unprotected)
        == named(tmp_path)
        == ["state of Scores in checkpoints", "train_loss"]
    )


def test_a_weights_only_checkpoint_is_looked_at(tmp_path):
    class Puts(Plain):
        def on_save_checkpoint(self, checkpoint):
            checkpoint["note"] = "by me"

    run = trainer(tmp_path, privacy(), max_epochs=1)
    run.fit(Puts(), loader())
    run.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert named(tmp_path) == ["entry 'note' in checkpoints", "train_loss"]


class Rate:
    def __init__(self):
        self.seen = [1.0]

    def __call__(self, epoch):
        return 1.0


class Steps(StepLR):
    """A schedule of the user's."""


def public(optimizer):
    steps = StepLR(optimizer, 1)
    return SequentialLR(optimizer, [steps, LambdaLR(optimizer, lambda epoch: 0.5)], milestones=[2])


@pytest.mark.parametrize(
    ("schedule", "name"),
    [
        (public, None),
        (lambda optimizer: Steps(optimizer, 1), "Steps"),
        (lambda optimizer: LambdaLR(optimizer, Rate()), "LambdaLR"),
        (lambda optimizer: SequentialLR(optimizer, [Steps(optimizer, 1)], milestones=[]), "SequentialLR"),
    ],
)
def test_schedules_of_the_users_are_named(tmp_path, schedule, name):
    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [schedule(optimizer)]

    saved(tmp_path, Scheduled())
    assert named(tmp_path) == [*([f"state of {name} in checkpoints"] if name else []), "train_loss"]


def test_what_a_schedule_holds_is_refused_too(tmp_path):
    class Scheduled(Plain):
        def configure_optimizers(self):
            optimizer, rate = super().configure_optimizers(), Rate()
            rate.seen = ROWS
            return [optimizer], [LambdaLR(optimizer, rate)]

    with pytest.raises(ModelError, match=r"an array at lr_schedulers\[0\]\['lr_lambdas'\]\[0\]\['seen'\]"):
        saved(tmp_path, Scheduled())


class Extra(nn.Linear):
    """State that a module saves beside its tensors."""

    def __init__(self, state):
        super().__init__(5, 3)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


def test_of_a_view_only_its_own_numbers_are_written(tmp_path):
    module = Plain()
    module.register_buffer("first", ROWS[:2])
    state = saved(tmp_path, module)["state_dict"]
    assert torch.equal(state["first"], ROWS[:2])
    assert state["first"].untyped_storage().nbytes() == 2 * 5 * 4


def test_extra_state_of_a_module_is_looked_at(tmp_path):
    saved(tmp_path, Plain(Extra({"version": 2})))
    assert named(tmp_path) == ["entry 'net._extra_state' in checkpoints", "train_loss"]
    for state in (ROWS, ROWS.repeat(5, 1).tolist(), Holder(ROWS)):
        with pytest.raises(ModelError, match=r"at state_dict\['net._extra_state'\]"):
            saved(tmp_path, Plain(Extra(state)))


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


@pytest.mark.parametrize(
    ("put", "names"),
    [
        (lambda module, checkpoint: checkpoint.update(note="by me"), ["entry 'note' in checkpoints"]),
        (lambda module, checkpoint: checkpoint.update(note={}), []),
        (
            lambda module, checkpoint: checkpoint["hyper_parameters"].update(twice=0.1234567),
            ["entry 'hyper_parameters' in checkpoints"],
        ),
        (
            lambda module, checkpoint: checkpoint["callbacks"].update(other={"a": 0.1234567}),
            ["state of other in checkpoints"],
        ),
        (lambda module, checkpoint: None, []),
    ],
)
def test_the_statement_names_entries_of_hooks(tmp_path, put, names):
    class Puts(Plain):
        def __init__(self, width=3):
            super().__init__()
            self.save_hyperparameters()

        def on_save_checkpoint(self, checkpoint):
            put(self, checkpoint)

    assert (
        list(SavedRun.read(saved(tmp_path, Puts())).statement.unprotected) == named(tmp_path) == [*names, "train_loss"]
    )


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


class Given(Plain):
    def __init__(self, given, width=3):
        super().__init__()
        self.save_hyperparameters()


NO_SETTINGS = {
    **HOLDERS,
    "a tensor of one number": (torch.tensor(1.0), "an array"),
    "many numbers": (ROWS.tolist(), "more than 2,000 values in all"),
    "many numbers in several": (
        [{"rows": ROWS[:300].tolist()}, {"rows": ROWS[300:].tolist()}],
        "more than 2,000 values in all",
    ),
    "a long text": (str(ROWS.repeat(50, 1).tolist()), "more than 600,000 characters"),
}


@pytest.mark.parametrize("case", NO_SETTINGS)
def test_hyperparameters_that_are_no_settings_are_refused_before_the_start(tmp_path, case):
    value, words = NO_SETTINGS[case]
    for given in (value, {"deep": [value]}):
        module = Given(1)
        module.hparams.given = given  # save_hyperparameters leaves out what cannot be pickled
        with pytest.raises(ConfigurationError, match=rf"given.* of Given holds {words}.*ignore=\['given'\]"):
            trainer(tmp_path, privacy()).fit(module, loader())


def test_hyperparameters_that_setup_saves_and_those_of_a_datamodule_are_refused(tmp_path):
    class Late(Plain):
        def setup(self, stage):
            self.save_hyperparameters({"rows": ROWS.tolist()})

    class Data(pl.LightningDataModule):
        def __init__(self, dataset):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            return loader()

    with pytest.raises(ConfigurationError, match="rows of Late holds more than 2,000 values"):
        trainer(tmp_path, privacy()).fit(Late(), loader())
    with pytest.raises(ConfigurationError, match="dataset of Data holds an object of type TensorDataset"):
        trainer(tmp_path, privacy()).fit(Plain(), datamodule=Data(examples()))


SETTINGS = {
    "plain": [None, True, 1, 0.5, 1j, "text", np.float64(0.5), np.float32(0.5), np.int64(3), np.bool_(True)],
    "of C": [np.longlong(1), np.ulonglong(1)],
    "of torch": [torch.float32, torch.device("cpu"), torch.Size([3, 32, 32])],
    "paths": [Path("data"), PureWindowsPath("data")],
    "dicts": OrderedDict(lr={"warmup": [1, 2]}, counts=Counter("aab"), sizes={(1, 2)}),
    "mean and std": {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    "weights of the classes of ImageNet": [0.1] * 1000,
    # The lemmas of its 21,841 classes have 23 characters in the mean.
    "classes of ImageNet-21k": [f"{number:023}" for number in range(21_841)],
}


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_are_hyperparameters(tmp_path, case):
    folder = ModelCheckpoint(tmp_path)
    run = trainer(tmp_path, privacy(), folder, enable_checkpointing=True, max_epochs=1)
    run.fit(Given(SETTINGS[case]), loader())
    assert "given" in run.lightning_module.hparams
    assert named(tmp_path) == ["train_loss"]
    (checkpoint,) = tmp_path.glob("*.ckpt")
    trainer(tmp_path, privacy(), max_epochs=2).fit(Given(SETTINGS[case]), loader(), ckpt_path=checkpoint)
    assert PrivateCheckpointIO().load_checkpoint(checkpoint)["hyper_parameters"]["given"] == SETTINGS[case]


def test_what_the_command_line_saves_is_settings(tmp_path):
    class Images(pl.LightningDataModule):
        def __init__(self, names: list[str] | None = None):
            super().__init__()
            self.save_hyperparameters()

        def train_dataloader(self):
            images = torch.randn(N_IMAGES, 1, 8, 8, generator=torch.Generator().manual_seed(0))
            return loader(torch.utils.data.TensorDataset(images, torch.arange(N_IMAGES) % 3))

    options = {"accelerator": "cpu", "devices": 1, "logger": False, "max_epochs": 1, "enable_model_summary": False}
    cli = LightningCLI(
        SmallCNNModule,
        Images,
        subclass_mode_model=True,
        run=False,
        save_config_callback=None,
        trainer_defaults={**options, "default_root_dir": str(tmp_path), "enable_progress_bar": False},
        args={
            "model": {
                "class_path": "dp_lightning.lightning_modules.SmallCNNModule",
                "init_args": {"num_classes": 3, "in_channels": 1},
            },
            "data": {"names": ["a", "b"]},
            "trainer": {
                "callbacks": [{"class_path": f"{PrivacyCallback.__module__}.PrivacyCallback", "init_args": RDP}]
            },
        },
    )
    cli.trainer.fit(cli.model, cli.datamodule)
    assert {"_instantiator", "_class_path"} <= cli.model.hparams.keys()
    assert named(tmp_path) == ["unprotected/train_loss"]


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
