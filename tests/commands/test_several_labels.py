"""A run on images with several labels each, from `dpl fit` to predictions, the page and the export."""

import csv
import json

import lightning.pytorch as pl
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import ResultFile
from dp_lightning.cli import main
from dp_lightning.commands.run_page import run_page

NAMES = ["red", "green", "blue"]


def coloured(count):
    """Images in which each channel is bright where the image has this label; few are blue."""
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(count, 3, generator=generator) < torch.tensor([0.5, 0.5, 0.2])).float()
    noise = torch.randint(60, (count, 3, 8, 8), generator=generator)
    return (noise + 150 * labels[:, :, None, None]).to(torch.uint8), labels


class Coloured(pl.LightningDataModule):
    num_classes, in_channels, image_size, mean, std, num_train = 3, 3, 8, (0.5,), (0.5,), 300
    multi_label, class_names, label_names = True, NAMES, NAMES

    def _loader(self, count):
        images, labels = coloured(count)
        return DataLoader(TensorDataset(images / 127.5 - 1, labels), batch_size=50)

    def train_dataloader(self):
        return self._loader(300)

    def val_dataloader(self):
        return {"test": self._loader(60)}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    main(
        [
            *("fit", "--model", "SmallCNNModule", "--data", "test_several_labels.Coloured"),
            *("--model.class_weights", "[0.5, 0.5, 1]", "--privacy.expected_batch_size", "100"),
            *("--privacy.noise_multiplier", "0.5", "--privacy.delta", "1e-3", "--privacy.accountant", "rdp"),
            *("--optimizer", "torch.optim.SGD", "--optimizer.lr", "2", "--trainer.max_epochs", "10"),
            *("--trainer.default_root_dir", str(folder), "--trainer.accelerator", "cpu"),
            *("--trainer.enable_progress_bar", "false"),
        ]
    )
    return folder / "lightning_logs" / "version_0"


def test_the_result_and_the_page_have_numbers_of_each_label(run):
    result = json.loads((run / "result.json").read_text())
    assert [row["class"] for row in result["test_by_class"]] == NAMES
    assert result["test_auroc"] > 0.95
    assert result["test_average_precision"] > 0.9
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    again = ResultFile()  # of a run that resumes, and may end before its next evaluation
    again.load_state_dict(torch.load(checkpoint, weights_only=True)["callbacks"]["ResultFile"])
    assert again.state_dict()["report"]["test_by_class"] == result["test_by_class"]
    page = run_page(run)[0].markdown()
    assert f"mean AUROC {result['test_auroc']:.3f}, epsilon" in page
    assert "| class | images | accuracy | auroc | average_precision |" in page
    assert all(f"| {name} | " in page for name in NAMES)


def test_predictions_name_every_label_of_an_image(run, tmp_path):
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    images, labels = coloured(20)
    (tmp_path / "new").mkdir()
    for number, image in enumerate(images):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / "new" / f"{number:02}.png")
    main(
        [
            *("predict", "--config", str(run / "config.yaml"), "--ckpt_path", str(checkpoint)),
            *("--data", "ImageFiles", "--data.root", str(tmp_path / "new"), "--trainer.logger", "false"),
            *("--trainer.default_root_dir", str(tmp_path)),
        ]
    )
    rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
    assert "class" not in rows[0]
    found = [[name in row["labels"].split(";") for name in NAMES] for row in rows]
    above = [[float(row[f"p{k}"]) > 0.5 for k in range(3)] for row in rows]
    assert found == above
    assert (torch.tensor(found) == labels.bool()).float().mean() > 0.9
    assert any(sum(map(float, [row["p0"], row["p1"], row["p2"]])) > 1.5 for row in rows)


def test_the_export_says_what_its_outputs_are(run, tmp_path):
    pytest.importorskip("onnxscript")
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    main(["export", "--ckpt-path", str(checkpoint), "--out", str(tmp_path / "export")])
    facts = json.loads((tmp_path / "export" / "model.json").read_text())
    assert "sigmoid" in facts["onnx"]["output"]["meaning"]
    assert facts["onnx"]["output"]["class_names"] == NAMES
