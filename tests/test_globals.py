"""Importing the package and a whole fit leave the process, and what takes part in the fit, as they were."""

import importlib
import json
import pkgutil
import signal
import subprocess
import sys
import threading
import types
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Metric

OWNERS = [torch, torch.nn, torch.nn.functional, torch.autograd, torch.optim, torch.Tensor, torch.nn.Module, DataLoader]
OWNERS += [torch.optim.Optimizer, Metric, pl.Trainer, pl.LightningModule, pl.Callback, Strategy, SingleDeviceStrategy]


def state():
    """Attributes of modules and classes by identity, and what settings say."""
    found = {
        f"{owner.__name__}.{name}": id(value)
        for owner in OWNERS
        for name, value in vars(owner).items()
        if not isinstance(value, types.ModuleType)  # a submodule may be imported late
    }
    return found | {
        "hooks of sys": [id(hook) for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace())],
        "filters of warnings": list(map(repr, warnings.filters)),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
    }


class Module(BoringModel):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.randn(24, 32)), batch_size=4)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()


def fit(folder, *callbacks):
    """The names of the attributes that a fit leaves on what takes part in it."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "limit_val_batches": 0}
    settings = {"max_epochs": 2, "accelerator": "cpu", "devices": 1, "default_root_dir": folder}
    trainer, module = pl.Trainer(callbacks=list(callbacks), **settings, **quiet), Module()
    owners = {"trainer": trainer, "strategy": trainer.strategy, "loop": trainer.fit_loop, "module": module}
    before = {name: set(vars(owner)) for name, owner in owners.items()}
    trainer.fit(module)
    return {f"{name}.{key}" for name, owner in owners.items() for key in vars(owner).keys() - before[name]}


def main(folder):
    """Print what an import changes, and what private fits change and leave."""
    ordinary, before = fit(folder), state()

    def changed():
        now = state()
        return sorted(name for name in {*before, *now} if before.get(name) != now.get(name))

    for name in ("privacy", "private_run", "callbacks", "strategies", "postprocess"):
        package = importlib.import_module(f"dp_lightning.{name}")
        for part in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            importlib.import_module(part.name)
    from dp_lightning import callbacks, postprocess

    found = [changed()]
    plan = {"expected_batch_size": 8, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
    for mode in ("together", "one_by_one"):
        chain = callbacks.PostProcessCallback([postprocess.Momentum(0.9)])
        others = [chain, callbacks.AveragedWeights(0.9), callbacks.SignalToNoise(), callbacks.StopOnSignal()]
        left = fit(folder, callbacks.PrivacyCallback(**plan, examples=mode), *others) - ordinary
        found += [changed(), sorted(left)]
    print(json.dumps(found))


def test_an_import_and_a_fit_change_no_global_and_leave_no_attribute(tmp_path):
    command = [sys.executable, "-W", "ignore", __file__, tmp_path]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert shown.returncode == 0, shown.stderr[-3000:]
    assert json.loads(shown.stdout.splitlines()[-1]) == [[], [], [], [], []]


if __name__ == "__main__":
    main(*sys.argv[1:])
