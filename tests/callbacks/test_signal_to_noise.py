"""The signal-to-noise ratio that a run logs, against the gradients that it has released."""

import json
import math

import lightning.pytorch as pl
import pytest
import torch
from plain_run import Plain, Stop, loader, privacy, trainer, without_noise

from dp_lightning.callbacks import PostProcessCallback, SignalToNoise
from dp_lightning.postprocess import Scale
from dp_lightning.privacy.bands import deviations
from dp_lightning.privacy.schedules import Schedule


class Released(pl.Callback):
    """Keeps the squared norms of every privatized gradient, and what was logged at each epoch's end."""

    def __init__(self):
        self.squared, self.logged = {}, []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        for name, p in pl_module.named_parameters():
            self.squared.setdefault(name, []).append(float(p.grad.square().sum()))

    def on_train_epoch_start(self, trainer, pl_module):
        if "privacy/snr" in trainer.callback_metrics:
            self.logged.append(float(trainer.callback_metrics["privacy/snr"]))


def recorded(callback):
    return json.loads((callback.private_run.folder / "snr.json").read_text())


@pytest.mark.parametrize("settings", [{}, {"bands": 3, "noise_schedule": Schedule("linear", 0.5)}], ids=str)
def test_each_epoch_logs_and_records_the_ratio_of_its_own_steps_whole_and_by_parameter(tmp_path, settings):
    callback, meter, released, module = privacy(**settings), SignalToNoise(), Released(), Plain()
    halved = PostProcessCallback([Scale(factor=0.5)])  # what the transforms make of the gradient is not measured
    run = trainer(tmp_path, callback, meter, released, halved)
    run.fit(module, loader())
    plan, factors = callback.plan, deviations(callback.private_run.step.noise.coefficients, 9)
    levels = [plan.noise_at(1.0, step - step % plan.bands) * factors[step] / 20 for step in range(9)]

    def ratios(squared, size):
        """Per epoch of three steps."""
        relative = [each / level**2 / size for each, level in zip(squared, levels, strict=True)]
        means = [sum(relative[k : k + 3]) / 3 - 1 for k in (0, 3, 6)]
        return [math.sqrt(max(0.0, mean)) for mean in means]

    sizes = {name: parameter.numel() for name, parameter in module.named_parameters()}
    expected = ratios([sum(each) for each in zip(*released.squared.values(), strict=True)], sum(sizes.values()))
    assert meter.curve == pytest.approx(expected)
    assert released.logged == pytest.approx(expected[:2])
    assert float(run.callback_metrics["privacy/snr"]) == pytest.approx(expected[2])
    found = recorded(callback)
    assert (found["steps"], found["snr"]) == ([3, 3, 3], meter.curve)
    assert list(found["by_parameter"]) == list(sizes)
    for name, fact in found["by_parameter"].items():
        assert fact["size"] == sizes[name]
        assert fact["snr"] == pytest.approx(ratios(released.squared[name], sizes[name]), abs=1e-4)
    # It is no number outside of the guarantee.
    assert callback.statement().unprotected == ("train_loss",)


def test_a_run_without_noise_has_none(tmp_path):
    meter = SignalToNoise()
    trainer(tmp_path, callback := without_noise(bands=3), meter).fit(Plain(), loader())
    assert meter.curve == []
    assert not (callback.private_run.folder / "snr.json").exists()


def test_a_run_that_goes_on_in_the_middle_of_an_epoch_ends_with_the_same_curve(tmp_path):
    class Leaves(Stop):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == self.step:
                trainer.save_checkpoint(tmp_path / "run.ckpt")

    def fit(*callbacks, **kwargs):
        torch.manual_seed(0)
        trainer(tmp_path, callback := privacy(reproducible=True), SignalToNoise(), *callbacks).fit(
            Plain(), loader(), **kwargs
        )
        return recorded(callback)

    whole = fit()
    with pytest.raises(RuntimeError, match="stopped"):
        fit(Leaves(5))
    resumed = fit(ckpt_path=tmp_path / "run.ckpt")
    assert (resumed["steps"], resumed["snr"]) == (whole["steps"], pytest.approx(whole["snr"]))
    for name, fact in whole["by_parameter"].items():
        assert resumed["by_parameter"][name] == {**fact, "snr": pytest.approx(fact["snr"], abs=1e-3)}
