"""What importing the package and a private fit change in a process, for `test_globals`: takes a folder and a mode."""

import importlib
import json
import pkgutil
import random
import signal
import sys
import threading
import types
import warnings

import lightning.pytorch as pl
import numpy as np
import torch
import torch.distributed
import torchmetrics
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

OPTIMIZERS = importlib.import_module("torch.optim.optimizer")
OWNERS = [
    *(torch, torch.nn, torch.nn.functional, torch.nn.init, torch.autograd, torch.func, torch.optim, OPTIMIZERS),
    *(torch.utils.data, torch.random, torch.distributed, torch.overrides, torch.linalg, torch.compiler),
    *(torch.backends, torchmetrics, pl, np.random, random, warnings, threading),
    *(torch.Tensor, torch.nn.Parameter, torch.nn.Module, torch.nn.Linear, torch.optim.Optimizer, torch.optim.SGD),
    *(torch.Generator, torch.autograd.Function, threading.Thread, DataLoader, Dataset, TensorDataset),
    *(pl.Trainer, pl.LightningModule, pl.Callback, Strategy, DDPStrategy, SingleDeviceStrategy),
    *(type(pl.Trainer(logger=False).fit_loop), torchmetrics.Metric, torchmetrics.MetricCollection),
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
        "flags of the compiler": (torch.compiler.is_compiling(), torch.compiler.is_exporting()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device()),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "deterministic": (
            torch.get_deterministic_debug_mode(),
            torch.utils.deterministic.fill_uninitialized_memory,
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ),
        "precision": (torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu")),
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

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def on_before_batch_transfer(self, batch, dataloader_idx):
        return batch

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def attributes(trainer, module, loader):
    """The names of the attributes of whatever takes part in a fit."""
    owners = {"trainer": trainer, "strategy": trainer.strategy, "loop": trainer.fit_loop, "loader": loader}
    owners |= {"epochs": trainer.fit_loop.epoch_loop, "precision": trainer.precision_plugin, "data": loader.dataset}
    owners |= {type(callback).__name__: callback for callback in trainer.callbacks}
    owners |= {f"module {name}": part for name, part in module.named_modules()}
    found = {f"{name}.{key}" for name, owner in owners.items() for key in vars(owner)}
    given = {f"{type(callback).__name__}.{name}" for callback in trainer.callbacks for name in ("log", "log_dict")}
    return found - given


def fit(folder, *callbacks):
    """The names of attributes that a fit leaves."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    settings = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    trainer, module = pl.Trainer(callbacks=list(callbacks), **settings, **quiet), Module()
    loader = DataLoader(TensorDataset(torch.randn(24, 5), torch.arange(24) % 3), batch_size=4)
    before = attributes(trainer, module, loader)
    trainer.fit(module, loader, DataLoader(TensorDataset(torch.randn(4, 5)), batch_size=4))
    return attributes(trainer, module, loader) - before


def import_all():
    for name in ("privacy", "private_run", "callbacks", "strategies", "postprocess"):
        package = importlib.import_module(f"dp_lightning.{name}")
        for part in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(part.name)


def callbacks(mode):
    from dp_lightning import callbacks, postprocess

    return [
        callbacks.PrivacyCallback(
            expected_batch_size=8, noise_multiplier=1.0, delta=1e-3, accountant="rdp", examples=mode
        ),
        callbacks.PostProcessCallback([postprocess.Momentum(0.9)]),
        callbacks.AveragedWeights(0.9),
        callbacks.SignalToNoise(),
        callbacks.ResultFile(),
        callbacks.StopOnSignal(),
    ]


def main(folder, mode):
    ordinary = fit(folder)  # what Lightning and torch leave
    states = [state()]
    import_all()
    states.append(state())
    left = fit(folder, *callbacks(mode)) - ordinary
    states.append(state())
    first, *later = states
    changes = [sorted(name for name in {*first, *now} if first.get(name) != now.get(name)) for now in later]
    print(json.dumps([*changes, sorted(left)]))


if __name__ == "__main__":
    main(*sys.argv[1:])
