"""The moving average of the weights: against its recursion, evaluated, kept in checkpoints and named by statements."""

import json
import logging
import os
import signal
import warnings
from contextlib import nullcontext

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import CLASSES, Plain, Stop, examples, held_out, loader, privacy, trainer
from torch import nn
from torch.nn import functional as F

from dp_lightning.callbacks import AveragedWeights, StopOnSignal
from dp_lightning.commands.verify import verify
from dp_lightning.errors import ConfigurationError


class Watched(Plain):
    """Has a layer that its setup makes, a frozen one and a buffer that counts; keeps the weights of each step."""

    def setup(self, stage):
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.net[0].bias.requires_grad_(False)
        self.register_buffer("places", torch.tensor([7, 3, 9]))
        self.seen = []

    def on_before_optimizer_step(self, optimizer):
        self.places += 1

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append({name: p.detach().clone() for name, p in self.named_parameters()})

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def test_step(self, batch):
        self.log("test/loss", F.cross_entropy(self.net(batch[0]), batch[1]))

    def predict_step(self, batch):
        return self.net(batch[0])


def run(folder, *callbacks, ckpt_path=None, decay=0.9, **kwargs):
    private = privacy(reproducible=True, max_physical_batch_size=3)
    used, module = trainer(folder, private, AveragedWeights(decay), *callbacks, **kwargs), Watched()
    used.fit(module, loader(), held_out(), ckpt_path=ckpt_path)
    return used, module


def require_average(found, steps, decay=0.9):
    """That these weights are the average of the recursion over the weights of each step."""
    first, *others = [{name: value.double() for name, value in weights.items()} for weights in steps]
    for t, weights in enumerate(others, start=1):
        d = min(decay, (1 + t) / (10 + t))
        first = {name: d * value + (1 - d) * weights[name] for name, value in first.items()}
    for name, value in first.items():
        # Some rounding of float32 for each step.
        torch.testing.assert_close(found[name].double(), value, rtol=1e-6, atol=1e-7)


def every_step(folder):
    return ModelCheckpoint(folder / "steps", filename="{step}", save_top_k=-1, every_n_train_steps=1)


def saved(path):
    return torch.load(path, weights_only=True)


def require_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize("decay", [0.0, 0.99])
def test_the_average_follows_its_recursion_and_takes_the_place_of_the_weights(tmp_path, decay):
    used, module = run(tmp_path, every_step(tmp_path), decay=decay, enable_checkpointing=True)
    assert used.global_step == len(module.seen) == 9
    for step in range(1, 10):
        checkpoint = saved(tmp_path / "steps" / f"step={step}.ckpt")
        require_average(checkpoint["state_dict"], module.seen[:step], decay)
        require_equal({name: checkpoint["current_model_state"][name] for name in module.seen[0]}, module.seen[step - 1])
        # Buffers, and what is frozen, are the module's own.
        for name in ("net.0.bias", "places"):
            assert torch.equal(checkpoint["state_dict"][name], checkpoint["current_model_state"][name])
    require_equal(dict(module.named_parameters()), {name: checkpoint["state_dict"][name] for name in module.seen[0]})
    x, y = examples(30, seed=1).tensors
    loss = float(F.cross_entropy(module.net(x), y).detach())
    assert float(used.callback_metrics["val/loss"]) == pytest.approx(loss, rel=1e-5)
    module.load_state_dict(checkpoint["current_model_state"])
    assert (loss == pytest.approx(float(F.cross_entropy(module.net(x), y).detach()), rel=1e-4)) == (decay == 0)


