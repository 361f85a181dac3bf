"""What every image data module shares: the validation split, the transforms and the loaders.

A private run is planned from ``num_train`` and ``num_classes`` before any image is read, so a data module takes them
from public constants, file names or array headers, and the images read later must agree with them.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, Literal

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dp_lightning.datamodules.augmentation import CropAndFlip, Edges
from dp_lightning.datamodules.dataset import ImageDataset, ImageSource, Sources, Transform
from dp_lightning.datamodules.persons import PersonIds, warn_of_shared_persons
from dp_lightning.datamodules.pixels import PixelNormalization
from dp_lightning.errors import ConfigurationError, DataError

Split = Literal["train", "val", "test"]
#: Most classes that a network can have: its last layer has a row of weights for each.
MOST_CLASSES = 100_000
#: Longest side of an image for a network, in pixels: activations and flattened layers grow with its square.
LARGEST_SIDE = 4096
# Each is a process; a configuration may come from a machine with more cores than this one.
_MOST_WORKERS = max(64, 4 * (os.cpu_count() or 1))


class ImageDataModule(lightning.LightningDataModule, ABC):
    """Base class of the image data modules; a subclass says where the images come from.

    Loaders return images as bytes, and the module normalises them on the training device (``on_after_batch_transfer``,
    which the Trainer calls); the data sets themselves return normalised images.

    The privacy guarantee covers only the training part. Validation and test images, and every number computed from
    them, are outside it. ``mean`` and ``std`` are public constants: statistics computed from private images would leak
    them, since no noise is added to them.

    Args:
        mean: Mean of each channel on the scale 0 to 1, subtracted from the images; one number serves all
            channels. A public constant, never computed from private images.
        std: Standard deviation of each channel on the same scale, a public constant like ``mean``.
        val_fraction: Fraction of the training set, in [0, 1), held out for validation: of its persons, if the data
            identifies them, so that no person is in both parts.
        split_seed: Seed of that split. It is public: the same seed gives the same split on every machine.
        eval_batch_size: Images per batch of validation, test and prediction.
        num_workers: Processes that load images; 0 loads them in the main process. They are copies of it, and share the
            position in a file that a source of your own keeps open: open such a file in each process.
        augment: Random crop and flip of the training images.
        crop_edges: What a crop shows beyond the edge of an image: zeros, or the mirrored image.
        test_every_epoch: Evaluate on the test set after every epoch too, not only on the validation set.

    Raises:
        ConfigurationError: ``val_fraction``, ``split_seed``, ``mean``, ``std``, ``eval_batch_size`` or ``num_workers``
            is not a number, or is out of range.
    """

    #: Zero pixels on each side before the random crop.
    crop_padding = 4
    #: Whether a mirrored image still shows its class.
    flip = True

    def __init__(
        self,
        *,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        val_fraction: float = 0.0,
        split_seed: int = 0,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        augment: bool = True,
        crop_edges: Edges = "zeros",
        test_every_epoch: bool = True,
    ) -> None:
        super().__init__()
        if not is_number(val_fraction, Real) or not 0.0 <= val_fraction < 1.0:
            raise ConfigurationError(f"data.init_args.val_fraction must lie in [0, 1), not {val_fraction!r}")
        require_whole("split_seed", split_seed, at_most=2**63 - 1)
        require_whole("eval_batch_size", eval_batch_size, at_least=1)
        require_whole("num_workers", num_workers, at_most=_MOST_WORKERS)
        lists = isinstance(mean, list | tuple) and isinstance(std, list | tuple)
        if not lists or not mean or not std or not all(is_number(x, Real) for x in (*mean, *std)) or min(std) <= 0.0:
            raise ConfigurationError(f"mean and std need a number per channel, std above 0: {mean=}, {std=}")
        self.mean, self.std = tuple(mean), tuple(std)
        self.val_fraction, self.split_seed = val_fraction, split_seed
        self.eval_batch_size, self.num_workers = eval_batch_size, num_workers
        self.augment, self.crop_edges, self.test_every_epoch = augment, crop_edges, test_every_epoch
        self._sources = Sources()

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes; labels are 0 to ``num_classes - 1``."""

    @property
    @abstractmethod
    def in_channels(self) -> int:
        """Channels of an image."""

    @property
    @abstractmethod
    def image_size(self) -> int:
        """Height and width of an image in pixels, as the network receives it."""

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Training images before the validation split is taken out."""

    @property
    def class_names(self) -> list[str] | None:
        """Names of the classes in the order of their labels; None if they have no names."""
        return None

    @property
    def resized_to(self) -> int | None:
        """Length of the shorter side in pixels before the centre crop; None if images are not resized."""
        return None

    @property
    def own_splits(self) -> tuple[Split, ...]:
        """The splits that the data itself has."""
        return ("train", "test")

    @abstractmethod
    def check_files(self) -> None:
        """Check that the needed files exist, without reading an image.

        Raises:
            DataError: One is missing; the message names it and says what to do.
        """

    @abstractmethod
    def read_split(self, split: Split) -> ImageSource:
        """Open one of ``own_splits``.

        Raises:
            DataError: Its files are malformed.
        """

    def groups(self, split: Split) -> PersonIds | None:
        """The person id of each image in one of ``own_splits``, in order; no image is read for it.

        None if the data does not identify persons.

        Raises:
            DataError: An id is missing or invalid.
        """
        return None

    @property
    def num_val(self) -> int:
        """Training images that ``val_fraction`` takes out for validation.

        Raises:
            ConfigurationError: The data has its own validation set, or a part would be empty.
        """
        return self._num_held_out if self.groups("train") is None else len(self._split_indices()[1])

    @property
    def num_train(self) -> int:
        """Training images after the validation split is taken out: the N of a plan that counts images."""
        return self.num_available - self.num_val

    @property
    def num_train_groups(self) -> int:
        """Persons in the training set after the validation split is taken out: the N of a plan that counts persons.

        Raises:
            ConfigurationError: The data does not identify persons.
        """
        persons = self.groups("train")
        if persons is None:
            raise ConfigurationError(
                f"privacy.unit_of_privacy is group, but {type(self).__name__} does not know which images belong to "
                "the same person. Set data.init_args.group_folders or group_file of ImageFolder, or add the array "
                "train_groups to the file of NpzImages."
            )
        return persons.count - self._num_held_out

    def prepare_data(self) -> None:
        self.check_files()

    def setup(self, stage: str | None = None) -> None:
        self.check_files()
        splits: list[Split] = ["test"] if stage in ("test", "predict") else ["train", "val", "test"]
        for split in splits:
            if split in self.own_splits:
                self._source(split)
        if "train" in splits and (persons := self.groups("train")) is not None:
            for split in self.own_splits:
                if split != "train":
                    warn_of_shared_persons(persons.at(self._split_indices()[0]), self.groups(split) or (), split)

    def image_transform(self) -> Transform | None:
        """The transform of each single image, without randomness: from the image as it is read to ``image_size``."""
        return None

    def random_transform(self) -> Transform | None:
        """A random transform that replaces it for training images; None if there is none."""
        return None

    def augmentation(self) -> Transform | None:
        """The transform of a batch of training images after that: uint8 (n, C, H, W) to uint8 (n, C, H, W)."""
        if not self.augment:
            return None
        return CropAndFlip(padding=self.crop_padding, flip=self.flip, edges=self.crop_edges)

    @property
    def train_dataset(self) -> ImageDataset:
        """The ``num_train`` training images, augmented."""
        return self._dataset("train", self._split_indices()[0], train=True)

    @property
    def val_dataset(self) -> ImageDataset | None:
        """The validation images, or None when there are none."""
        if "val" in self.own_splits:
            return self._dataset("val", torch.arange(len(self._source("val").labels)))
        if self.num_val:
            return self._dataset("train", self._split_indices()[1])
        return None

    @property
    def test_dataset(self) -> ImageDataset:
        """The test images.

        Raises:
            DataError: The data has no test set.
        """
        if "test" not in self.own_splits:
            raise DataError(
                f"{type(self).__name__} found no test set in its files. `dpl validate` evaluates on the validation "
                "split; `dpl predict --data ImageFiles --data.root FOLDER` predicts any folder of images."
            )
        return self._dataset("test", torch.arange(len(self._source("test").labels)))

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches. A private run replaces the sampler with its own."""
        return self._loader(self.train_dataset, shuffle=True)

    def val_dataloader(self) -> dict[str, DataLoader] | list[DataLoader]:
        """Loaders by name, ``val`` and ``test``, of the splits that exist; an empty list if there are none."""
        val_dataset = self.val_dataset
        loaders = {} if val_dataset is None else {"val": self._loader(val_dataset)}
        if self.test_every_epoch and "test" in self.own_splits:
            loaders["test"] = self._loader(self.test_dataset)
        return loaders or []

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.test_dataset)

    predict_dataloader = test_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise, on the training device, the images that the loaders return as bytes."""
        images, *rest = batch
        if images.dtype != torch.uint8:
            return batch
        return [PixelNormalization(self.mean, self.std)(images), *rest]

    def _source(self, split: Split) -> ImageSource:
        if split not in self._sources:
            source = self.read_split(split)
            if split == "train" and len(source.labels) != self.num_available:
                raise DataError(
                    f"{type(self).__name__} holds {len(source.labels)} training images, but "
                    f"{self.num_available} were expected; the files are incomplete or have changed"
                )
            self._sources[split] = source
        return self._sources[split]

    @property
    def _num_held_out(self) -> int:
        """Number of persons, or else of images, held out for validation."""
        if self.val_fraction == 0.0:
            return 0
        if "val" in self.own_splits:
            raise ConfigurationError("the data has its own validation set; set val_fraction to 0")
        persons = self.groups("train")
        available, what = (self.num_available, "images") if persons is None else (persons.count, "persons")
        held_out = round(self.val_fraction * available)
        if not 0 < held_out < available:
            raise ConfigurationError(f"val_fraction={self.val_fraction} of {available} {what} leaves an empty part")
        return held_out

    def _split_indices(self) -> tuple[Tensor, Tensor]:
        persons = self.groups("train")
        units = np.arange(self.num_available) if persons is None else persons.numbers
        count = self.num_available if persons is None else persons.count
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.split_seed))
        held_out = torch.from_numpy(np.isin(units, order[: self._num_held_out].numpy()))
        return (~held_out).nonzero().flatten(), held_out.nonzero().flatten()

    def _dataset(self, split: Split, indices: Tensor, *, train: bool = False) -> ImageDataset:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.in_channels):
                raise ConfigurationError(f"{name} has {len(values)} numbers for {self.in_channels} channels")
        drawn, groups = self.random_transform() if train else None, self.groups(split)
        return ImageDataset(
            self._source(split),
            indices,
            self.image_transform() if drawn is None else drawn,
            PixelNormalization(self.mean, self.std),
            augment=self.augmentation() if train else None,
            random=drawn is not None,
            groups=None if groups is None else groups.at(indices),
        )

    def _loader(self, dataset: ImageDataset, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            dataset.as_bytes(),
            batch_size=self.eval_batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )


def is_number(value: object, kind: type = Integral) -> bool:
    """Whether a setting is a number of this kind; None, strings and booleans are not."""
    return isinstance(value, kind) and not isinstance(value, bool)


def require_whole(name: str, value: Any, *, at_least: int = 0, at_most: int | None = None) -> None:
    """Refuse a setting that is not a whole number, or is out of range.

    Raises:
        ConfigurationError: naming the setting and its range.
    """
    if not is_number(value) or value < at_least or (at_most is not None and value > at_most):
        most = "" if at_most is None else f" and at most {at_most:,}"
        raise ConfigurationError(
            f"data.init_args.{name} must be a whole number of at least {at_least}{most}, not {value!r}"
        )


def checked_labels(labels: Sequence[int] | Tensor, num_classes: int, where: str) -> Tensor:
    """Labels as int64 (N,).

    Raises:
        DataError: There is no label, or one lies outside 0 to ``num_classes - 1``; the message starts with
            ``where``.
    """
    result = torch.as_tensor(labels, dtype=torch.int64)
    if len(result) == 0:
        raise DataError(f"{where} holds no images")
    low, high = int(result.min()), int(result.max())
    if low < 0 or high >= num_classes:
        raise DataError(
            f"{where} has label {low if low < 0 else high}; with {num_classes} classes they must be "
            f"0 to {num_classes - 1}"
        )
    return result
