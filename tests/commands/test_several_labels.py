"""Runs on images with several labels each, from `dpl init` to predictions, the page and the export."""

import csv
import json

import numpy as np
import pytest
import torch
from PIL import Image

from dp_lightning.callbacks import ResultFile
from dp_lightning.cli import main
from dp_lightning.commands.run_page import run_page

NAMES = ["red", "green", "blue"]
QUICK = ["--privacy.accountant", "rdp", "--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


def coloured(count, seed=0):
    """Images (n, 8, 8, 3) in which each channel is bright where the image has this label; few are blue."""
    generator = np.random.default_rng(seed)
    labels = generator.random((count, 3)) < [0.5, 0.5, 0.2]
    noise = generator.integers(60, size=(count, 8, 8, 3))
    return (noise + 150 * labels[:, None, None]).astype(np.uint8), labels


def saved(folder, images):
    folder.mkdir(parents=True)
    for number, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{number:03}.png")


def npz(folder):
    """A file such as those of MedMNIST."""
    parts = {part: coloured(count, count) for part, count in (("train", 300), ("test", 60))}
    arrays = {f"{part}_images": images for part, (images, _) in parts.items()}
    np.savez(folder / "data.npz", **arrays, **{f"{part}_labels": labels * 1 for part, (_, labels) in parts.items()})
    return folder / "data.npz", [], ["0", "1", "2"]


def table(folder):
    """Columns of 0 and 1 beside the folders of images."""
    for part, count in (("train", 300), ("test", 60)):
        images, labels = coloured(count, count)
        saved(folder / "data" / part, images)
        rows = [[f"{part}/{number:03}.png", *(labels[number] * 1)] for number in range(count)]
        with (folder / "data" / f"{part}.csv").open("w") as file:
            csv.writer(file).writerows([["image", *NAMES], *rows])
    return folder / "data", ["--model.class_weights", "[0.5, 0.5, 1]"], NAMES


@pytest.fixture(scope="module", params=[npz, table])
def run(request, tmp_path_factory):
    """The folder of a run, and the names of its labels."""
    folder = tmp_path_factory.mktemp("run")
    data, more, names = request.param(folder)
    main(["init", str(data), "--out", str(folder / "run.yaml"), "--from-scratch", "--epsilon", "20"])
    numbers = ["--trainer.max_epochs", "10", "--privacy.expected_batch_size", "100", "--optimizer.lr", "1"]
    main(
        [
            *("fit", "--config", str(folder / "run.yaml"), *numbers, *QUICK, *more),
            *("--trainer.default_root_dir", str(folder)),
        ]
    )
    return folder / "lightning_logs" / "version_0", names


def test_the_result_and_the_page_have_numbers_of_each_label(run):
    folder, names = run
    result = json.loads((folder / "result.json").read_text())
    assert [row["class"] for row in result["test_by_class"]] == names
    assert result["test_auroc"] > 0.95
    assert result["test_average_precision"] > 0.9
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    again = ResultFile()  # of a run that resumes, and may end before its next evaluation
    again.load_state_dict(torch.load(checkpoint, weights_only=True)["callbacks"]["ResultFile"])
    assert again.state_dict()["report"]["test_by_class"] == result["test_by_class"]
    page = run_page(folder)[0].markdown()
    assert f"mean AUROC {result['test_auroc']:.3f}, epsilon" in page
    assert "| class | images | accuracy | auroc | average_precision |" in page
    assert all(f"| {name} | " in page for name in names)


def test_predictions_name_every_label_of_an_image_and_are_those_of_the_export(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    folder, names = run
    (checkpoint,) = (folder / "checkpoints").glob("*.ckpt")
    images, labels = coloured(20)
    saved(tmp_path / "new", images)
    main(
        [
            *("predict", "--config", str(folder / "config.yaml"), "--ckpt_path", str(checkpoint)),
            *("--data", "ImageFiles", "--data.root", str(tmp_path / "new"), "--trainer.logger", "false"),
            *("--trainer.default_root_dir", str(tmp_path)),
        ]
    )
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert "class" not in rows[0]
    found = [[name in row["labels"].split(";") for name in names] for row in rows]
    probabilities = np.array([[float(row[f"p{k}"]) for k in range(3)] for row in rows])
    assert found == (probabilities > 0.5).tolist()
    assert (found == labels).mean() > 0.9
    assert probabilities.sum(1).max() > 1.5
    main(["export", "--ckpt-path", str(checkpoint), "--out", str(tmp_path / "export")])
    facts = json.loads((tmp_path / "export" / "model.json").read_text())["onnx"]
    assert "sigmoid" in facts["output"]["meaning"]
    assert facts["output"]["class_names"] in (names, None)
    mean, std = (np.array(facts["input"][name])[:, None, None] for name in ("mean", "std"))
    given = ((images.transpose(0, 3, 1, 2) / 255 - mean) / std).astype(np.float32)
    (logits,) = onnxruntime.InferenceSession(tmp_path / "export" / "model.onnx").run(None, {"images": given})
    np.testing.assert_allclose(1 / (1 + np.exp(-logits)), probabilities, atol=1e-5)
