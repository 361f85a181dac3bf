"""Settings of the Trainer, callbacks and modules that would break the guarantee are refused by name."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from plain_run import CLASSES, Plain, loader, privacy, trainer
from torch import nn

from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.private_run.trainer_checks import check_settings

REFUSED_TRAINERS = {
    "gradient_clip_val": {"gradient_clip_val": 1.0},
    "accumulate_grad_batches": {"accumulate_grad_batches": 2},
    "precision": {"precision": "bf16-true"},
    "overfit_batches": {"overfit_batches": 1},
    "write to memory://x, a URL": {"default_root_dir": "memory://x"},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "max_epochs": {"max_epochs": -1},
    "AsyncCheckpointIO": {"plugins": [AsyncCheckpointIO()]},
    "StochasticWeightAveraging": {"callbacks": pl.callbacks.StochasticWeightAveraging(0.1)},
    "GradientAccumulationScheduler": {"callbacks": pl.callbacks.GradientAccumulationScheduler({0: 2})},
    "LearningRateFinder": {"callbacks": pl.callbacks.LearningRateFinder()},
    "BatchSizeFinder": {"callbacks": pl.callbacks.BatchSizeFinder()},
    "has several PrivacyCallbacks, and a run has one plan": {"callbacks": privacy(noise_multiplier=2.0)},
}


class WithLoader(Plain):
    batch_size = 7

    def train_dataloader(self):
        return loader()


@pytest.mark.parametrize("setting", REFUSED_TRAINERS)
def test_settings_that_would_break_the_guarantee_are_refused_by_name(tmp_path, setting):
    settings = {"enable_checkpointing": True, **REFUSED_TRAINERS[setting]}
    others = [settings.pop("callbacks")] if "callbacks" in settings else []
    with pytest.raises(ConfigurationError, match=setting):
        trainer(tmp_path, privacy(), *others, **settings).fit(WithLoader())


def test_the_other_package_of_lightning_is_named(tmp_path):
    other = pytest.importorskip("pytorch_lightning")
    with pytest.raises(ConfigurationError, match=r"The Trainer is of the package pytorch_lightning.*import lightning"):
        check_settings(other.Trainer(accelerator="cpu", logger=False, default_root_dir=tmp_path), Plain())


@pytest.mark.parametrize("name", ["ModelCheckpoint", "EarlyStopping", "LambdaCallback"])
def test_callbacks_of_the_other_package_are_named(tmp_path, name):
    other = getattr(pytest.importorskip("pytorch_lightning").callbacks, name)
    callback = other("val_loss") if name == "EarlyStopping" else other()
    with pytest.raises(ConfigurationError, match=rf"The callback {name} is of the package pytorch_lightning"):
        trainer(tmp_path, privacy(), callback).fit(Plain(), loader())


def test_a_backward_of_ones_own_is_refused(tmp_path):
    class Scaling(Plain):
        def backward(self, loss, *args, **kwargs):
            (loss * loss.detach()).backward()

    with pytest.raises(ConfigurationError, match="Scaling has a backward of its own"):
        trainer(tmp_path, privacy()).fit(Scaling(), loader())


def with_statistics(norm, places=2):
    shape = nn.Unflatten(1, (8 // places, places))
    return Plain(nn.Sequential(nn.Linear(5, 8), shape, norm, nn.Flatten(), nn.Linear(8, CLASSES)))


@pytest.mark.parametrize(
    ("norm", "places", "mode"),
    [
        (nn.BatchNorm1d(8), 1, "together"),
        (nn.BatchNorm1d(8, affine=False), 1, "one_by_one"),
        (nn.InstanceNorm1d(4, track_running_stats=True), 2, "together"),
    ],
    ids=["batch norm", "one by one", "instance norm with running statistics"],
)
def test_statistics_of_examples_are_refused_with_a_fix_that_helps(tmp_path, norm, places, mode):
    with pytest.raises(ModelError, match=r"BatchNorm in training mode.*group_norm.*freeze_batch_norm") as refused:
        trainer(tmp_path, privacy(examples=mode)).fit(with_statistics(norm, places), loader())
    assert "one_by_one" not in str(refused.value)
    assert not norm.running_mean.any()


@pytest.mark.parametrize("way", ["a part", "the module"])
def test_compiled_modules_are_refused(tmp_path, way):
    module = Plain()
    if way == "a part":
        module.net[0].compile()
    else:
        module = torch.compile(module)
    with pytest.raises(ConfigurationError, match=r"compiled.*without torch.compile"):
        trainer(tmp_path, privacy()).fit(module, loader())


class Manual(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Searching(Plain):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


class Sparse(Plain):
    def configure_optimizers(self):
        return torch.optim.SparseAdam(self.parameters())


class Foreign(Plain):
    def configure_optimizers(self):
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.ones(2))], lr=0.1)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Manual, "automatic_optimization of Manual is False"),
        (Searching, "LBFGS reads the gradient several times"),
        (Sparse, "SparseAdam takes sparse gradients"),
        (Foreign, "holds a parameter that is not among the module's trained"),
    ],
)
def test_optimizers_that_cannot_take_private_steps_are_refused(tmp_path, kind, words):
    with pytest.raises(ConfigurationError, match=words):
        trainer(tmp_path, privacy()).fit(kind(), loader())


def test_a_lazy_layer_is_refused_by_name(tmp_path):
    module = Plain(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, CLASSES)))
    with pytest.raises(ModelError, match=r"'net\.0\.weight' belongs to a lazy layer"):
        trainer(tmp_path, privacy()).fit(module, loader())
