"""A grid of runs: a YAML file that gives one run for each combination of points on its axes.

    title: Accuracy by method and batch size
    base: [wrn16_cifar10]
    axes:
      method:
        DP-SGD: {}
        DP-Muon: {config: dp_muon}
      batch_size: {setting: privacy.expected_batch_size, values: [256, 1024]}
      seed: {setting: seed_everything, values: [42, 43, 44]}

A run takes one point of each axis. Its configuration is that of ``dpl fit`` with the files of ``base``, then those of
its points in the order of the axes, and the settings last. A file is a path relative to the grid's file, or the name of
a configuration of the package.
"""

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.errors import ConfigurationError
from dp_lightning.foreign_text import load_yaml

_KEYS = {"title", "base", "settings", "axes", "tuned", "published"}
#: The axis that is averaged over.
SEED = "seed"


@dataclass(frozen=True)
class Point:
    """One value of an axis: files and settings that it adds to a run."""

    label: str
    configs: tuple[str, ...]
    settings: Mapping[str, Any]


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        labels: Label of the run's point on each axis.
        arguments: Options of ``dpl fit``.
    """

    labels: Mapping[str, str]
    arguments: tuple[str, ...]

    @property
    def name(self) -> str:
        """The labels of the run, joined."""
        return "_".join(self.labels.values())


@dataclass(frozen=True)
class Grid:
    """The content of a grid's file, described at the top of this module.

    Attributes:
        tuned: Axis whose points are tried with the first seed; the other seeds run at the point that is best on
            validation images.
        published: Name of the paper's table of accuracies that is shown beside the runs.
    """

    path: Path
    title: str
    base: tuple[str, ...]
    settings: Mapping[str, Any]
    axes: Mapping[str, tuple[Point, ...]]
    tuned: str | None
    published: str | None

    @classmethod
    def load(cls, path: Path) -> "Grid":
        """Read a grid's file.

        Raises:
            ConfigurationError: naming the file, the key and the fix.
        """
        try:
            content = load_yaml(path.read_text(encoding="utf-8"), yaml.safe_load)
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error
        content = _mapping(path, "The grid", content, _KEYS)
        axes = _mapping(path, "axes", content.get("axes") or {})
        if not axes:
            raise ConfigurationError(f"{path}: axes is empty. Name at least one axis with its points.")
        found = {str(name): _points(path, f"axes.{name}", points) for name, points in axes.items()}
        tuned = content.get("tuned")
        if tuned is not None and (tuned not in found or tuned == SEED):
            raise ConfigurationError(f"{path}: tuned is {tuned!r}; choose one of the axes but {SEED}.")
        return cls(
            path,
            str(content.get("title", path.stem)),
            _configs(path, content.get("base")),
            _mapping(path, "settings", content.get("settings", {})),
            found,
            tuned,
            content.get("published"),
        )

    @property
    def rows_and_columns(self) -> tuple[str | None, str | None]:
        """The axis of a figure's lines, and that of its x axis: the first two but the tuned one and the seed.

        Such an axis that is the only one is the x axis, and the lines have none.
        """
        first, second, *_ = *(axis for axis in self.axes if axis not in (self.tuned, SEED)), None, None
        return (None, first) if second is None else (first, second)

    def cells(self, further: Iterable[str] = ()) -> Iterator[Cell]:
        """The runs of the grid, with further options of ``dpl fit``; the last axis varies fastest."""
        for points in itertools.product(*self.axes.values()):
            configs = [*self.base, *(config for point in points for config in point.configs)]
            settings = dict(self.settings)
            for point in points:
                settings |= point.settings
            arguments = [option for config in configs for option in ("--config", config)]
            for name, value in settings.items():
                arguments.append(f"--{name}={value if isinstance(value, str) else json.dumps(value, default=str)}")
            labels = {axis: point.label for axis, point in zip(self.axes, points, strict=True)}
            yield Cell(labels, (*arguments, *further))


def _points(path: Path, place: str, content: Any) -> tuple[Point, ...]:
    content = _mapping(path, place, content)
    if content.keys() == {"setting", "values"} and isinstance(content["values"], list):
        content = {str(value): {"settings": {content["setting"]: value}} for value in content["values"]}
    if not content:
        raise ConfigurationError(f"{path}: {place} has no points.")
    points = []
    for label, point in content.items():
        point = _mapping(path, f"{place}.{label}", point or {}, {"config", "settings"})
        settings = _mapping(path, f"{place}.{label}.settings", point.get("settings") or {})
        points.append(Point(str(label), _configs(path, point.get("config")), settings))
    return tuple(points)


def _mapping(path: Path, place: str, content: Any, known: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: {place} must be a mapping, but it is {content!r}.")
    if known is not None and (unknown := [key for key in content if key not in known]):
        raise ConfigurationError(f"{path}: {place} has no key {unknown[0]}; its keys are {', '.join(sorted(known))}.")
    return content


def _configs(path: Path, content: Any) -> tuple[str, ...]:
    """Files beside the grid's by their paths, and all else as names, which the command line of a run resolves."""
    given = [] if content is None else content if isinstance(content, list) else [content]
    files = [(path.parent / str(name), str(name)) for name in given]
    return tuple(str(file.resolve()) if file.is_file() else name for file, name in files)
