"""``batch_norm``: a network with BatchNorm trains unchanged, as GroupNorm or frozen, and its checkpoints load."""

import warnings

import lightning.pytorch as pl
import pytest
import timm
import torch
import torchvision
from plain_run import CLASSES, Plain, flat, privacy, trainer, written
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.models.batch_norm import batch_norm_to_group_norm, batch_norms


def small():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, CLASSES))


def seen(net):
    """The network after it has seen a batch of public data."""
    with torch.no_grad():
        net.train()(torch.randn(8, 3, 8, 8) + 1)
    return net


def images(n=12):
    generator = torch.Generator().manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(n, 3, 8, 8, generator=generator), torch.arange(n) % CLASSES))


class Wild(pl.LightningModule):
    """A network with BatchNorm, as public code has it."""

    def __init__(self, net=small):
        super().__init__()
        self.net = net()

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self(batch[0]), batch[1])

    def predict_step(self, batch, batch_idx):
        return self(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneCycle(Wild):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=0.2, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class InSetup(Wild):
    def __init__(self):
        super().__init__(nn.Identity)

    def setup(self, stage):
        if isinstance(self.net, nn.Identity):
            self.net = seen(small())


class InConfigureModel(Wild):
    def __init__(self):
        super().__init__(nn.Identity)

    def configure_model(self):
        if isinstance(self.net, nn.Identity):
            self.net = seen(small())


class OptimizerFirst(Wild):
    """Hands its parameters to an optimizer before the fit."""

    def __init__(self):
        super().__init__(lambda: seen(small()))
        self.first = torch.optim.SGD(self.parameters(), lr=0.1)

    def configure_optimizers(self):
        return self.first


class Trains(Wild):
    """Puts itself into training mode in hooks."""

    def __init__(self):
        super().__init__(lambda: seen(small()))

    def on_train_start(self):
        self.train()

    def on_train_batch_start(self, batch, batch_idx):
        self.net.train()


MODULES = {
    "resnet18 of torchvision": lambda: OneCycle(lambda: seen(torchvision.models.resnet18(num_classes=CLASSES))),
    "resnet of timm": lambda: Wild(lambda: seen(timm.create_model("resnet10t", num_classes=CLASSES))),
    "activation within the norm": lambda: Wild(
        lambda: seen(timm.create_model("test_efficientnet", num_classes=CLASSES))
    ),
    "made in setup": InSetup,
    "made in configure_model": InConfigureModel,
    "optimizer made first": OptimizerFirst,
    "train() in hooks": Trains,
}


def fit(folder, module, batch_norm, *, ckpt_path=None, max_steps=2, examples="together"):
    callback = privacy(
        expected_batch_size=6, delta=1e-2, max_physical_batch_size=8, batch_norm=batch_norm, examples=examples
    )
    run = trainer(folder, callback, max_steps=max_steps, max_epochs=-1, enable_checkpointing=True)
    run.fit(module, images(), ckpt_path=ckpt_path)
    return run


@pytest.mark.parametrize("way", ["group", "freeze"])
@pytest.mark.parametrize("make", MODULES.values(), ids=MODULES)
def test_a_network_with_batch_norm_trains_unchanged(tmp_path, capsys, make, way):
    torch.manual_seed(0)
    module = make()
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    layers = len(set(batch_norms(module).values())) or 1  # a network that setup makes has one
    run = fit(tmp_path, module, way)
    said, statement = capsys.readouterr().out, written(run.callbacks[0])
    became = {"group": "became GroupNorm", "freeze": "stay in evaluation mode"}[way]
    assert f"{layers} BatchNorm layer" in said
    assert became in said
    assert statement["batch_norm"].startswith(f"{layers} BatchNorm layer")
    assert became in statement["batch_norm"]
    now, left = module.state_dict(), batch_norms(module)
    moved = {name for name, value in weights.items() if name in now and not torch.equal(now[name], value)}
    kept = {f"{name}.{own}" for name, norm in left.items() for own in norm.state_dict()}
    if way == "freeze":
        assert not any(norm.training for norm in left.values())
        assert moved == set(weights) - kept
    else:
        assert not left
        assert moved == weights.keys() & now.keys()
        assert all(p.grad is not None for p in module.parameters())


@pytest.mark.parametrize("make", [InSetup, InConfigureModel, OptimizerFirst])
@pytest.mark.parametrize("way", ["group", "freeze"])
def test_a_checkpoint_resumes_and_predicts(tmp_path, make, way):
    run = fit(tmp_path, make(), way)
    path, said = run.checkpoint_callback.best_model_path, run.callbacks[0].statement()
    module = make()
    resumed = fit(tmp_path, module, way, ckpt_path=path, max_steps=3)
    assert resumed.callbacks[0].ledger.num_steps == 3
    assert resumed.callbacks[0].statement().batch_norm == said.batch_norm != "none"
    callback = privacy(expected_batch_size=6, batch_norm=way)
    other = make()
    found = trainer(tmp_path, callback).predict(other, images(), ckpt_path=path)
    with torch.no_grad():
        expected = [run.lightning_module.eval()(x) for x, _ in images()]
    torch.testing.assert_close(torch.cat(found), torch.cat(expected))


def test_a_script_loads_a_network_of_group_norms(tmp_path):
    class Replaced(OptimizerFirst):
        def __init__(self):
            super().__init__()
            batch_norm_to_group_norm(self)

    run = fit(tmp_path, OptimizerFirst(), "group")
    loaded = Replaced.load_from_checkpoint(run.checkpoint_callback.best_model_path)
    assert not batch_norms(loaded)
    assert torch.equal(flat(loaded), flat(run.lightning_module))


@pytest.mark.parametrize("examples", ["together", "one_by_one"])
def test_by_default_batch_norm_is_refused_and_the_setting_named(tmp_path, examples):
    module = Plain(nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)))
    with pytest.raises(ModelError, match=r"BatchNorm in training mode.*privacy\.batch_norm.*group .*freeze "):
        fit(tmp_path, module, "refuse", examples=examples)


def test_a_network_without_statistics_is_frozen_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match=r"privacy\.batch_norm is freeze, but .* without training"):
        fit(tmp_path, Wild(), "freeze")


@pytest.mark.parametrize(
    ("trained", "affine", "warns"), [(False, True, True), (True, True, False), (False, False, False)]
)
def test_a_frozen_network_of_group_norms_is_named(tmp_path, trained, affine, warns):
    module = Wild(lambda: seen(small()))
    module.net[1] = nn.BatchNorm2d(4, affine=affine).requires_grad_(trained)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        fit(tmp_path, module, "group")
    assert any("what the frozen network computes is lost" in str(each.message) for each in found) == warns


def test_a_wrong_value_is_named():
    with pytest.raises(
        ConfigurationError, match=r"privacy\.batch_norm is 'frozen'; choose 'refuse' or 'group' or 'freeze'"
    ):
        PrivacyCallback(expected_batch_size=6, noise_multiplier=1.0, batch_norm="frozen")
