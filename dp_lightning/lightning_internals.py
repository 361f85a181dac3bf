"""Every private member of Lightning, torchmetrics and jsonargparse that this package uses.

Private members may change with any release. Each of them has a public name here, and `tests/test_internals.py` uses it,
so that a missing member is noticed, and can be replaced, in one place.
"""

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from torch.optim.swa_utils import AveragedModel
from torchmetrics import Metric

#: The versions with which these members were tested.
TRIED = {"lightning": "2.6.6", "torchmetrics": "1.9.0", "jsonargparse": "4.53.0"}

#: Among the hyperparameters of a checkpoint: the class that the command line instantiated.
CLASS_PATH = "_class_path"


def logged_in_training(trainer: pl.Trainer) -> Iterable[Any]:
    """Everything logged in the training epoch so far, each with its ``meta``."""
    return trainer.fit_loop.epoch_loop._results.values()


def set_value_of_step(metric: Metric, value: Any) -> None:
    """Let Lightning log this as a metric's value of the step, as if its ``forward`` had returned it."""
    metric._forward_cache = value


def was_compiled(module: pl.LightningModule) -> bool:
    """Whether ``trainer.fit`` was given what ``torch.compile`` has made of it; Lightning takes the module out."""
    return module._compiler_ctx is not None


class Averaging(WeightAveraging):
    """Lightning's ``WeightAveraging``, whose averaged model subclasses can see and let go."""

    @property
    def averaged(self) -> AveragedModel | None:
        """A copy of the module with the average, or with the weights while these have changed places."""
        return self._average_model

    @averaged.setter
    def averaged(self, model: None) -> None:
        self._average_model = model


# The command line


class CommandLine(LightningCLI):
    """LightningCLI with steps that subclasses can override."""

    def set_seed(self) -> None:
        """Seed everything as ``seed_everything`` says."""
        super()._set_seed()

    def read_checkpoint_settings(self) -> None:
        """Take the module's settings from the checkpoint of ``ckpt_path``."""
        super()._parse_ckpt_path()

    def parser_of(self, command: str) -> LightningArgumentParser:
        """The parser of a command's options."""
        return super()._parser(command)

    def run_command(self, command: str) -> None:
        """Call the trainer's method of this name."""
        super()._run_subcommand(command)

    def _set_seed(self) -> None:
        self.set_seed()

    def _parse_ckpt_path(self) -> None:
        self.read_checkpoint_settings()

    def _run_subcommand(self, subcommand: str) -> None:
        self.run_command(subcommand)


def flags_of(parser: LightningArgumentParser) -> set[str]:
    """The options of a parser and of its commands, without their dashes."""
    commands = [action.choices.values() for action in parser._actions if isinstance(action.choices, dict)]
    parsers = [parser, *(one for choices in commands for one in choices)]
    return {option.removeprefix("--") for one in parsers for option in one._option_string_actions}
