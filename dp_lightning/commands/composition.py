"""Reads the options of ``dpl fit`` without running it: the whole configuration, or model, data and trainer."""

import copy
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dp_lightning.commands.training import TrainingCLI, command_line
from dp_lightning.errors import ConfigurationError
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy.parameters import trained_parameters
from dp_lightning.privacy.phases import shares_of
from dp_lightning.private_run.trainer_checks import check_settings

_NUMBER = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?")
# The same in C, which takes a tenth of the time, where PyYAML was built with it.
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Numbers that no list of choices has.
_ANY = {int: 1_000_007, float: 0.123457}


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
    """Reads options of ``dpl fit`` with one parser; options that differ only in numbers are parsed once."""

    def __init__(self) -> None:
        self._cli: TrainingCLI | None = None
        self._known: dict[tuple[str, ...], dict[str, Any]] = {}
        self._free: dict[tuple[str, ...], bool] = {}

    def __call__(self, arguments: Sequence[str]) -> dict[str, Any]:
        """All settings that these options of ``dpl fit`` give, with defaults; settings that are null are left out.

        Raises:
            ConfigurationError: for an option that does not parse.
        """
        rest, numbers = _split_numbers(arguments)
        if (known := self._known.get(rest)) is not None and self._takes_any(rest, numbers):
            settings = copy.deepcopy(known)
            for name, number in numbers.items():
                group, leaf = _place(settings, name)
                group[leaf] = type(group[leaf])(number)
            return settings
        settings = self._read(arguments)
        if all(_is_number_at(settings, name, number) for name, number in numbers.items()):
            self._known[rest] = copy.deepcopy(settings)
        return settings

    def _takes_any(self, rest: tuple[str, ...], numbers: Mapping[str, float]) -> bool:
        """Whether the settings of these numbers take every other one too, and are no choices such as a depth."""
        if rest not in self._free:
            others = {name: _ANY[type(number)] for name, number in numbers.items()}
            options = (f"--{name}={other}" for name, other in others.items())
            try:
                settings = self._read([*_without(rest, numbers), *options])
                self._free[rest] = all(_is_number_at(settings, name, other) for name, other in others.items())
            except ConfigurationError:
                self._free[rest] = False
        return self._free[rest]

    def _read(self, arguments: Sequence[str]) -> dict[str, Any]:
        line = ["fit", *arguments]
        if self._cli is None:
            self._cli = command_line(line, Composed)
        else:
            self._cli.parse_arguments(self._cli.parser, line)
        text = self._cli.parser.dump(self._cli.config, skip_link_targets=True)
        settings: dict[str, Any] = yaml.load(text, _LOADER)["fit"]
        return settings


def _split_numbers(arguments: Sequence[str]) -> tuple[tuple[str, ...], dict[str, int | float]]:
    """The options with ``int`` or ``float`` for each number that nothing after it replaces, and these by setting."""
    rest, numbers = list(arguments), {}
    later: set[str] = set()
    for place in range(len(rest) - 1, -1, -1):
        name, equals, value = rest[place].removeprefix("--").partition("=")
        if not equals or name == "config":
            break
        groups = itertools.accumulate(name.split("."), "{}.{}".format)
        if later.isdisjoint(groups) and _NUMBER.fullmatch(value):
            numbers[name] = float(value) if "." in value else int(value)
            rest[place] = f"--{name}={type(numbers[name]).__name__}"
        later.add(name)
    return tuple(rest), numbers


def _without(rest: Sequence[str], numbers: Mapping[str, float]) -> list[str]:
    """The options without those of these numbers, which nothing after them replaces."""
    left_out = {f"--{name}={type(number).__name__}" for name, number in numbers.items()}
    return [option for option in rest if option not in left_out]


def _place(settings: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    """The group of a setting, and its name in it.

    Raises:
        KeyError: if there is none.
    """
    *groups, leaf = name.split(".")
    for group in groups:
        settings = settings[group]
    return settings, leaf


def _is_number_at(settings: dict[str, Any], name: str, number: float) -> bool:
    """Whether an option's number is what its setting has, so that another number would be too."""
    try:
        group, leaf = _place(settings, name)
        return type(group[leaf]) in (int, float) and group[leaf] == number
    except (KeyError, TypeError):
        return False


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


def prepare_to_train(settings: Mapping[str, Any]) -> tuple[TrainingCLI, int]:
    """The same for a run that is priced or planned, and N, the number of its training examples.

    Raises:
        DpLightningError: also for what ``dpl fit`` refuses when it starts, but for what depends on images or on T.
    """
    cli = prepare(settings)
    check_settings(cli.trainer, cli.model)
    num_train = cli.privacy.num_train
    if num_train is None:
        raise ConfigurationError(
            f"{type(cli.datamodule).__name__} does not state the number of training examples. Set privacy.num_train."
        )
    shares_of(cli.privacy.frozen_until or {}, trained_parameters(cli.model))
    return cli, num_train
