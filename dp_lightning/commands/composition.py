"""Reads the options of ``dpl fit`` without running it: the whole configuration, or model, data and trainer."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dp_lightning.commands.training import TrainingCLI, command_line
from dp_lightning.models.pretrained import without_weights

# As a single argument, which is how a grid gives it.
_SEED = "--seed_everything="


class Stopped(TrainingCLI):
    """Creates model, data and trainer, and does not run them."""

    def run_command(self, command: str) -> None:
        pass


class _Prepared(Stopped):
    """The same without pretrained weights, and without setting the seed."""

    def set_seed(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        with without_weights():
            super().instantiate_classes()


class Composed(_Prepared):
    """Only reads the settings."""

    def before_instantiate_classes(self) -> None:
        pass

    def instantiate_classes(self) -> None:
        pass


class Composer:
    """Reads options of ``dpl fit`` with one parser; options that differ only in the seed are parsed once."""

    def __init__(self) -> None:
        self._cli: TrainingCLI | None = None
        self._known: dict[tuple[str, ...], str] = {}

    def __call__(self, arguments: Sequence[str]) -> dict[str, Any]:
        """All settings that these options of ``dpl fit`` give, with defaults; settings that are null are left out.

        Raises:
            ConfigurationError: for an option that does not parse.
        """
        before, seed, after = _split_at_seed(arguments)
        rest = (*before, _SEED, *after)
        text = self._known.get(rest) if seed is not None else None
        if text is None:
            text = self._read(arguments)
        settings: dict[str, Any] = yaml.safe_load(text)
        if seed is not None:
            self._known[rest] = text
            settings["seed_everything"] = seed
        return settings

    def _read(self, arguments: Sequence[str]) -> str:
        line = ["fit", *arguments]
        if self._cli is None:
            self._cli = command_line(line, Composed)
        else:
            self._cli.parse_arguments(self._cli.parser, line)
        text: str = self._cli.parser_of("fit").dump(self._cli.config.fit, skip_link_targets=True)
        return text


def _split_at_seed(arguments: Sequence[str]) -> tuple[Sequence[str], int | None, Sequence[str]]:
    """The options before the last seed, the seed, and the options after it; no seed if a file may replace it."""
    places = [place for place, argument in enumerate(arguments) if argument.startswith(_SEED)]
    if not places:
        return arguments, None, ()
    place = places[-1]
    before, value, after = arguments[:place], arguments[place].removeprefix(_SEED), arguments[place + 1 :]
    if any(argument.startswith("--config") for argument in after) or not re.fullmatch("0|[1-9][0-9]*", value):
        return arguments, None, ()
    return before, int(value), after


def prepare(settings: Mapping[str, Any]) -> TrainingCLI:
    """Model, data, privacy and trainer of a whole configuration; nothing is written or downloaded.

    Raises:
        DpLightningError: as ``dpl fit`` would, for wrong settings or data.
    """
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = {**settings["trainer"], **quiet, "enable_checkpointing": False}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.yaml"
        path.write_text(yaml.safe_dump({**settings, "trainer": trainer}))
        return command_line(["fit", "--config", str(path)], _Prepared)
