"""Numbers logged while training reach loggers and the progress bar; other code cannot follow them."""

import csv

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger, Logger
from plain_run import Plain, loader, privacy, trainer
from torch.nn import functional as F

from dp_lightning.callbacks.withheld import Withheld
from dp_lightning.errors import ModelError


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


def test_loggers_and_the_progress_bar_get_the_numbers(tmp_path):
    keeps, bar = Keeps(), Bar()
    settings = {"logger": [keeps, CSVLogger(tmp_path)], "log_every_n_steps": 1, "enable_progress_bar": True}
    run = trainer(tmp_path, privacy(), bar, LearningRateMonitor("step"), max_epochs=2, **settings)
    run.fit(Logs(), loader(), loader())
    losses = [found["train_loss_step"] for found in keeps.found if "train_loss_step" in found]
    assert len(losses) == 6
    assert all(type(loss) is float for loss in losses)
    with open(tmp_path / "lightning_logs" / "version_0" / "metrics.csv") as file:
        assert [float(row["train_loss_step"]) for row in csv.DictReader(file) if row["train_loss_step"]] == losses
    assert f"train_loss_step={losses[-1]:.3g}" in bar.texts[-1]


def test_hooks_read_validation_metrics_and_names_only(tmp_path):
    seen = []

    class Reads(Logs):
        def on_validation_epoch_end(self):
            metrics = self.trainer.callback_metrics
            if not self.trainer.sanity_checking:
                seen.append((sorted(metrics), float(metrics["val_loss"]), type(metrics["train_loss"]), str(metrics)))

    run = trainer(tmp_path, privacy(), EarlyStopping("val_loss"), max_epochs=2)
    run.fit(Reads(), loader(), loader())
    names, value, kind, text = seen[-1]
    assert {"train_loss", "train_loss_step", "val_loss"} <= set(names)
    assert value > 0
    assert kind is Withheld
    assert "of raw training examples" in text


def test_after_the_fit_everything_can_be_read(tmp_path):
    keeps = Keeps()
    run = trainer(tmp_path, privacy(), max_epochs=1, logger=keeps, log_every_n_steps=1, enable_progress_bar=True)
    run.fit(Logs(), loader(), loader())
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
        trainer(tmp_path, privacy(), best, enable_checkpointing=True).fit(Logs(), loader(), loader())
        return best.best_model_path

    assert "val_loss=" in fit("{epoch}-{val_loss:.2f}", tmp_path / "a")
    with pytest.raises(ModelError, match="'train_loss'"):
        fit("{epoch}-{train_loss:.2f}", tmp_path / "b")
