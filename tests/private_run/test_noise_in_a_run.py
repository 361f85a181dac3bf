"""What the post-processing of a private run knows of its noise."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, flat, loader, parameters_after, privacy, trainer, without_noise, written
from torch import nn

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.callbacks.privacy import private_run_of
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
from dp_lightning.privacy.bands import deviations


class Seen(pl.Callback):
    """Sizes of the gradients behind the chain, and what the chain says of their noise."""

    def __init__(self, chain):
        self.chain, self.measured, self.stated, self.known = chain, [], [], []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        gradient = pl_module.net[0].weight.grad
        if gradient is None:
            return
        self.measured.append(float(gradient.square().mean().sqrt()))
        self.stated.append(self.chain.noise["net.0.weight"])
        self.known.append(private_run_of(trainer).step.noise_deviation)  # in the privatized gradient


def wide():
    return Plain(nn.Sequential(nn.Linear(5, 4000), nn.Tanh(), nn.Linear(4000, 3)), lr=0.0)


FILTERED = [Kalman(process_to_measurement_ratio=1.5), Momentum(0.95, kind="ema_nesterov"), NoiseNormalize()]


@pytest.mark.parametrize(
    ("settings", "transforms"),
    [
        ({"clipping": "per_layer"}, []),
        ({}, []),
        ({}, FILTERED),
        ({"bands": 5}, []),
        ({"bands": 5, "frozen_until": {"net.0.weight": 0.25}}, FILTERED),
    ],
    ids=["per layer", "none", "filter-momentum-normalized", "correlated", "correlated-and-filtered"],
)
def test_the_noise_that_a_chain_states_is_that_of_the_run(tmp_path, settings, transforms):
    # The noise outweighs the gradients, so what is measured is the noise.
    module, bands, measured, stated = wide(), settings.get("bands", 1), [], []
    for steps in (8, 12):  # the second fit goes on, with noise that is correlated anew
        callback = privacy(noise_multiplier=500.0, max_grad_norm=0.3, expected_batch_size=12, **settings)
        post = PostProcessCallback([*copy.deepcopy(transforms), Momentum(0.0, applies_to="vectors")])
        seen = Seen(post.chain)
        writer = ModelCheckpoint(tmp_path / "saved", filename="last", save_top_k=1, every_n_train_steps=4)
        run = trainer(tmp_path, callback, post, seen, writer, max_steps=steps, max_epochs=-1, enable_checkpointing=True)
        run.fit(module, loader(), ckpt_path=None if steps == 8 else tmp_path / "saved" / "last.ckpt")
        measured, stated = [*measured, *seen.measured], [*stated, *seen.stated]
    if not transforms:
        step = callback.private_run.step
        factors = deviations(step.noise.coefficients, 5)
        assert seen.stated[-3:] == pytest.approx([step.noise_level * each for each in factors[1:4]])
        assert bands == 1 or factors[1] > 1.05 * factors[0]
        assert seen.known == pytest.approx(seen.stated)
    # Of 20,000 entries it is known to half a per cent.
    assert measured == pytest.approx(stated, rel=0.03)


@pytest.mark.parametrize(
    ("callback", "transforms", "message"),
    [
        (without_noise, [NoiseNormalize()], "there is none or it is not known"),
        (None, [SpectralShrinkage()], "Train with PrivacyCallback"),
        (privacy, [Orthogonalize(include=["nett.*"])], r"no trained parameter's name matches nett"),
    ],
    ids=["no noise", "no known noise", "wrong name"],
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