def test_training_itself_does_not_change_and_a_run_that_resumes_continues_weights_and_average(tmp_path):
    kept = {"enable_checkpointing": True}
    _, averaged = run(tmp_path / "whole", every_step(tmp_path / "whole"), **kept)
    for one, other in zip(averaged.seen, run(tmp_path, decay=None)[1].seen, strict=True):
        require_equal(one, other)
    cut, end = tmp_path / "cut", tmp_path / "end.ckpt"
    with pytest.raises(RuntimeError, match="stopped"):
        run(cut, every_step(cut), Stop(5), **kept)
    used, _ = run(cut, every_step(cut), ckpt_path=cut / "steps" / "step=5.ckpt", max_epochs=2, **kept)
    used.save_checkpoint(end)  # with the weights too, though the module has the average
    run(cut, every_step(cut), ckpt_path=end, **kept)
    for step in (6, 9):
        one, other = (saved(folder / "steps" / f"step={step}.ckpt") for folder in (tmp_path / "whole", cut))
        for part in ("state_dict", "current_model_state", "averaging_state"):
            require_equal(one[part], other[part])


def test_an_average_that_starts_late_starts_at_the_checkpoint(tmp_path):
    used, _ = run(tmp_path, decay=None, max_epochs=2)
    used.save_checkpoint(tmp_path / "two.ckpt")
    assert "current_model_state" not in saved(tmp_path / "two.ckpt")
    _, late = run(tmp_path, ckpt_path=tmp_path / "two.ckpt")
    require_average(dict(late.named_parameters()), late.seen)


@pytest.mark.parametrize("ends", ["by itself", "by a signal", "in a validation"])
def test_statements_are_of_the_average(tmp_path, ends):
    class End(pl.Callback):
        def on_train_batch_start(self, trainer, *args):
            if ends == "by a signal" and trainer.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_validation_batch_end(self, *args):
            if ends == "in a validation":
                raise KeyboardInterrupt

    checkpoint = ModelCheckpoint(tmp_path / "steps", save_on_exception=True, save_on_train_epoch_end=True)
    settings = {"enable_checkpointing": True, "check_val_every_n_epoch": 2, "num_sanity_val_steps": 0}
    with nullcontext() if ends == "by itself" else pytest.raises(SystemExit):
        run(tmp_path, checkpoint, End(), StopOnSignal(), **settings)
    steps = {"by itself": 9, "by a signal": 5, "in a validation": 6}[ends]
    found = [saved(path) for path in (tmp_path / "steps").glob("*.ckpt")]
    newest = [one for one in found if one["global_step"] == steps]
    assert newest
    assert all(one["averaging_state"]["n_averaged"] == steps for one in newest)
    assert not [finding for finding in verify(tmp_path) if finding[1] is not None]
    (path,) = tmp_path.glob("privacy_runs/*/privacy_statement.json")
    assert json.loads(path.read_text())["postprocessing"] == "moving average of the weights (decay 0.9)"


def test_a_checkpoint_is_evaluated_as_it_is_and_without_a_word(tmp_path, caplog):
    used, module = run(tmp_path)
    path, expected = tmp_path / "end.ckpt", module.net(examples(30, seed=1).tensors[0])
    used.save_checkpoint(path)
    how = {"ckpt_path": path, "weights_only": True}
    other = trainer(tmp_path, privacy(), AveragedWeights(0.9))
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        for which in (used, other):
            tested, validated = (
                evaluate(Watched(), held_out(), **how, verbose=False)[0] for evaluate in (which.test, which.validate)
            )
            assert tested["test/loss"] == validated["val/loss"]
            (predicted,) = which.predict(Watched(), held_out(), **how)
            torch.testing.assert_close(predicted, expected.detach())
        used.save_checkpoint(path)  # outside of a fit
        assert other.test(Watched(), held_out(), **how, verbose=False)[0] == tested
    assert "verag" not in caplog.text + "".join(str(one.message) for one in warned)


@pytest.mark.parametrize("decay", [1.0, float("nan")])
def test_a_decay_out_of_range_is_refused(decay):
    with pytest.raises(ConfigurationError, match=r"averaging\.decay is"):
        AveragedWeights(decay)


def test_it_works_without_privacy_too(tmp_path):
    used, module = trainer(tmp_path, AveragedWeights(0.9), max_epochs=1), Watched()
    used.fit(module, loader(), held_out())
    require_average(dict(module.named_parameters()), module.seen)
