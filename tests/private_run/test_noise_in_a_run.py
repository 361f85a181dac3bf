"""What the post-processing of a private run knows of its noise."""

import json
import math

import lightning.pytorch as pl
import pytest
import torch
import yaml
from plain_run import Plain, loader, parameters_after, privacy, trainer
from torch import nn

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.cli import main
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


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize(
    "transforms",
    [
        [],
        [Momentum(0.9)],
        [Kalman(process_to_measurement_ratio=1.5), Momentum(0.95, kind="ema_nesterov"), NoiseNormalize()],
    ],
    ids=["none", "momentum", "filter-momentum-normalized"],
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
        return fitted, seen.stated, [p.detach().clone() for p in module.parameters()]

    _, whole, expected = run(tmp_path / "whole", max_epochs=4)
    half, first, _ = run(tmp_path / "half", max_epochs=2)
    half.save_checkpoint(tmp_path / "half" / "two.ckpt")
    _, second, actual = run(tmp_path / "half", checkpoint=tmp_path / "half" / "two.ckpt", max_epochs=4)
    assert first + second == whole
    assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_a_run_without_noise_cannot_divide_by_it(tmp_path):
    callback = privacy(noise_multiplier=0.0, not_private=True)
    run = trainer(tmp_path, callback, PostProcessCallback([NoiseNormalize()]))
    with pytest.raises(ConfigurationError, match="there is none or it is not known"):
        run.fit(Plain(), loader())
    assert callback.ledger.num_steps == 0


@pytest.mark.parametrize("transform", [SpectralShrinkage(), GatedOrthogonalize(), SelectiveOrthogonalize()])
def test_a_run_without_noise_is_all_signal(tmp_path, transform):
    callback = privacy(noise_multiplier=0.0, not_private=True, reproducible=True)
    after = parameters_after(tmp_path, callback, PostProcessCallback([transform]))
    assert after.isfinite().all()


def test_a_run_without_the_privacy_callback_has_no_known_noise(tmp_path):
    run = trainer(tmp_path, PostProcessCallback([SpectralShrinkage()]))
    with pytest.raises(ConfigurationError, match="Train with PrivacyCallback"):
        run.fit(Plain(), loader())


def test_a_wrong_order_and_a_wrong_name_are_refused_before_a_step(tmp_path):
    for transforms, message in (
        ([Orthogonalize(), SpectralShrinkage()], "before the transforms that are not linear"),
        ([Orthogonalize(include=["nett.*"])], r"no trained parameter's name matches nett"),
    ):
        callback = privacy()
        with pytest.raises(ConfigurationError, match=message):
            trainer(tmp_path, callback, PostProcessCallback(transforms)).fit(Plain(), loader())
        assert callback.ledger.num_steps == 0


class Ends(pl.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        trainer.should_stop = True


def test_the_statement_names_the_transforms_once_however_often_it_fits(tmp_path):
    callback, post = privacy(), PostProcessCallback([Momentum(0.9), GatedOrthogonalize()])
    for others in ([Ends()], []):
        trainer(tmp_path, callback, post, *others).fit(Plain(), loader())
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert facts["num_steps"] == 9
    assert facts["postprocessing"] == "Momentum, then GatedOrthogonalize"


def test_every_setting_of_the_new_transforms_can_be_written_in_a_configuration(tmp_path):
    config = {
        "data": {"class_path": "Digits"},
        "model": {"class_path": "SmallCNNModule"},
        "privacy": {"expected_batch_size": 200, "target_epsilon": 8.0, "delta": 1e-4, "accountant": "rdp"},
        "optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.05}},
        "postprocess": {
            "transforms": [
                {"class_path": "Momentum", "init_args": {"beta": 0.9, "exclude": ["*.bias"]}},
                {
                    "class_path": "SelectiveOrthogonalize",
                    "init_args": {
                        "threshold": "recovery",
                        "orthogonalize": {
                            "class_path": "Orthogonalize",
                            "init_args": {"coefficients": "polar_express", "steps": 6, "precision": "bfloat16"},
                        },
                        "otherwise": {"class_path": "NoiseNormalize", "init_args": {"norm": 0.5}},
                        "include": ["*.weight"],
                    },
                },
            ]
        },
        "trainer": {
            "max_steps": 2,
            "max_epochs": -1,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "default_root_dir": str(tmp_path),
        },
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config))
    main(["fit", "--config", str(tmp_path / "run.yaml")])
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert facts["postprocessing"] == "Momentum, then SelectiveOrthogonalize"
    assert math.isfinite(facts["epsilon"]["rdp"])
