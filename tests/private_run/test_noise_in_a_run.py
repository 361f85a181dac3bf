"""What the post-processing of a private run knows of its noise."""

import lightning.pytorch as pl
import pytest
import torch
from plain_run import Plain, flat, loader, parameters_after, privacy, trainer, without_noise, written
from torch import nn

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import (
    GatedOrthogonalize,
    Kalman,
    Momentum,
    NoiseNormalize,
    Orthogonalize,
    SelectiveOrthogonalize,
    SpectralShrinkage,
)


class Seen(pl.Callback):
    """Sizes of the gradients behind the chain, and what the chain says of their noise."""

    def __init__(self, chain):
        self.chain, self.measured, self.stated = chain, [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradient = pl_module.net[0].weight.grad
        self.measured.append(float(gradient.square().mean().sqrt()))
        self.stated.append(self.chain.noise["net.0.weight"])


def wide():
    return Plain(nn.Sequential(nn.Linear(5, 4000), nn.Tanh(), nn.Linear(4000, 3)), lr=0.0)


@pytest.mark.parametrize(
    ("clipping", "transforms"),
    [
        ("per_layer", []),
        ("flat", []),
        ("flat", [Kalman(process_to_measurement_ratio=1.5), Momentum(0.95, kind="ema_nesterov"), NoiseNormalize()]),
    ],
    ids=["per layer", "none", "filter-momentum-normalized"],
)
def test_the_noise_that_a_chain_states_is_that_of_the_run(tmp_path, clipping, transforms):
    # The noise outweighs the gradients, so what is measured is the noise.
    callback = privacy(noise_multiplier=500.0, max_grad_norm=0.3, clipping=clipping, expected_batch_size=12)
    post = PostProcessCallback([*transforms, Momentum(0.0, applies_to="vectors")])
    seen = Seen(post.chain)
    trainer(tmp_path, callback, post, seen, max_steps=12, max_epochs=-1).fit(wide(), loader())
    assert len(seen.stated) == 12
    if not transforms:
        sensitivity = callback.clip_plan.sensitivity
        assert seen.stated == pytest.approx([500.0 * sensitivity / 12] * 12)
    # Of 20,000 entries it is known to half a per cent.
    assert seen.measured == pytest.approx(seen.stated, rel=0.03)


def test_a_run_that_goes_on_knows_the_noise_of_its_past(tmp_path):
    def run(folder, *, checkpoint=None, **settings):
        post = PostProcessCallback([Momentum(0.9), NoiseNormalize(norm=0.1)])
        seen = Seen(post.chain)
        callback = privacy(reproducible=True)
        torch.manual_seed(0)
        fitted = trainer(folder, callback, post, seen, **settings)
        module = Plain()
        fitted.fit(module, loader(), ckpt_path=checkpoint, weights_only=True)
        return fitted, seen.stated, flat(module)

    _, whole, expected = run(tmp_path / "whole", max_epochs=4)
    half, first, _ = run(tmp_path / "half", max_epochs=2)
    half.save_checkpoint(tmp_path / "half" / "two.ckpt")
    _, second, actual = run(tmp_path / "half", checkpoint=tmp_path / "half" / "two.ckpt", max_epochs=4)
    assert first + second == whole
    assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("callback", "transforms", "message"),
    [
        (without_noise, [NoiseNormalize()], "there is none or it is not known"),
        (None, [SpectralShrinkage()], "Train with PrivacyCallback"),
        (privacy, [Orthogonalize(), SpectralShrinkage()], "before the transforms that are not linear"),
        (privacy, [Orthogonalize(include=["nett.*"])], r"no trained parameter's name matches nett"),
    ],
    ids=["no noise", "no known noise", "wrong order", "wrong name"],
)
def test_what_a_chain_cannot_do_is_refused_before_a_step(tmp_path, callback, transforms, message):
    module = Plain()
    before = flat(module)
    with pytest.raises(ConfigurationError, match=message):
        trainer(tmp_path, *([callback()] if callback else []), PostProcessCallback(transforms)).fit(module, loader())
    assert torch.equal(before, flat(module))


@pytest.mark.parametrize("transform", [SpectralShrinkage(), GatedOrthogonalize(), SelectiveOrthogonalize()])
def test_a_run_without_noise_is_all_signal(tmp_path, transform):
    assert parameters_after(tmp_path, without_noise(), PostProcessCallback([transform])).isfinite().all()


class Ends(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


def test_the_statement_names_the_transforms_once_however_often_it_fits(tmp_path):
    callback, post = privacy(), PostProcessCallback([Momentum(0.9), GatedOrthogonalize()])
    for others in ([Ends()], []):
        trainer(tmp_path, callback, post, *others).fit(Plain(), loader())
    assert written(callback)["num_steps"] == 9
    assert written(callback)["postprocessing"] == "Momentum, then GatedOrthogonalize"
