"""A small plain LightningModule on a plain Trainer, for the tests of the callback."""

import copy
import json
import math

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.callbacks.privacy import privacy_of

N, CLASSES = 60, 3


def examples(n=N, seed=0):
    """Three classes that a linear model tells apart."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % CLASSES
    x = torch.randn(n, 5, generator=generator) + 2.5 * F.one_hot(y, 5)
    return TensorDataset(x, y)


class Plain(pl.LightningModule):
    """Knows nothing of privacy."""

    def __init__(self, net=None, lr=0.5):
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, CLASSES))
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Stop(pl.Callback):
    """Ends a run as a crash does, before the step after ``step``."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, *args):
        if trainer.global_step == self.step:
            raise RuntimeError("stopped")


class PhysicalBatches(pl.Callback):
    """Keeps the physical batches that a run trains on."""

    def __init__(self):
        self.batches = []

    def on_train_start(self, trainer, pl_module):
        step = privacy_of(trainer).private_run.step
        accumulate = step.accumulate

        def noted(batch):
            self.batches.append(batch)
            accumulate(batch)

        step.accumulate = noted

    @property
    def rows(self):
        """Of each batch its leaves, with the rows of all examples that take part."""
        return [tuple(leaf[batch.counted].flatten(0, 1) for leaf in batch.leaves) for batch in self.batches]


def loader(dataset=None, **kwargs):
    return DataLoader(dataset or examples(), batch_size=7, shuffle=True, **kwargs)


def held_out(n=30):
    """For a validation."""
    return DataLoader(examples(n, seed=1), batch_size=30)


def trainer(tmp_path, *callbacks, **kwargs):
    defaults = {
        "max_epochs": 3,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "default_root_dir": tmp_path,
    }
    return pl.Trainer(callbacks=list(callbacks), **{**defaults, **kwargs})


def privacy(**kwargs):
    # RDP is the cheapest accountant; the accountants have tests of their own.
    defaults = {"expected_batch_size": 20, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
    return PrivacyCallback(**{**defaults, **kwargs})


def without_noise(**kwargs):
    return privacy(**{"noise_multiplier": 0.0, "not_private": True, "reproducible": True, **kwargs})


def written(callback):
    """The statement that a run has left in its folder."""
    return json.loads((callback.private_run.folder / "privacy_statement.json").read_text())


def flat(module):
    """The trained parameters of a module as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters() if p.requires_grad])


def by_loop(module, steps, *, bound):
    """The parameters after noiseless steps, by ordinary autograd in float64, one example at a time.

    A gradient that is not finite contributes nothing.

    Args:
        steps: of each step, the batch of each of the N examples.
        bound: C.
    """
    module = copy.deepcopy(module).double()
    parameters = [p for p in module.parameters() if p.requires_grad]
    for batches in steps:
        total = [torch.zeros_like(p) for p in parameters]
        for batch in batches:
            loss = module.training_step([t.double() if t.is_floating_point() else t for t in batch], 0)
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradients = [torch.zeros_like(p) if g is None else g for g, p in zip(gradients, parameters, strict=True)]
            norm = float(torch.cat([g.flatten() for g in gradients]).norm())
            if math.isfinite(norm):
                for t, g in zip(total, gradients, strict=True):
                    t += g * min(1.0, bound / max(norm, 1e-30))
        with torch.no_grad():
            for p, t in zip(parameters, total, strict=True):
                p -= module.lr * t / N
    return flat(module)


def parameters_after(tmp_path, callback, *others, module=None, dataset=None, **kwargs):
    torch.manual_seed(0)
    module = module or Plain()
    trainer(tmp_path, callback, *others, **kwargs).fit(module, loader(dataset))
    return flat(module)
