"""Hyperparameters are settings: training data among them is refused, and other objects are said to need code."""

import warnings
from enum import StrEnum
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from plain_run import N, Plain, examples, loader, privacy, trainer
from torch import nn
from torch.utils.data import DataLoader

from dp_lightning.errors import ConfigurationError

ROWS = examples().tensors[0]


class Given(Plain):
    def __init__(self, given, width=3):
        super().__init__()
        self.save_hyperparameters()


class Data(pl.LightningDataModule):
    def __init__(self, given):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader()


class Mode(StrEnum):
    FAST = "fast"


DATA = {
    "a data set": (examples(5), "TensorDataset"),
    "a loader": (DataLoader(examples(5)), "DataLoader"),
    "an array": (ROWS.numpy(), "ndarray"),
    "rows": (ROWS.tolist(), "list"),
    "a data set in a dictionary": ({"train": [examples(5)]}, "dict"),
    "rows in a dictionary": ({"rows": ROWS}, "dict"),
}
PLAIN = {
    "numbers and texts": [None, True, 1, 0.5, "text" * N, torch.float32],
    "class weights": [torch.ones(3), [1.0, 5.0, 20.0]],
}
OBJECTS = {
    "an enum": Mode.FAST,
    "a class": torch.optim.SGD,
    "a network": nn.Sequential(nn.Linear(2, 2)),
    "a partial": partial(torch.optim.SGD, lr=0.1),
}


@pytest.mark.parametrize("case", DATA)
def test_training_data_is_refused_before_the_first_step(tmp_path, case):
    value, kind = DATA[case]
    words = rf"given of {{}} is a {kind} that holds data.*ignore=\['given'\]"
    with pytest.raises(ConfigurationError, match=words.format("Given")):
        trainer(tmp_path, privacy()).fit(Given(value), loader())
    with pytest.raises(ConfigurationError, match=words.format("Data")):
        trainer(tmp_path, privacy()).fit(Plain(), datamodule=Data(value))


@pytest.mark.parametrize("case", [*PLAIN, *OBJECTS])
def test_settings_are_taken_and_objects_are_said_to_need_code(tmp_path, case):
    run = trainer(tmp_path, privacy(), max_epochs=1)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        run.fit(Given({**PLAIN, **OBJECTS}[case]), loader())
    said = [str(warning.message) for warning in given if "weights_only=False" in str(warning.message)]
    assert [text.partition(" have objects")[0] for text in said] == (
        ["The hyperparameters of Given"] if case in OBJECTS else []
    )
    assert run.global_step == 3
    run.save_checkpoint(tmp_path / "end.ckpt")
    kept = torch.load(tmp_path / "end.ckpt", weights_only=case not in OBJECTS)["hyper_parameters"]
    assert kept.keys() == {"given", "width"}
