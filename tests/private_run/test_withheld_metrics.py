"""Numbers logged while training reach loggers and the progress bar; other code cannot follow them."""

import contextlib
import copy
import csv
import math
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger, Logger
from plain_run import Plain, held_out, loader, privacy, trainer
from torch.nn import functional as F
from torchmetrics import MeanMetric

from dp_lightning.errors import ModelError
from dp_lightning.private_run.withheld_metrics import Withheld, give_back, withhold


class Logs(Plain):
    """In training and in validation."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.net(batch[0]), batch[1]), prog_bar=True)


class Keeps(Logger):
    """Whatever it is given."""

    name, version = "keeps", 0

    def __init__(self):
        super().__init__()
        self.found = []

    def log_metrics(self, metrics, step=None):
        self.found.append(dict(metrics))

    def log_hyperparams(self, *args, **kwargs):
        pass


class Bar(TQDMProgressBar):
    """Keeps the text that it shows."""

    texts: list

    def on_train_batch_end(self, *args):
        super().on_train_batch_end(*args)
        self.texts = [*getattr(self, "texts", []), self.train_progress_bar.postfix]


class Formats(Bar):
    """Has items of its own."""

    def get_metrics(self, trainer, model):
        items = super().get_metrics(trainer, model)
        items["formatted"] = f"{items['train_loss_step']:.6f}" if "train_loss_step" in items else "none"
        items["of_the_trainer"] = float(trainer.callback_metrics.get("train_loss_step", 0.0))
        return items


class Rich(RichProgressBar):
    """Keeps what it shows."""

    found: list

    def _update_metrics(self, *args):
        super()._update_metrics(*args)
        self.found = [*getattr(self, "found", []), dict(self._metric_component._metrics)]


def test_loggers_and_the_progress_bar_get_the_numbers(tmp_path):
    keeps, bar = Keeps(), Bar()
    settings = {"logger": [keeps, CSVLogger(tmp_path)], "log_every_n_steps": 1, "enable_progress_bar": True}
    run = trainer(tmp_path, privacy(), bar, LearningRateMonitor("step"), max_epochs=2, **settings)
    run.fit(Logs(), loader(), held_out())
    losses = [found["train_loss_step"] for found in keeps.found if "train_loss_step" in found]
    assert len(losses) == 6
    assert all(type(loss) is float for loss in losses)
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        assert [float(row["train_loss_step"]) for row in csv.DictReader(file) if row["train_loss_step"]] == losses
    assert f"train_loss_step={losses[-1]:.3g}" in bar.texts[-1]


def test_a_progress_bar_with_items_of_its_own_reads_the_numbers(tmp_path):
    bar, keeps = Formats(), Keeps()
    settings = {"logger": keeps, "log_every_n_steps": 1, "enable_progress_bar": True}
    trainer(tmp_path, privacy(), bar, max_epochs=1, **settings).fit(Logs(), loader())
    last = [found["train_loss_step"] for found in keeps.found if "train_loss_step" in found][-1]
    assert f"formatted={last:.6f}" in bar.texts[-1]
    assert f"of_the_trainer={last:.3g}" in bar.texts[-1]


def test_a_rich_progress_bar_shows_the_numbers(tmp_path):
    bar, keeps = Rich(), Keeps()
    settings = {"logger": keeps, "log_every_n_steps": 1, "enable_progress_bar": True}
    trainer(tmp_path, privacy(), bar, max_epochs=1, **settings).fit(Logs(), loader())
    last = [found["train_loss_step"] for found in keeps.found if "train_loss_step" in found][-1]
    assert bar.found[-1]["train_loss_step"] == pytest.approx(last)


def test_the_progress_bar_keeps_its_own_method(tmp_path):
    own, bar, shown = Bar(), Bar(), []
    own.get_metrics = mine = lambda trainer, module: shown.append(trainer.progress_bar_metrics) or {}

    for progress_bar in (bar, own):
        run = trainer(tmp_path, privacy(), progress_bar, max_epochs=1, enable_progress_bar=True)
        run.fit(Logs(), loader())
    assert "get_metrics" not in vars(bar)
    assert own.get_metrics is mine
    assert isinstance(shown[-1]["train_loss_step"], float)

    class Fails(Logs):
        def on_train_epoch_end(self):
            assert "get_metrics" in vars(bar)
            raise RuntimeError("later")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="later"):
            trainer(tmp_path, privacy(), bar, enable_progress_bar=True).fit(Fails(), loader())
        assert "get_metrics" not in vars(bar)


def test_a_progress_bar_can_be_copied_while_numbers_are_withheld(tmp_path):
    run = trainer(tmp_path, bar := Bar(), enable_progress_bar=True)
    for _ in range(2):
        withhold(run)
        for found in (copy.deepcopy(bar), pickle.loads(pickle.dumps(bar))):
            assert vars(found)["get_metrics"]._get.__self__ is found
    give_back(run)
    assert "get_metrics" not in vars(bar)


@pytest.mark.parametrize("name", ["callback_metrics", "logged_metrics", "progress_bar_metrics"])
def test_no_text_has_a_number(tmp_path, name):
    class Parses(Logs):
        def on_train_batch_end(self, *args):
            value = getattr(self.trainer, name)["train_loss_step"]
            assert str(value) == repr(value) == "<train_loss_step: of raw training examples>"
            self.found = f"{getattr(self.trainer, name)}"

    module = Parses()
    trainer(tmp_path, privacy(), Bar(), max_epochs=1, enable_progress_bar=True).fit(module, loader())
    assert "train_loss_step: of raw" in module.found


@pytest.mark.parametrize(
    "use",
    [
        *(
            float,
            int,
            bool,
            complex,
            hash,
            bytes,
            list,
            len,
            iter,
            next,
            abs,
            round,
            math.isnan,
            math.floor,
            math.trunc,
        ),
        *(torch.isnan, torch.as_tensor, torch.tensor, np.isnan, np.asarray, np.mean, np.float64, "{}".format),
        *(lambda v: v // 1, lambda v: v % 1, lambda v: divmod(v, 1), lambda v: divmod(1, v), lambda v: 1 % v),
        *(lambda v: 1 // v, lambda v: 1 + v, lambda v: v**2, lambda v: -v, lambda v: v > 0, lambda v: v in [1.0]),
        *(lambda v: v.item(), lambda v: max(v, 1), lambda v: sum([v]), lambda v: f"{v:.2f}", lambda v: f"{v}"),
        *("{:.2f}".format, lambda v: torch.ones(2) + v, lambda v: torch.ones(2).add_(v), lambda v: np.ones(2) * v),
        *(lambda v: torch.stack([v]), lambda v: torch.ones(1).fill_(v), pickle.dumps, copy.copy),
    ],
)
def test_every_use_is_refused_by_name(use):
    with pytest.raises(ModelError, match="logged value 'loss'"):
        use(Withheld("loss", 1.5))


def test_hooks_read_validation_metrics_and_names_only(tmp_path):
    seen = []

    class Reads(Logs):
        def on_validation_epoch_end(self):
            metrics = self.trainer.callback_metrics
            if not self.trainer.sanity_checking:
                seen.append((sorted(metrics), float(metrics["val_loss"]), type(metrics["train_loss"]), str(metrics)))

    run = trainer(tmp_path, privacy(), EarlyStopping("val_loss"), max_epochs=2)
    run.fit(Reads(), loader(), held_out())
    names, value, kind, text = seen[-1]
    assert {"train_loss", "train_loss_step", "val_loss"} <= set(names)
    assert value > 0
    assert kind is Withheld
    assert "of raw training examples" in text


def test_after_the_fit_everything_can_be_read(tmp_path):
    keeps = Keeps()
    run = trainer(tmp_path, privacy(), max_epochs=1, logger=keeps, log_every_n_steps=1, enable_progress_bar=True)
    run.fit(Logs(), loader(), held_out())
    last = [found["train_loss_step"] for found in keeps.found if "train_loss_step" in found][-1]
    shown = (run.callback_metrics, run.logged_metrics, run.progress_bar_metrics)
    assert [float(metrics["train_loss_step"]) for metrics in shown] == pytest.approx([last] * 3)
    run.validate(run.lightning_module, loader(), verbose=False)
    assert torch.is_tensor(run.callback_metrics["val_loss"])


def test_an_error_gives_the_numbers_back(tmp_path):
    class Fails(Logs):
        def on_train_epoch_end(self):
            raise RuntimeError("later")

    run = trainer(tmp_path, privacy())
    with pytest.raises(RuntimeError, match="later"):
        run.fit(Fails(), loader())
    assert float(run.callback_metrics["train_loss_step"]) > 0


def test_no_file_name_has_one(tmp_path):
    def fit(name, folder):
        best = ModelCheckpoint(folder, filename=name, monitor="val_loss")
        trainer(tmp_path, privacy(), best, enable_checkpointing=True).fit(Logs(), loader(), held_out())
        return best.best_model_path

    assert "val_loss=" in fit("{epoch}-{val_loss:.2f}", tmp_path / "a")
    for name in ("{epoch}-{train_loss:.2f}", "{epoch}-{train_loss}"):
        with pytest.raises(ModelError, match=r"'train_loss'.*prog_bar=True.*validation metric"):
            fit(name, tmp_path / "b")


class ByHand(Logs):
    """Shows the mean of the training losses to whatever follows a metric."""

    def __init__(self):
        super().__init__()
        self.seen = MeanMetric()

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.seen.update(loss)
        return loss

    def on_train_epoch_end(self):
        self.trainer.callback_metrics["mine"] = self.seen.compute()
        self.trainer.callback_metrics.update(steps=7.0)


@pytest.mark.parametrize(
    "follower",
    [
        lambda folder: ModelCheckpoint(folder, filename="{mine:.8f}", save_on_train_epoch_end=True),
        lambda folder: ModelCheckpoint(folder, monitor="mine", save_on_train_epoch_end=True),
        lambda folder: EarlyStopping("mine", check_on_train_epoch_end=True),
    ],
)
def test_a_number_that_is_shown_by_hand_is_followed_by_nothing(tmp_path, follower):
    run = trainer(tmp_path, privacy(), follower(tmp_path), max_epochs=2, enable_checkpointing=True)
    with pytest.raises(ModelError, match="the logged value 'mine'"):
        run.fit(ByHand(), loader())
    assert not [path for path in tmp_path.rglob("*.ckpt") if "mine" in path.name]


class Flag(Logs):
    """Puts a number that it computes from examples where a setting of the optimizer has the same value."""

    def on_train_epoch_end(self):
        self.trainer.callback_metrics["low"] = torch.tensor(float(self.trainer.current_epoch > 0)) * 0.5


def test_a_number_with_the_value_of_a_setting_is_withheld_too(tmp_path):
    """The learning rate is 0.5, and many settings are 0."""
    keeps = {"logger": Keeps(), "log_every_n_steps": 1}
    stops = EarlyStopping("low", check_on_train_epoch_end=True)
    with pytest.raises(ModelError, match="the logged value 'low'"):
        trainer(tmp_path, privacy(), LearningRateMonitor("step"), stops, max_epochs=2, **keeps).fit(Flag(), loader())


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_fit_that_ends_by_an_error_saves_nothing_by_its_losses(tmp_path, error):
    class Fails(Logs):
        def on_train_batch_end(self, *args):
            if self.trainer.global_step == 2:
                raise error

    named = ModelCheckpoint(tmp_path, filename="{epoch}-{train_loss_step:.8f}", save_on_exception=True)
    run = trainer(tmp_path, privacy(), named, enable_checkpointing=True)
    with pytest.raises((ModelError, SystemExit)):
        run.fit(Fails(), loader())
    assert not list(tmp_path.rglob("*train_loss*"))


@pytest.mark.parametrize("hook", ["on_fit_end", "teardown", "on_exception"])
def test_the_last_hooks_of_a_fit_read_no_number(tmp_path, hook):
    seen = []

    class Ends(Callback):
        pass

    setattr(Ends, hook, lambda self, run, *args, **kwargs: seen.append(type(run.callback_metrics["train_loss"])))

    class Fails(Logs):
        def on_train_epoch_end(self):
            if hook == "on_exception":
                raise RuntimeError("later")

    run = trainer(tmp_path, privacy(), Ends(), max_epochs=1)
    with contextlib.suppress(RuntimeError):
        run.fit(Fails(), loader())
    assert seen == [Withheld]
    assert float(run.callback_metrics["train_loss_step"]) > 0


def test_a_run_after_the_fit_has_its_numbers(tmp_path):
    run = trainer(tmp_path, privacy(), max_epochs=1)
    run.fit(Logs(), loader())
    shown = []

    class Reads(Logs):
        def on_validation_end(self):
            self.trainer.callback_metrics["mine"] = torch.tensor(2.0)
            shown.append(float(self.trainer.callback_metrics["val_loss"]))

    run.validate(Reads(), loader())
    assert shown[0] > 0
    assert run.callback_metrics["mine"] == 2.0


def test_several_numbers_that_are_put_by_hand_harm_no_fit(tmp_path):
    class Puts(Logs):
        def on_train_epoch_end(self):
            self.trainer.progress_bar_metrics["each"] = torch.ones(3)

    run = trainer(tmp_path, privacy(), max_epochs=1)
    run.fit(Puts(), loader())
    assert run.progress_bar_metrics["each"].tolist() == [1.0, 1.0, 1.0]


def test_after_the_fit_a_number_that_was_shown_by_hand_can_be_read(tmp_path):
    run = trainer(tmp_path, privacy(), max_epochs=1)
    run.fit(ByHand(), loader())
    assert float(run.callback_metrics["mine"]) > 0
    assert run.callback_metrics["steps"] == 7.0


def test_a_file_name_may_have_the_learning_rate(tmp_path):
    named = ModelCheckpoint(tmp_path, filename="{lr-SGD:.3f}", save_on_train_epoch_end=True)
    keeps = {"logger": Keeps(), "log_every_n_steps": 1}
    trainer(tmp_path, privacy(), LearningRateMonitor("step"), named, enable_checkpointing=True, **keeps).fit(
        Logs(), loader()
    )
    assert [path.name for path in tmp_path.glob("*.ckpt")] == ["lr-SGD=0.500.ckpt"]
