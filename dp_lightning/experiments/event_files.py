"""The curves in the TensorBoard event files of a run, read with tensorboard's own reader; tensorflow is not needed."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dp_lightning.errors import DataError


class Curve(NamedTuple):
    """Numbers that were logged under one tag."""

    steps: list[int]
    values: list[float]


def curves_in(folder: Path) -> dict[str, Curve]:
    """The finite scalars of all event files of a folder, by their tags.

    A run that was resumed in the same folder has several files. What it logged again replaces what an earlier file has
    from the same step on, as those steps are not part of the run's weights.

    Raises:
        DataError: naming the file that cannot be read.
    """
    found: dict[str, Curve] = {}
    for path in sorted(folder.glob("events.out.tfevents.*")):
        started: set[str] = set()
        for tag, step, value in _scalars(path):
            curve = found.setdefault(tag, Curve([], []))
            if tag not in started:
                started.add(tag)
                kept = sum(known < step for known in curve.steps)
                del curve.steps[kept:], curve.values[kept:]
            curve.steps.append(step)
            curve.values.append(value)
    return found


def _scalars(path: Path) -> Iterator[tuple[str, int, float]]:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.util import tensor_util

    try:
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.WhichOneof("value") != "tensor":
                    continue
                array = tensor_util.make_ndarray(value.tensor)
                if array.size == 1 and array.dtype.kind in "fiu" and math.isfinite(array.item()):
                    yield str(value.tag), int(event.step), float(array.item())
    except Exception as error:  # the file may hold anything
        raise DataError(f"{path} cannot be read as an event file ({type(error).__name__}: {error}).") from error
