"""The report of test images, beside scikit-learn and a reference in NumPy."""

import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics as reference

from dp_lightning.lightning_modules.evaluation import metrics_of_test_images, report_of


def calibration_error(confidence, right):
    """The expected calibration error of Guo et al. 2017."""
    bins = np.minimum((confidence * 15).astype(int), 14)
    parts = [(bins == place) for place in range(15) if (bins == place).any()]
    return sum(part.mean() * abs(confidence[part].mean() - right[part].mean()) for part in parts)


def report(probabilities, labels, *, multi_label=False, names=None):
    """The report of a data set in batches of 50, in which no warning is given."""
    metrics = metrics_of_test_images(probabilities.shape[1], multi_label=multi_label)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for p, y in zip(probabilities.split(50), labels.split(50), strict=True):
            metrics.update(p, y)
        return report_of(metrics, names)


def column(found, name):
    return [row[name] for row in found["test_by_class"]]


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_one_label_for_each_image(classes):
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(classes, (230,), generator=generator)
    logits = torch.randn(230, classes, generator=generator) + torch.nn.functional.one_hot(labels, classes)
    probabilities = logits.softmax(1)
    found = report(probabilities, labels)
    p, y = probabilities.double().numpy(), labels.numpy()
    said = p.argmax(1)
    assert found["test_confusion"] == reference.confusion_matrix(y, said).tolist()
    assert column(found, "class") == [str(number) for number in range(classes)]
    assert column(found, "images") == np.bincount(y).tolist()
    assert column(found, "accuracy") == pytest.approx([(said[y == k] == k).mean() for k in range(classes)], abs=2e-6)
    aurocs = [reference.roc_auc_score(y == k, p[:, k]) for k in range(classes)]
    assert column(found, "auroc") == pytest.approx(aurocs, abs=2e-6)
    assert found["test_auroc"] == pytest.approx(np.mean(aurocs), abs=2e-6)
    precisions = [reference.average_precision_score(y == k, p[:, k]) for k in range(classes)]
    assert column(found, "average_precision") == pytest.approx(precisions, abs=2e-6)
    assert found["test_calibration_error"] == pytest.approx(calibration_error(p.max(1), said == y), abs=2e-6)


def test_several_labels_for_each_image():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(230, 4, generator=generator) < 0.2).long()
    labels[:, 2], labels[:, 3] = 0, 1  # no image has this label, and all images have the other
    probabilities = (torch.randn(230, 4, generator=generator) + labels - 1).sigmoid()
    found = report(probabilities, labels, multi_label=True, names=["a", "b", "c", "d"])
    p, y = probabilities.double().numpy(), labels.numpy()
    assert column(found, "class") == ["a", "b", "c", "d"]
    assert column(found, "images") == y.sum(0).tolist()
    assert column(found, "accuracy") == pytest.approx(((p >= 0.5) == y).mean(0), abs=2e-6)
    for name, score in (("auroc", "roc_auc_score"), ("average_precision", "average_precision_score")):
        expected = [getattr(reference, score)(y[:, k], p[:, k]) for k in (0, 1)]
        assert column(found, name)[:2] == pytest.approx(expected, abs=2e-6)
        assert column(found, name)[2:] == [None, None]
        assert found[f"test_{name}"] == pytest.approx(np.mean(expected), abs=2e-6)
    expected = calibration_error(p.flatten(), y.flatten())
    assert found["test_calibration_error"] == pytest.approx(expected, abs=2e-6)
    assert "test_confusion" not in found


def test_a_class_without_test_images_has_no_numbers():
    probabilities, labels = torch.rand(40, 3).softmax(1), torch.arange(40) % 2
    found = report(probabilities, labels)
    assert found["test_by_class"][2] == {
        **{"class": "2", "images": 0, "accuracy": None, "auroc": None, "average_precision": None}
    }
    assert found["test_auroc"] == pytest.approx(np.mean(column(found, "auroc")[:2]), abs=2e-6)


def test_images_of_one_class_define_no_mean():
    found = report(torch.rand(40, 2).softmax(1), torch.zeros(40, dtype=torch.long))
    assert found["test_auroc"] is None
    assert found["test_by_class"][0]["accuracy"] is not None


@pytest.mark.parametrize(("classes", "few"), [(50, True), (51, False)])
def test_tables_and_scores_of_many_classes_are_left_out(classes, few):
    found = report(torch.rand(102, classes).softmax(1), torch.arange(102) % classes)
    assert ("test_confusion" in found) == few
    assert ("test_auroc" in found) == ("average_precision" in found["test_by_class"][0]) == few
    assert len(found["test_by_class"]) == classes
