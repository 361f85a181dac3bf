"""The package and a whole fit leave the process, and what takes part in the fit, as they were."""

import signal
import sys
import threading
import types
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from plain_run import Plain, loader, privacy, trainer
from torch.utils.data import DataLoader
from torchmetrics import Metric

from dp_lightning.callbacks import AveragedWeights, PostProcessCallback, SignalToNoise, StopOnSignal
from dp_lightning.postprocess import Momentum

OWNERS = [torch, torch.nn, torch.nn.functional, torch.autograd, torch.optim, torch.Tensor, torch.nn.Module, DataLoader]
OWNERS += [torch.optim.Optimizer, Metric, pl.Trainer, pl.LightningModule, pl.Callback, Strategy, SingleDeviceStrategy]


def attributes():
    """Attributes of modules and classes of the libraries."""
    return {
        f"{owner.__name__}.{name}": value
        for owner in OWNERS
        for name, value in vars(owner).items()
        if not isinstance(value, types.ModuleType)  # a submodule may be imported late
    }


def state():
    """Those attributes by identity, and what settings say."""
    return {name: id(value) for name, value in attributes().items()} | {
        "hooks of sys": [id(hook) for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.gettrace())],
        "filters of warnings": list(map(repr, warnings.filters)),
        "signals": [repr(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads(), threading.active_count()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.get_float32_matmul_precision()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.is_anomaly_enabled()),
    }


def fit(folder, *callbacks):
    """The names of the attributes that a fit leaves on what takes part in it."""
    run, module = trainer(folder, *callbacks, max_epochs=2), Plain()
    owners = {"trainer": run, "strategy": run.strategy, "loop": run.fit_loop, "module": module}
    before = {name: set(vars(owner)) for name, owner in owners.items()}
    run.fit(module, loader())
    return {f"{name}.{key}" for name, owner in owners.items() for key in vars(owner).keys() - before[name]}


def test_the_package_and_a_fit_change_no_global_and_leave_no_attribute(tmp_path):
    ordinary, before = fit(tmp_path), state()
    for mode in ("together", "one_by_one"):
        chain = PostProcessCallback([Momentum(0.9)])
        others = [chain, AveragedWeights(0.9), SignalToNoise(), StopOnSignal()]
        assert fit(tmp_path, privacy(examples=mode), *others) == ordinary
        assert state() == before
    # What was replaced before, when the package was imported or by an earlier fit, is ours still.
    ours = (name for name, value in attributes().items() if "dp_lightning" in str(getattr(value, "__module__", "")))
    assert not list(ours)
