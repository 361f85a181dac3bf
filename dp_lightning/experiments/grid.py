"""A grid of runs: a YAML file that gives one run for each combination of points on its axes.

    title: Accuracy by method and batch size
    base: [../wrn16_cifar10.yaml]
    axes:
      method:
        DP-SGD: {}
        DP-Muon: {config: ../fragments/postprocess/dp_muon.yaml}
      batch_size: {setting: privacy.expected_batch_size, values: [256, 1024]}
      seed: {setting: seed_everything, values: [42, 43, 44]}

A run takes one point of each axis. Its configuration is that of ``dpl fit`` with the files of ``base``, then those of
its points in the order of the axes, and the settings last. Paths are relative to the grid's file.
"""

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dp_lightning.errors import ConfigurationError
from dp_lightning.foreign_text import RepeatedKey, load_yaml, read_text

_KEYS = {"title", "base", "settings", "axes", "tuned", "report"}
_REPORT = {"rows", "columns", "published", "figures"}
FIGURES = ("accuracy", "deviation", "curves", "snr")
#: Most runs of a grid: each has a folder, and is parsed before the first one starts.
MOST_RUNS = 10_000
#: The axis that is averaged over.
SEED = "seed"


@dataclass(frozen=True)
class Point:
    """One value of an axis: files and settings that it adds to a run."""

    label: str
    configs: tuple[Path, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """One run of a grid."""

    labels: Mapping[str, str]
    """Label of its point on each axis."""
    arguments: tuple[str, ...]
    """Options of ``dpl fit``."""

    @property
    def name(self) -> str:
        """Its labels, joined."""
        return "_".join(self.labels.values())


@dataclass(frozen=True)
class Report:
    """How the runs of a grid are shown."""

    rows: str | None
    """Axis of the table's rows and of the figure's lines; None for a single row."""
    columns: str | None
    """Axis of the table's columns and of the figure's x axis; None for a single column."""
    published: str | None
    """Name of the paper's table of accuracies that is shown beside the runs."""
    figures: tuple[str, ...]


@dataclass(frozen=True)
class Grid:
    """The content of a grid's file, described at the top of this module."""

    path: Path
    title: str
    base: tuple[Path, ...]
    settings: Mapping[str, Any]
    axes: Mapping[str, tuple[Point, ...]]
    tuned: str | None
    """Axis whose points are tried with the first seed; the others run at the one that is best on validation images."""
    report: Report

    @classmethod
    def load(cls, path: Path) -> "Grid":
        """Read a grid's file.

        Raises:
            ConfigurationError: naming the file, the key and the fix.
        """
        try:
            content = load_yaml(read_text(path), yaml.safe_load)
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
        except RepeatedKey as error:
            raise ConfigurationError(f"{path} {str(error).removeprefix('it ')}.") from error
        except yaml.YAMLError as error:
            raise ConfigurationError(f"{path} is not YAML: {error}") from error
        content = _mapping(path, "The grid", content, _KEYS)
        axes = _mapping(path, "axes", content.get("axes"))
        if not axes:
            raise ConfigurationError(f"{path}: axes is empty. Name at least one axis with its points.")
        found = {str(name): _points(path, str(name), points) for name, points in axes.items()}
        if (runs := math.prod(map(len, found.values()))) > MOST_RUNS:
            raise ConfigurationError(f"{path}: axes make {runs:,} runs; at most {MOST_RUNS:,} are allowed in a grid.")
        tuned = _tuned(path, list(found), content.get("tuned"))
        return cls(
            path,
            str(content.get("title", path.stem)),
            _paths(path, "base", content.get("base")),
            _mapping(path, "settings", content.get("settings", {})),
            found,
            tuned,
            _report(path, [axis for axis in found if axis != tuned], content.get("report", {})),
        )

    def cells(self) -> Iterator[Cell]:
        """Its runs; the last axis varies fastest."""
        for points in itertools.product(*self.axes.values()):
            configs = [*self.base, *(config for point in points for config in point.configs)]
            settings = dict(self.settings)
            for point in points:
                settings |= point.settings
            arguments = [option for config in configs for option in ("--config", str(config))]
            arguments += [f"--{name}={_text(value)}" for name, value in settings.items()]
            labels = {axis: point.label for axis, point in zip(self.axes, points, strict=True)}
            yield Cell(labels, tuple(arguments))


def _points(path: Path, axis: str, content: Any) -> tuple[Point, ...]:
    content = _mapping(path, f"axes.{axis}", content)
    if "setting" in content or "values" in content:
        short = _mapping(path, f"axes.{axis}", content, {"setting", "values"})
        if not isinstance(short.get("setting"), str) or not isinstance(short.get("values"), list):
            raise ConfigurationError(
                f"{path}: axes.{axis} needs both setting, the name of a setting, and values, a list of its values."
            )
        points = [Point(str(value), settings={short["setting"]: value}) for value in short["values"]]
    else:
        points = []
        for label, point in content.items():
            place = f"axes.{axis}.{label}"
            point = _mapping(path, place, point or {}, {"config", "settings"})
            settings = _mapping(path, f"{place}.settings", point.get("settings") or {})
            points.append(Point(str(label), _paths(path, place, point.get("config")), settings))
    if not points:
        raise ConfigurationError(f"{path}: axes.{axis} has no points. Add one, or remove the axis.")
    if len({point.label for point in points}) < len(points):
        raise ConfigurationError(f"{path}: axes.{axis} has a value twice, and both would be the same run.")
    return tuple(points)


def _tuned(path: Path, axes: list[str], content: Any) -> str | None:
    if content is not None and content not in (choices := [axis for axis in axes if axis != SEED]):
        raise ConfigurationError(f"{path}: tuned is {content!r}; choose one of the axes {', '.join(choices)}.")
    return None if content is None else str(content)


def _report(path: Path, axes: list[str], content: Any) -> Report:
    content = _mapping(path, "report", content, _REPORT)
    shown: dict[str, str | None] = {key: str(content[key]) for key in ("rows", "columns") if key in content}
    choices = [axis for axis in axes if axis != SEED]
    for key, axis in shown.items():
        if axis not in choices:
            raise ConfigurationError(
                f"{path}: report.{key} is {axis!r}; choose one of the axes {', '.join(choices)}."
                + (" Seeds are averaged over." if axis == SEED else "")
            )
    left = [axis for axis in choices if axis not in shown.values()]
    missing = [key for key in ("rows", "columns") if key not in shown]
    # A single axis is drawn along the x axis.
    for key in missing if len(left) > 1 else reversed(missing):
        shown[key] = left.pop(0) if left else None
    if shown["rows"] is not None and shown["rows"] == shown["columns"]:
        raise ConfigurationError(f"{path}: report.rows and report.columns are both {shown['rows']!r}.")
    figures = content.get("figures", ["accuracy"])
    if not isinstance(figures, list) or not all(figure in FIGURES for figure in figures):
        raise ConfigurationError(f"{path}: report.figures is {figures!r}; choose from {', '.join(FIGURES)}.")
    table = content.get("published")
    return Report(shown["rows"], shown["columns"], None if table is None else str(table), tuple(figures))


def _mapping(path: Path, place: str, content: Any, known: set[str] | None = None) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: {place} must be a mapping, but it is {content!r}.")
    unknown = sorted(map(str, content.keys() - known)) if known is not None else []
    if unknown:
        raise ConfigurationError(
            f"{path}: {place} has no key {unknown[0]}; its keys are {', '.join(sorted(known or ()))}."
        )
    return content


def _paths(path: Path, place: str, content: Any) -> tuple[Path, ...]:
    given = [] if content is None else content if isinstance(content, list) else [content]
    found = tuple((path.parent / str(name)).resolve() for name in given)
    for name in found:
        if not name.is_file():
            raise ConfigurationError(f"{path}: {place} names {name}, which is not a file.")
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
