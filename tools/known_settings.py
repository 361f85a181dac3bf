"""Writes ``dp_lightning/commands/known_settings.json``: the names of all settings, for the check of misspelt ones.

Run it after a setting, a model, a data set or a transform was added or renamed:

    python tools/known_settings.py
"""

import inspect
import json
from importlib.metadata import version
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import ReduceLROnPlateau

from dp_lightning import datamodules, lightning_modules, postprocess
from dp_lightning.commands.composition import Composed
from dp_lightning.commands.known_settings import FILE
from dp_lightning.commands.named_configs import path_of
from dp_lightning.commands.parser import StrictParser
from dp_lightning.commands.training import command_line
from dp_lightning.lightning_internals import flags_of
from dp_lightning.lightning_modules.schedules import WarmupCosine

# What Lightning gives to an optimizer and to a schedule.
_GIVEN = {"params", "optimizer"}
_COMMANDS = ("fit", "validate", "test", "predict")


def content() -> dict[str, Any]:
    """What the file should hold."""
    classes = _classes()
    options = {command: _options(command) for command in _COMMANDS}
    return {
        "versions": {name: version(name) for name in ("torch", "lightning")},
        "options": options,
        "kinds": {kind: [one.__name__ for one in found] for kind, found in classes.items()},
        "settings": {one.__name__: _settings(one) for found in classes.values() for one in found},
    }


def _classes() -> dict[str, list[type]]:
    """The classes that have short names, by the setting that takes them."""
    found = _public(torch.optim.lr_scheduler, torch.optim.lr_scheduler.LRScheduler)
    schedules = [one for one in found if one.__name__ != ReduceLROnPlateau.__name__]  # Lightning's needs a monitor
    return {
        "model": _public(lightning_modules, torch.nn.Module),
        "data": _public(datamodules, pl.LightningDataModule),
        "optimizer": _public(torch.optim, torch.optim.Optimizer),
        "lr_scheduler": [WarmupCosine, ReduceLROnPlateau, *schedules],
        "postprocess.transforms": _public(postprocess, postprocess.Transform),
    }


def _public(module: Any, base: type) -> list[type]:
    """The classes of a module that can be instantiated and derive from ``base``."""
    found = [value for name, value in vars(module).items() if not name.startswith("_") and inspect.isclass(value)]
    kept = [one for one in found if issubclass(one, base) and one is not base and not inspect.isabstract(one)]
    return sorted(set(kept), key=lambda one: one.__name__)


def _settings(one: type) -> list[str]:
    parser = StrictParser()
    parser.add_class_arguments(one, "its", fail_untyped=False)
    names = {flag.split(".")[1].removesuffix("+") for flag in flags_of(parser) if flag.startswith("its.")}
    order = {name: place for place, name in enumerate(inspect.signature(one).parameters)}
    return sorted(names - _GIVEN, key=lambda name: (order.get(name, len(order)), name))


def _options(command: str) -> list[str]:
    cli = command_line([command, f"--config={path_of('digits')}"], Composed)
    flags = {flag.removesuffix("+") for flag in flags_of(cli.parser)}
    flags.discard("print_shtab")  # which comes before the command
    return sorted(flag for flag in flags if not flag.startswith("-") and not flag.endswith(".help"))


if __name__ == "__main__":
    FILE.write_text(json.dumps(content(), indent=1) + "\n")
    print(FILE)
