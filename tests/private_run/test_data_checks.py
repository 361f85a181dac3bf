"""Training examples are refused in a validation, however the two sets are put together, and in hyperparameters."""

from enum import StrEnum
from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from plain_run import N, Plain, examples, loader, privacy, trainer
from torch import nn
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

from dp_lightning.errors import ConfigurationError

TRAIN, OTHERS = examples(), examples(30, seed=1)
ROWS, CLASSES = TRAIN.tensors


class Evaluated(Plain):
    batches = 0

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.batches += 1
        self.log("val/loss", self.net(batch[0]).square().mean())


class Stream(IterableDataset):
    def __iter__(self):
        return iter(OTHERS)


class Wrapped(Dataset):
    """Adds a transform."""

    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        row, label = self.base[index]
        return 2 * row, label


def evaluated(dataset, **kwargs):
    return DataLoader(dataset, batch_size=10, **kwargs)


PART, REST = Subset(TRAIN, range(50)), SubsetRandomSampler(range(50, 60))
SHARED = {
    "the same data set": (TRAIN, evaluated(TRAIN), "60 of the 60 .* index 0"),
    "an equal copy": (TRAIN, evaluated(TensorDataset(ROWS.clone(), CLASSES.clone())), "60 of the 60"),
    "parts that overlap": (PART, evaluated(Subset(TRAIN, range(47, 60))), "3 of the 13 .* index 0"),
    "one record of many": (TRAIN, evaluated(ConcatDataset([OTHERS, Subset(TRAIN, [7])])), "1 of the 31 .* index 30"),
    "with a transform": (TRAIN, evaluated(Wrapped(Subset(TRAIN, range(5)))), "5 of the 5"),
    "one of several loaders": (TRAIN, {"new": evaluated(OTHERS), "old": [evaluated(TRAIN)]}, "60 of the 60"),
    "stacked": (StackDataset(ROWS, CLASSES), evaluated(StackDataset(ROWS, CLASSES)), "60 of the 60"),
    "a part at random": (PART, evaluated(TRAIN, sampler=RandomSampler(TRAIN, num_samples=1)), "50 of the 60"),
    "a sampler of some": (TRAIN, evaluated(TRAIN, sampler=SubsetRandomSampler([5, 9])), "2 of the 2 .* index 5"),
}
HELD_OUT = {
    "other rows": (TRAIN, evaluated(OTHERS)),
    "another part": (PART, evaluated(Subset(TRAIN, range(50, 60)))),
    "a sampler of the others": (PART, evaluated(TRAIN, sampler=REST)),
    "a list of the others": (PART, evaluated(TRAIN, sampler=list(range(50, 60)))),
    "a stream": (TRAIN, evaluated(Stream())),
}


@pytest.mark.parametrize("how", SHARED)
def test_a_validation_on_training_examples_is_refused(tmp_path, how):
    train, validation, said = SHARED[how]
    module = Evaluated()
    with pytest.raises(ConfigurationError, match=f"{said}.*Validate on examples that are held out"):
        trainer(tmp_path, privacy()).fit(module, loader(train), validation)
    assert module.batches == 0


@pytest.mark.parametrize("how", HELD_OUT)
def test_a_validation_on_held_out_examples_runs(tmp_path, how):
    train, validation = HELD_OUT[how]
    module = Evaluated()
    trainer(tmp_path, privacy(), max_epochs=1).fit(module, loader(train), validation)
    assert module.batches > 0


def test_it_is_refused_before_the_first_batch_without_a_sanity_check_too(tmp_path):
    module, callback = Evaluated(), privacy()
    run = trainer(tmp_path, callback, num_sanity_val_steps=0, check_val_every_n_epoch=2)
    with pytest.raises(ConfigurationError, match="60 of the 60"):
        run.fit(module, loader(), evaluated(TRAIN))
    # Lightning does not ask for the loader before it needs it.
    assert (module.batches, callback.ledger.num_steps) == (0, 6)


def test_training_examples_can_be_evaluated_after_the_fit_and_need_no_validation_in_it(tmp_path):
    run, module = trainer(tmp_path, privacy(), max_epochs=1, limit_val_batches=0), Evaluated()
    run.fit(module, loader(), evaluated(TRAIN))
    run.limit_val_batches = 1.0
    run.validate(module, evaluated(TRAIN), verbose=False)
    assert (run.global_step, module.batches) == (3, 6)


# Hyperparameters


@pytest.mark.parametrize(
    "empty", [Subset(TRAIN, []), TensorDataset(ROWS[:0], CLASSES[:0]), ConcatDataset([Subset(TRAIN, [])])]
)
def test_an_empty_training_set_is_said_to_be_empty(tmp_path, empty):
    with pytest.raises(ConfigurationError, match=r"The training set is empty \(num_train is 0\)"):
        trainer(tmp_path, privacy(expected_batch_size=2)).fit(Plain(), DataLoader(empty))


class Given(Evaluated):
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
    "a data set": (OTHERS, "TensorDataset"),
    "a loader": (DataLoader(OTHERS), "DataLoader"),
    "an array": (ROWS.numpy(), "ndarray"),
    "rows": (ROWS.tolist(), "list"),
    "a data set in a dictionary": ({"train": [OTHERS]}, "dict"),
}
SETTINGS = {
    "plain values": [None, True, 1, 0.5, "text" * N, torch.float32],
    "class weights": [torch.ones(3), [1.0, 5.0, 20.0]],
    "objects": [Mode.FAST, torch.optim.SGD, nn.Sequential(nn.Linear(2, 2)), partial(torch.optim.SGD, lr=0.1)],
}


@pytest.mark.parametrize("case", DATA)
def test_training_data_in_hyperparameters_is_refused_before_the_first_step(tmp_path, case):
    value, kind = DATA[case]
    words = rf"given of {{}} is a {kind} that holds data.*ignore=\['given'\]"
    with pytest.raises(ConfigurationError, match=words.format("Given")):
        trainer(tmp_path, privacy()).fit(Given(value), loader())
    with pytest.raises(ConfigurationError, match=words.format("Data")):
        trainer(tmp_path, privacy()).fit(Plain(), datamodule=Data(value))


@pytest.mark.parametrize("case", SETTINGS)
def test_settings_of_any_kind_are_taken_and_saved(tmp_path, case):
    run = trainer(tmp_path, privacy(), max_epochs=1)
    run.fit(Given(SETTINGS[case]), loader())
    run.save_checkpoint(tmp_path / "end.ckpt")
    kept = torch.load(tmp_path / "end.ckpt", weights_only=case != "objects")["hyper_parameters"]
    assert kept.keys() == {"given", "width"}
