"""A validation on training examples is refused, however the two sets are put together."""

import numpy as np
import pytest
from PIL import Image
from plain_run import Plain, examples, loader, privacy, trainer
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)
from torchvision.datasets import ImageFolder

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


class Batches:
    """No loader of torch."""

    def __iter__(self):
        return iter([OTHERS[:2]])


class Wrapped(Dataset):
    """Adds a transform."""

    def __init__(self, base):
        self.base = base

    def __len__(self):
        return len(self.base)

    def __getitem__(self, index):
        row, label = self.base[index]
        return 2 * row, label


class Own(Sampler):
    """What it will draw is not known."""

    def __iter__(self):
        return iter([55])

    def __len__(self):
        return 1


def evaluated(dataset, **kwargs):
    return DataLoader(dataset, batch_size=10, **kwargs)


SHARED = {
    "the same data set": (TRAIN, evaluated(TRAIN), "60 of the 60 .* index 0"),
    "another over the same memory": (TRAIN, evaluated(TensorDataset(ROWS, CLASSES)), "60 of the 60"),
    "an equal copy": (TRAIN, evaluated(TensorDataset(ROWS.clone(), CLASSES.clone())), "60 of the 60"),
    "parts that overlap": (
        Subset(TRAIN, range(50)),
        evaluated(Subset(TRAIN, range(47, 60))),
        "3 of the 13 .* index 0",
    ),
    "one record of many": (TRAIN, evaluated(ConcatDataset([OTHERS, Subset(TRAIN, [7])])), "1 of the 31 .* index 30"),
    "with a transform": (TRAIN, evaluated(Wrapped(Subset(TRAIN, range(5)))), "5 of the 5"),
    "one of several loaders": (TRAIN, {"new": evaluated(OTHERS), "old": [evaluated(TRAIN)]}, "60 of the 60"),
    "stacked": (StackDataset(ROWS, CLASSES), evaluated(StackDataset(ROWS, CLASSES)), "60 of the 60"),
    "a part at random": (
        Subset(TRAIN, range(50)),
        evaluated(TRAIN, sampler=RandomSampler(TRAIN, num_samples=1)),
        "50 of the 60",
    ),
    "a sampler of its own": (Subset(TRAIN, range(50)), evaluated(TRAIN, sampler=Own()), "50 of the 60"),
    "a sampler of some": (TRAIN, evaluated(TRAIN, sampler=SubsetRandomSampler([5, 9])), "2 of the 2 .* index 5"),
}


class Without(Dataset):
    """No length is known."""

    def __getitem__(self, index):
        return OTHERS[index]

    def __len__(self):
        raise NotImplementedError


class Sized(Stream):
    def __len__(self):
        return len(OTHERS)


HELD_OUT = {
    "other rows": (TRAIN, evaluated(OTHERS)),
    "another part": (Subset(TRAIN, range(50)), evaluated(Subset(TRAIN, range(50, 60)))),
    "a sampler of the others": (
        Subset(TRAIN, range(50)),
        evaluated(TRAIN, sampler=SubsetRandomSampler(range(50, 60))),
    ),
    "a list of the others": (Subset(TRAIN, range(50)), evaluated(TRAIN, sampler=list(range(50, 60)))),
    "single ones of the others": (
        Subset(TRAIN, range(50)),
        DataLoader(TRAIN, sampler=range(50, 60), batch_size=None, collate_fn=lambda pair: (pair[0][None], pair[1])),
    ),
    "no length": (TRAIN, evaluated(Without(), sampler=range(10))),
    "a stream": (TRAIN, evaluated(Stream())),
    "a stream with a length": (TRAIN, evaluated(Sized())),
    "batches without a data set": (TRAIN, Batches()),
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


def test_two_data_sets_over_the_same_files_share_their_records(tmp_path):
    for name in "ab":
        path = tmp_path / "class" / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(np.full((1, 1, 3), ord(name), np.uint8)).save(path)
    with pytest.raises(ConfigurationError, match=r"2 of the 2 .* index 0"):
        trainer(tmp_path, privacy(expected_batch_size=1), max_epochs=1).fit(
            Evaluated(), loader(ImageFolder(str(tmp_path))), evaluated(ImageFolder(str(tmp_path)))
        )


@pytest.mark.parametrize("every", [1, 2])
def test_it_is_refused_before_the_first_batch_without_a_sanity_check_too(tmp_path, every):
    class Counts(Evaluated):
        steps = 0

        def on_before_optimizer_step(self, optimizer):
            self.steps += 1

    module, run = Counts(), trainer(tmp_path, privacy(), num_sanity_val_steps=0, check_val_every_n_epoch=every)
    with pytest.raises(ConfigurationError, match="60 of the 60"):
        run.fit(module, loader(), evaluated(TRAIN))
    # Lightning does not ask for the loader before it needs it.
    assert (module.batches, module.steps) == (0, 0 if every == 1 else 6)


def test_without_validation_its_loader_is_not_looked_at(tmp_path):
    run = trainer(tmp_path, privacy(), max_epochs=1, limit_val_batches=0)
    run.fit(Evaluated(), loader(), evaluated(TRAIN))
    assert run.global_step == 3


def test_after_the_fit_training_examples_can_be_evaluated(tmp_path):
    run, module = trainer(tmp_path, privacy(), max_epochs=1), Evaluated()
    run.fit(module, loader())
    run.validate(module, evaluated(TRAIN), verbose=False)
    assert module.batches == 6
