"""The signal-to-noise ratio that a run logs, against the gradients that it has released."""

import math

import lightning.pytorch as pl
import pytest
import torch
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.callbacks import PostProcessCallback, SignalToNoise
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Scale


class Released(pl.Callback):
    """Keeps the squared norm of every privatized gradient, and what was logged at each epoch's end."""

    def __init__(self):
        self.squared, self.logged = [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.squared.append(sum(float(p.grad.square().sum()) for p in pl_module.parameters()))

    def on_train_epoch_start(self, trainer, pl_module):
        if "privacy/snr" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["privacy/snr"]))


def test_each_epoch_logs_the_ratio_of_its_own_steps(tmp_path):
    callback, meter, released = privacy(), SignalToNoise(), Released()
    # What the transforms make of the gradient is not measured.
    halved = PostProcessCallback([Scale(factor=0.5)])
    module = Plain()
    run = trainer(tmp_path, callback, meter, released, halved)
    run.fit(module, loader())
    d = sum(p.numel() for p in module.parameters())
    noise = (callback.plan.noise_multiplier * callback.clip_plan.sensitivity / 20) ** 2 * d
    assert len(released.squared) == 9
    expected = [math.sqrt(max(0.0, sum(released.squared[k : k + 3]) / 3 / noise - 1)) for k in (0, 3, 6)]
    assert meter.curve == pytest.approx(expected)
    assert released.logged == pytest.approx(expected[:2])
    assert float(run.callback_metrics["privacy/snr"]) == pytest.approx(expected[2])


def test_it_is_no_number_outside_of_the_guarantee(tmp_path):
    callback = privacy()
    run = trainer(tmp_path, callback, SignalToNoise())
    run.fit(Plain(), loader())
    assert callback.statement().unprotected == ("train_loss",)


def test_a_run_without_noise_has_none(tmp_path):
    meter = SignalToNoise()
    trainer(tmp_path, privacy(noise_multiplier=0.0, not_private=True), meter).fit(Plain(), loader())
    assert meter.curve == []


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_ends_with_the_same_curve(tmp_path):
    class Leaves(pl.Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 5:
                trainer.save_checkpoint(tmp_path / "run.ckpt")
                raise SystemExit

    def fit(folder, *callbacks, **kwargs):
        meter = SignalToNoise()
        torch.manual_seed(0)
        run = trainer(tmp_path / folder, privacy(reproducible=True), meter, *callbacks)
        try:
            run.fit(Plain(), loader(), **kwargs)
        except SystemExit:
            assert len(meter.curve) == 1
        return meter.curve

    whole = fit("whole")
    assert len(whole) == 3
    fit("left", Leaves())
    assert fit("left", ckpt_path=tmp_path / "run.ckpt") == pytest.approx(whole)


@pytest.mark.parametrize("before", [[], [PostProcessCallback([Scale(factor=0.5)])]])
def test_another_place_is_refused(tmp_path, before):
    callbacks = [*before, SignalToNoise()] if not before else [privacy(), *before, SignalToNoise()]
    with pytest.raises(ConfigurationError, match="right after PrivacyCallback"):
        trainer(tmp_path, *callbacks).fit(Plain(), loader())
