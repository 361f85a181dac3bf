"""What ``dpl fit`` makes of its options: the whole configuration, or model, data and trainer, without a run."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dp_lightning.commands.training import TrainingCLI, command_line, named_errors
from dp_lightning.models.pretrained import without_weights


class Stopped(TrainingCLI):
    """Makes model, data and trainer, and stops there."""

    def _run_subcommand(self, subcommand: str) -> None:
        pass


class _Prepared(Stopped):
    """The same without pretrained weights, and without a seed of its own."""

    def _set_seed(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        with without_weights():
            super().instantiate_classes()


class _Composed(_Prepared):
    """Reads the settings and stops there."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


class Composer:
    """Reads the options of ``dpl fit``; the parser is made once."""

    def __init__(self) -> None:
        self._cli: TrainingCLI | None = None

    def __call__(self, arguments: Sequence[str]) -> dict[str, Any]:
        """Every setting with these options of ``dpl fit``, defaults included but those that are null.

        Raises:
            ConfigurationError: for an option that does not parse.
        """
        line = ["fit", *arguments]
        if self._cli is None:
            self._cli = command_line(line, _Composed)
        else:
            with named_errors():
                self._cli.parse_arguments(self._cli.parser, line)
        text = self._cli._parser("fit").dump(self._cli.config.fit, skip_link_targets=True)
        settings: dict[str, Any] = yaml.safe_load(text)
        return settings


def prepare(settings: Mapping[str, Any]) -> TrainingCLI:
    """Model, data, privacy and trainer of a whole configuration; nothing is written or downloaded.

    Raises:
        DpLightningError: as ``dpl fit`` would, where the settings or the data are at fault.
    """
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = {**settings["trainer"], **quiet, "enable_checkpointing": False}
    notes = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    level = notes.level
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump({**settings, "trainer": trainer}))
        try:
            notes.setLevel(logging.WARNING)  # which devices there are, with every trainer
            return command_line(["fit", "--config", str(path)], _Prepared)
        finally:
            notes.setLevel(level)
