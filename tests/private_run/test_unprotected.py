"""What is logged while training is named in the statement, and nothing is chosen by it."""

import json
import math
import re
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import N, Plain, examples, held_out, loader, parameters_after, privacy, trainer, without_noise, written
from torch.nn import functional as F

from dp_lightning.callbacks import ResultFile, SignalToNoise
from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy import PoissonSampler
from dp_lightning.privacy.sampling import sampling_key


class Evaluated(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("test/accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean())


def result_of(callback):
    return json.loads((callback.private_run.folder / "result.json").read_text())


def test_the_result_file_names_the_best_for_what_it_is(tmp_path):
    callback, record, meter = privacy(), ResultFile(), SignalToNoise()
    trainer(tmp_path, callback, meter, record).fit(Evaluated(), loader(), held_out())
    result = result_of(callback)
    assert (result["num_steps"], result["completed"]) == (9, True)
    assert result["evaluated_after_steps"] == [3, 6, 9]
    assert len(result["test_accuracy_curve"]) == 3
    assert (result["snr_first_epoch"], result["snr_last_epoch"]) == (meter.curve[0], meter.curve[-1])
    # A run that goes on has the evaluations of its first part too.
    again = ResultFile()
    again.load_state_dict(record.state_dict())
    assert list(again.state_dict()["evaluations"]) == [3, 6, 9]
    assert 0 <= result["test_accuracy_last"] <= result["test_accuracy_best"] <= 1
    assert result["epsilon"] > 0
    assert result["seconds"] > 0


@pytest.mark.parametrize(("every", "evaluated"), [(1, [3, 6, 8]), (3, [8])])
def test_the_last_step_is_evaluated_though_its_epoch_is_not_over(tmp_path, every, evaluated):
    run = trainer(tmp_path, callback := privacy(), ResultFile(), max_steps=8, check_val_every_n_epoch=every)
    run.fit(Evaluated(), loader(), held_out())
    assert (result_of(callback)["completed"], result_of(callback)["evaluated_after_steps"]) == (True, evaluated)


class Scored(Plain):
    """Logs the loss under a name that does not tell where it comes from."""

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("score", loss, on_step=True, on_epoch=True)
        return loss


@pytest.mark.parametrize("monitor", ["train_loss", "score", "score_epoch"])
def test_choosing_by_any_value_logged_while_training_is_refused(tmp_path, monitor):
    stop = pl.callbacks.EarlyStopping(monitor, check_on_train_epoch_end=True)
    with pytest.raises(ConfigurationError, match=f"EarlyStopping.monitor is '{monitor}'"):
        trainer(tmp_path, privacy(), stop).fit(Scored(), loader())


class LogsLate(Plain):
    """Logs what the examples have given when the epoch is over."""

    def on_train_epoch_end(self):
        self.log("late", 1.0)


def test_choosing_by_a_value_logged_after_the_epoch_is_refused_before_a_checkpoint_is_left(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="late", save_on_train_epoch_end=True)
    with pytest.raises(ConfigurationError, match=r"ModelCheckpoint.monitor is 'late'"):
        trainer(tmp_path, privacy(), best, max_epochs=1, enable_checkpointing=True).fit(LogsLate(), loader())
    assert not list(tmp_path.rglob("*.ckpt"))


def test_the_statement_names_a_value_logged_after_the_last_epoch(tmp_path):
    trainer(tmp_path, callback := privacy(), max_epochs=1).fit(LogsLate(), loader())
    assert written(callback)["unprotected"] == ["late", "train_loss"]


def test_a_name_logged_after_the_epoch_survives_a_resume(tmp_path):
    class Once(LogsLate):
        def on_train_epoch_end(self):
            if self.current_epoch == 0:
                super().on_train_epoch_end()

    each = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    trainer(tmp_path, privacy(), each, max_epochs=1, enable_checkpointing=True).fit(Once(), loader())
    again = privacy()
    run = trainer(tmp_path, again, max_epochs=2)
    run.fit(Once(), loader(), ckpt_path=tmp_path / "epoch=0.ckpt", weights_only=True)
    assert again.statement().unprotected == ("late", "train_loss")


def test_a_learning_rate_by_a_training_metric_is_refused(tmp_path):
    class Plateau(Scored):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "score_epoch"}}

    with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau.monitor"):
        trainer(tmp_path, privacy()).fit(Plateau(), loader())


@pytest.mark.parametrize(
    ("template", "refused"),
    [
        ("{epoch}-{train_loss:.4f}", "train_loss"),
        ("{score:.4f}", "score"),
        ("last {score}", "score"),
        ("{epoch}-{step}", None),
        ("{val/loss:.2f}", None),
    ],
)
def test_a_file_name_with_a_training_number_is_refused(tmp_path, template, refused):
    named = ModelCheckpoint(tmp_path, filename=template, save_on_train_epoch_end=True)
    if template.startswith("last"):
        named = ModelCheckpoint(tmp_path, save_last=True, save_on_train_epoch_end=True)
        named.CHECKPOINT_NAME_LAST = template
    run = trainer(tmp_path, privacy(), named, max_epochs=1, enable_checkpointing=True)
    words = rf"filename of ModelCheckpoint has \{{{refused}\}}.*Take it out"
    with nullcontext() if refused is None else pytest.raises(ConfigurationError, match=words):
        run.fit(Scored(), loader())
    assert bool(list(tmp_path.rglob("*.ckpt"))) == (refused is None)


def test_a_non_finite_example_does_not_stop_the_run_and_is_reported(tmp_path):
    data = examples()
    data.tensors[0][:2] = math.nan
    callback = without_noise()
    with pytest.warns(UserWarning, match=r"not finite in epoch \d: \d") as warned:
        assert parameters_after(tmp_path, callback, dataset=data).isfinite().all()
    found = [re.search(r"not finite in epoch \d: (\d)", str(warning.message)) for warning in warned]
    reported = sum(int(match[1]) for match in found if match)
    sampler = PoissonSampler(num_train=N, sample_rate=20 / N, key=sampling_key(0))
    assert reported == sum(int((sampler.draw(step) < 2).sum()) for step in range(9)) > 0
    assert "unprotected/non_finite_gradients" in callback.statement().unprotected
