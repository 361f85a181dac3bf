"""Reads the options of ``dpl fit`` without running it: the whole configuration, or model, data and trainer."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from dp_lightning.commands.configs import with_paths
from dp_lightning.commands.training import TrainingCLI, command_line
from dp_lightning.errors import ConfigurationError
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy.parameters import trained_parameters
from dp_lightning.privacy.phases import shares_of
from dp_lightning.private_run.trainer_checks import check_settings


class Stopped(TrainingCLI):
    """Creates model, data and trainer, and does not run them."""

    def run_command(self, command: str) -> None:
        pass


class _Prepared(Stopped):
    """Does the same without pretrained weights, and without setting the seed."""

    def set_seed(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        with without_weights():
            super().instantiate_classes()


class _Composed(_Prepared):
    """Only reads the settings."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


class SettingsReader:
    """Reads options of ``dpl fit`` any number of times; the parser is built once, since that takes longest."""

    def __init__(self) -> None:
        self._cli: TrainingCLI | None = None

    def __call__(self, arguments: Sequence[str]) -> dict[str, Any]:
        """All settings that these options of ``dpl fit`` give, with defaults; settings that are null are left out.

        Raises:
            ConfigurationError: for an option that does not parse.
        """
        line = with_paths(["fit", *arguments])
        if self._cli is None:
            self._cli = command_line(line, _Composed)
        parser = self._cli.parser_of("fit")
        settings: dict[str, Any] = json.loads(
            parser.dump(parser.parse_args(line[1:]), format="json", skip_validation=True)  # it was validated just now
        )
        return settings


def prepare(settings: Mapping[str, Any]) -> TrainingCLI:
    """Model, data, privacy and trainer of a whole configuration; nothing is written or downloaded.

    Raises:
        DpLightningError: as ``dpl fit`` would, for wrong settings or data.
    """
    trainer = {**settings["trainer"], "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    if not trainer.get("callbacks"):  # a ModelCheckpoint among them is refused where checkpoints are switched off
        trainer["enable_checkpointing"] = False
    return command_line(["fit", f"--config={yaml.safe_dump({**settings, 'trainer': trainer})}"], _Prepared)


def prepare_to_train(settings: Mapping[str, Any]) -> tuple[TrainingCLI, int]:
    """The same for a run that is priced or planned, and N, the number of its training examples.

    Raises:
        DpLightningError: also for what ``dpl fit`` refuses when it starts, except for what depends on images or on T.
    """
    cli = prepare(settings)
    check_settings(cli.trainer, cli.model)
    num_train = num_train_of(cli)
    shares_of(cli.privacy.frozen_until or {}, trained_parameters(cli.model))
    return cli, num_train


def num_train_of(cli: TrainingCLI) -> int:
    """The number of training examples, or of persons if they are the unit, before any image is read.

    Raises:
        ConfigurationError: if neither the data module nor the settings state it.
    """
    if cli.privacy.num_train is None:
        raise ConfigurationError(
            f"{type(cli.datamodule).__name__} does not state the number of training examples. Set privacy.num_train."
        )
    return cli.privacy.num_train
