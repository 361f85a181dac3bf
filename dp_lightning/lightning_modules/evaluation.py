"""What a reader asks of a result on test images: numbers by class, which classes are confused, and calibration.

Test images are outside the guarantee, and so is every number here.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import AUROC, AveragePrecision, CalibrationError, ConfusionMatrix, MetricCollection

# The size of the table grows with the square, and nobody reads a larger one; sorting by each of many classes takes
# seconds to minutes.
_MOST = 50
_BY_SCORE: dict[str, Any] = {"auroc": AUROC, "average_precision": AveragePrecision}


def metrics_of_test_images(num_classes: int, *, multi_label: bool) -> MetricCollection:
    """The metrics that `report_of` reads; they take probabilities (N, num_classes) and integer labels."""
    kind, number = ("multilabel", "num_labels") if multi_label else ("multiclass", "num_classes")
    task: Any = {"task": kind, number: num_classes}
    calibration_error = CalibrationError("binary") if multi_label else CalibrationError(**task)
    metrics: dict[str, Any] = {"confusion": ConfusionMatrix(**task), "calibration_error": calibration_error}
    if num_classes <= _MOST:
        metrics |= {name: kind(**task, average="none") for name, kind in _BY_SCORE.items()}
    return MetricCollection(metrics)


def report_of(metrics: MetricCollection, names: Sequence[str] | None = None) -> dict[str, Any]:
    """The numbers of `metrics_of_test_images`; None stands for a number that these images do not define.

    Args:
        metrics: The metrics, after all test images.
        names: Names of the classes or labels in order; None for their numbers.

    Returns:
        ``test_by_class`` has for each ``class`` the number of its ``images``, the ``accuracy`` on them (with several
        labels per image, the share of right answers on all images), and its ``auroc`` and ``average_precision`` against
        all other images, of at most 50 classes. ``test_auroc`` and ``test_average_precision`` are means over classes.
        ``test_calibration_error`` is the expected calibration error (Guo et al. 2017) in 15 bins. ``test_confusion``
        has a row for each true class and a column for each predicted one, where an image has one label and there are at
        most 50 classes.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "No (positive|negative) samples")  # None says so
        found: dict[str, Tensor] = metrics.compute()
    confusion = found["confusion"]  # (classes, classes), or (labels, 2, 2)
    multi_label = confusion.dim() == 3
    images, count = (confusion[:, 1].sum(1), confusion[0].sum()) if multi_label else (confusion.sum(1), confusion.sum())
    right = confusion.diagonal(dim1=1, dim2=2).sum(1) if multi_label else confusion.diagonal()
    known = names is not None and len(names) == len(images)
    columns: dict[str, Sequence[Any]] = {"class": list(names or ()) if known else list(map(str, range(len(images))))}
    columns |= {"images": images.tolist(), "accuracy": _numbers(right / (count if multi_label else images))}
    report: dict[str, Any] = {"test_calibration_error": _numbers(found["calibration_error"][None])[0]}
    for name in [name for name in _BY_SCORE if name in found]:
        values = found[name].where((images > 0) & (images < count), torch.nan)
        columns[name], report[f"test_{name}"] = _numbers(values), _numbers(values.nanmean()[None])[0]
    report["test_by_class"] = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if not multi_label and len(confusion) <= _MOST:
        report["test_confusion"] = confusion.tolist()
    return report


def _numbers(values: Tensor) -> list[float | None]:
    return [round(value, 6) if value == value else None for value in values.tolist()]
