"""What every image data module shares: the validation split, the transforms and the loaders.

A private run is planned from ``num_train`` and ``num_classes`` before any image is read, so a data module takes them
from public constants, file names or array headers, and the images read later must agree with them.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal

import lightning
import numpy as np
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from dp_lightning.datamodules.dataset import ImageDataset, ImageSource, Transform, normalized
from dp_lightning.datamodules.decoding import Window
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.person_ids import Group

Split = Literal["train", "val", "test"]


class ImageDataModule(lightning.LightningDataModule, ABC):
    """Base class of the image data modules; a subclass says where the images come from.

    Data sets and loaders return images as bytes, and the module normalises them on the training device
    (``on_after_batch_transfer``, which the Trainer calls).

    The privacy guarantee covers only the training part. Validation and test images, and every number computed from
    them, are outside it. ``mean`` and ``std`` are public constants: statistics computed from private images would leak
    them, since no noise is added to them.

    Args:
        mean: Mean of each channel on the scale 0 to 1, subtracted from the images; one number serves all
            channels. A public constant, never computed from private images; None is ``published_mean``.
        std: Standard deviation of each channel on the same scale, a public constant like ``mean``.
        val_fraction: Fraction of the training set, in [0, 1), held out for validation: of its persons, if the data
            identifies them, so that no person is in both parts.
        split_seed: Seed of that split. It is public: the same seed gives the same split on every machine.
        eval_batch_size: Images per batch of validation, test and prediction.
        num_workers: Processes that load images; 0 loads them in the main process. They are copies of it, and share the
            position in a file that a source of your own keeps open: open such a file in each process.
        augment: Random crop and flip of the training images.
        crop_edges: What a crop shows beyond the edge of an image: zeros, or the mirrored image.
    """

    #: The constants that the data set was published with, or 0.5.
    published_mean: tuple[float, ...] = (0.5,)
    published_std: tuple[float, ...] = (0.5,)
    #: Where the settings stand in a configuration, for messages.
    settings = "data.init_args"
    #: Zero pixels on each side before the random crop.
    crop_padding = 4
    #: Whether a mirrored image still shows its class.
    flip = True
    #: The values that are black and white in the files, a public choice; None for files of 8 bits.
    window: Window | None = None

    def __init__(
        self,
        *,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        val_fraction: float = 0.0,
        split_seed: int = 0,
        eval_batch_size: int = 256,
        num_workers: int = 0,
        augment: bool = True,
        crop_edges: Literal["zeros", "mirror"] = "zeros",
    ) -> None:
        super().__init__()
        self.mean = self.published_mean if mean is None else tuple(mean)
        self.std = self.published_std if std is None else tuple(std)
        self.val_fraction, self.split_seed = val_fraction, split_seed
        self.eval_batch_size, self.num_workers = eval_batch_size, num_workers
        self.augment, self.crop_edges = augment, crop_edges
        self._sources: dict[Split, ImageSource] = {}

    @property
    @abstractmethod
    def num_classes(self) -> int:
        """Number of classes, with labels 0 to ``num_classes - 1``, or of the labels that an image may have."""

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
    def multi_label(self) -> bool:
        """Whether an image may have several labels: then labels are float32 (N, ``num_classes``) of 0 and 1."""
        return False

    @property
    def label_names(self) -> list[str]:
        """Names of the classes, or of the labels that an image may have, in order; numbers if they have no names."""
        return self.class_names or [str(number) for number in range(self.num_classes)]

    @property
    def resized_to(self) -> int | None:
        """Length of the shorter side in pixels before the centre crop; None if images are not resized."""
        return None

    @property
    def own_splits(self) -> tuple[Split, ...]:
        """The splits that the data itself has."""
        return ("train", "test")

    @abstractmethod
    def read_split(self, split: Split) -> ImageSource:
        """Open one of ``own_splits``.

        Raises:
            DataError: Its files are missing or malformed.
        """

    def groups(self, split: Split) -> list[Group] | None:
        """Return the person id of each image in one of ``own_splits``, in order; no image is read for it.

        None means that the data does not identify persons.

        Raises:
            DataError: An id is missing or invalid.
        """
        return None

    @property
    def num_train(self) -> int:
        """Number of training images after the validation split is taken out: the N of a plan that counts images.

        Raises:
            ConfigurationError: The data has its own validation set, or a part would be empty.
        """
        return len(self._split_indices()[0])

    @property
    def num_train_groups(self) -> int:
        """Number of persons in the training set without the validation split: the N of a plan that counts persons.

        Raises:
            ConfigurationError: The data does not identify persons.
        """
        if (persons := self._groups_at("train", self._split_indices()[0])) is None:
            raise ConfigurationError(
                f"privacy.unit_of_privacy is group, but {type(self).__name__} does not know which images belong to "
                f"the same person. Set {self.settings}.group_folders or group_file of ImageFolder, "
                "group_column of ImageTable, or add the array train_groups to the file of NpzImages."
            )
        return len(set(persons))

    def setup(self, stage: str | None = None) -> None:
        """Find the images and their persons, so that an error in them comes before a run."""
        if stage not in ("test", "predict"):
            self._split_indices()
            for split in self.own_splits:
                self.groups(split)

    def image_transform(self) -> Transform | None:
        """The transform of each single image, without randomness: from the image as it is read to ``image_size``."""
        return None

    def train_transform(self) -> Transform | None:
        """The transform of a training image: ``image_transform``, then a random crop and flip with ``augment``."""
        if not self.augment:
            return self.image_transform()
        mode = "symmetric" if self.crop_edges == "mirror" else "constant"
        crop = v2.RandomCrop(self.image_size, padding=self.crop_padding, padding_mode=mode)
        steps = [self.image_transform(), crop, v2.RandomHorizontalFlip() if self.flip else None]
        return v2.Compose([step for step in steps if step is not None])

    @property
    def train_dataset(self) -> ImageDataset:
        """The ``num_train`` training images, augmented."""
        return self._dataset("train", self._split_indices()[0], train=True)

    @property
    def val_dataset(self) -> ImageDataset | None:
        """The validation images, or None when there are none."""
        if "val" in self.own_splits:
            return self._dataset("val", torch.arange(len(self.source("val").labels)))
        held_out = self._split_indices()[1]
        return self._dataset("train", held_out) if len(held_out) else None

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
        return self._dataset("test", torch.arange(len(self.source("test").labels)))

    def train_dataloader(self) -> DataLoader:
        """Shuffled batches. A private run replaces the sampler with its own."""
        return self._loader(self.train_dataset, shuffle=True)

    def val_dataloader(self) -> dict[str, DataLoader] | list[DataLoader]:
        """Loaders by name, ``val`` and ``test``, of the splits that exist; an empty list if there are none.

        A module whose ``validation_step`` takes no ``dataloader_idx`` gets one of them, ``val`` if it exists.
        """
        val_dataset = self.val_dataset
        loaders = {} if val_dataset is None else {"val": self._loader(val_dataset)}
        module = None if self.trainer is None else self.trainer.lightning_module
        step = getattr(module, "validation_step", None)
        takes_two = step is None or is_param_in_hook_signature(step, "dataloader_idx", min_args=3)
        if "test" in self.own_splits and (takes_two or not loaders):
            loaders["test"] = self._loader(self.test_dataset)
            if not takes_two:
                rank_zero_warn("There are no validation images: validation_step gets those of the test set.")
        return loaders or []

    def test_dataloader(self) -> DataLoader:
        return self._loader(self.test_dataset)

    predict_dataloader = test_dataloader

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Normalise, on the training device, the images that the loaders return as bytes."""
        images, *rest = batch
        if images.dtype != torch.uint8:
            return batch
        return [normalized(images, self.mean, self.std), *rest]

    def source(self, split: Split) -> ImageSource:
        if split not in self._sources:
            self._sources[split] = self.read_split(split)
        return self._sources[split]

    def _split_indices(self) -> tuple[Tensor, Tensor]:
        """Return the places of the training and of the validation images, int64; a person is on one side alone."""
        persons = self.groups("train")
        units, what = np.arange(self.num_available), "images"
        if persons is not None:  # they are numbered in the order of their ids
            units, what = np.unique(np.array(persons), return_inverse=True)[1], "persons"
        count = int(units.max(initial=-1)) + 1
        held_out = round(self.val_fraction * count)
        if self.val_fraction and "val" in self.own_splits:
            raise ConfigurationError("the data has its own validation set; set val_fraction to 0")
        if self.val_fraction and not 0 < held_out < count:
            raise ConfigurationError(f"val_fraction={self.val_fraction} of {count} {what} leaves an empty part")
        order = torch.randperm(count, generator=torch.Generator().manual_seed(self.split_seed))
        chosen = torch.from_numpy(np.isin(units, order[:held_out].numpy()))
        return (~chosen).nonzero().flatten(), chosen.nonzero().flatten()

    def _groups_at(self, split: Split, indices: Tensor) -> list[Group] | None:
        groups = self.groups(split)
        return None if groups is None else [groups[index] for index in indices.tolist()]

    def _dataset(self, split: Split, indices: Tensor, *, train: bool = False) -> ImageDataset:
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) not in (1, self.in_channels):
                raise ConfigurationError(f"{name} has {len(values)} numbers for {self.in_channels} channels")
        transform = self.train_transform() if train else self.image_transform()
        return ImageDataset(self.source(split), indices, transform, self._groups_at(split, indices))

    def _loader(self, dataset: ImageDataset, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=self.eval_batch_size,
            shuffle=shuffle,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            pin_memory=torch.cuda.is_available(),
        )
