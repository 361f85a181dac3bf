"""The signal-to-noise ratio that a run logs, against the gradients that it has released."""

import json
import math

import lightning.pytorch as pl
import pytest
import torch
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.callbacks import PostProcessCallback, SignalToNoise
from dp_lightning.postprocess import Scale


class Released(pl.Callback):
    """Keeps the squared norms of every privatized gradient, and what was logged at each epoch's end."""

    def __init__(self):
        self.squared, self.logged = [], []
        self.by_parameter = {}

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        norms = {name: float(p.grad.square().sum()) for name, p in pl_module.named_parameters()}
        self.squared.append(sum(norms.values()))
        for name, norm in norms.items():
            self.by_parameter.setdefault(name, []).append(norm)

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


def recorded(folder):
    return json.loads((folder / "snr.json").read_text())


def test_the_file_has_the_ratio_of_each_parameter_in_each_epoch(tmp_path):
    callback, meter, released = privacy(), SignalToNoise(), Released()
    halved = PostProcessCallback([Scale(factor=0.5)])
    module = Plain()
    trainer(tmp_path, callback, meter, released, halved).fit(module, loader())
    found = recorded(tmp_path)
    assert (found["steps"], found["snr"]) == ([3, 3, 3], meter.curve)
    assert list(found["by_parameter"]) == [name for name, _ in module.named_parameters()]
    level = callback.plan.noise_multiplier * callback.clip_plan.sensitivity / 20
    for name, parameter in module.named_parameters():
        fact, squared = found["by_parameter"][name], released.by_parameter[name]
        assert fact["size"] == parameter.numel()
        means = [sum(squared[k : k + 3]) / 3 / (level**2 * parameter.numel()) - 1 for k in (0, 3, 6)]
        assert fact["snr"] == pytest.approx([math.sqrt(max(0.0, mean)) for mean in means], abs=1e-4)
    # The whole is the mean of its parts by their sizes.
    sizes = [fact["size"] for fact in found["by_parameter"].values()]
    squares = [[sum(released.by_parameter[n][k : k + 3]) for n in found["by_parameter"]] for k in (0, 3, 6)]
    wholes = [sum(parts) / 3 / (level**2 * sum(sizes)) - 1 for parts in squares]
    assert found["snr"] == pytest.approx([math.sqrt(max(0.0, whole)) for whole in wholes], abs=1e-4)


def test_it_is_no_number_outside_of_the_guarantee(tmp_path):
    callback = privacy()
    run = trainer(tmp_path, callback, SignalToNoise())
    run.fit(Plain(), loader())
    assert callback.statement().unprotected == ("train_loss",)


def test_a_run_without_noise_has_none(tmp_path):
    meter = SignalToNoise()
    trainer(tmp_path, privacy(noise_multiplier=0.0, not_private=True), meter).fit(Plain(), loader())
    assert meter.curve == []
    assert not (tmp_path / "snr.json").exists()


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

    def same(found, expected):
        assert (found["steps"], found["snr"]) == (expected["steps"], pytest.approx(expected["snr"]))
        for name, fact in expected["by_parameter"].items():
            assert found["by_parameter"][name] == {**fact, "snr": pytest.approx(fact["snr"], abs=1e-3)}

    same(recorded(tmp_path / "left"), recorded(tmp_path / "whole"))
