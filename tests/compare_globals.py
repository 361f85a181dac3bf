"""What importing the package and a private fit change in a process, for `test_globals`: takes a folder."""

import importlib
import json
import pkgutil
import signal
import sys
import threading
import types
import warnings

import lightning.pytorch as pl
import torch
import torch.distributed
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

OPTIMIZERS = importlib.import_module("torch.optim.optimizer")
OWNERS = [
    *(torch, torch.nn, torch.nn.functional, torch.autograd, torch.func, torch.optim, OPTIMIZERS, torch.utils.data),
    *(torch.random, torch.distributed, torch.overrides, torch.backends, torchmetrics, pl, warnings, threading),
    *(torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.nn.Linear, torch.optim.Optimizer, torch.optim.SGD),
    *(torch.Generator, torch.autograd.Function, DataLoader, TensorDataset, torchmetrics.Metric),
    *(pl.Trainer, pl.LightningModule, pl.Callback, Strategy, DDPStrategy, SingleDeviceStrategy),
]


def state():
    """Attributes by identity, the hooks of all optimizers and modules, and what settings say."""
    found = {
        f"{owner.__name__}.{name}": id(value)
        for owner in OWNERS
        for name, value in vars(owner).items()
        if not isinstance(value, types.ModuleType)  # a submodule may be imported late
    }
    hooks = {**vars(OPTIMIZERS), **vars(importlib.import_module("torch.nn.modules.module"))}
    found |= {name: repr(value) for name, value in hooks.items() if name.startswith("_global")}
    return found | {
        "hooks of sys": [id(hook) for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace())],
        "filters of warnings": list(map(repr, warnings.filters)),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "deterministic": (torch.get_deterministic_debug_mode(), torch.backends.cudnn.benchmark),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
        "modes": len(torch.overrides._get_current_function_mode_stack()),
    }


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.Dropout(), torch.nn.Linear(4, 3))
        self.scores, self.steps = torchmetrics.MetricCollection([MulticlassAccuracy(3)]), 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        logits = self.net(batch[0])
        self.log_dict(self.scores(logits, batch[1]))
        return torch.nn.functional.cross_entropy(logits, batch[1])

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def attributes(trainer, module):
    """The names of the attributes of what takes part in a fit."""
    owners = {"trainer": trainer, "strategy": trainer.strategy, "loop": trainer.fit_loop}
    owners |= {f"module {name}": part for name, part in module.named_modules()}
    return {f"{name}.{key}" for name, owner in owners.items() for key in vars(owner)}


def fit(folder, *callbacks):
    """The names of attributes that a fit leaves."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    trainer, module = pl.Trainer(callbacks=list(callbacks), **settings, **quiet), Module()
    before = attributes(trainer, module)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(24, 5), torch.arange(24) % 3), batch_size=4))
    return attributes(trainer, module) - before


def private_callbacks(mode):
    from dp_lightning import callbacks, postprocess

    plan = {"expected_batch_size": 8, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
    chain = callbacks.PostProcessCallback([postprocess.Momentum(0.9)])
    others = [callbacks.AveragedWeights(0.9), callbacks.SignalToNoise(), callbacks.StopOnSignal()]
    return [callbacks.PrivacyCallback(**plan, examples=mode), chain, *others]


def main(folder):
    ordinary = fit(folder)  # what Lightning and torch leave
    before = state()
    for name in ("privacy", "private_run", "callbacks", "strategies", "postprocess"):
        package = importlib.import_module(f"dp_lightning.{name}")
        for part in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(part.name)
    found = [changed(before)]
    for mode in ("together", "one_by_one"):
        left = fit(folder, *private_callbacks(mode)) - ordinary
        found += [changed(before), sorted(left)]
    print(json.dumps(found))


def changed(before):
    now = state()
    return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))


if __name__ == "__main__":
    main(*sys.argv[1:])
