"""CIFAR-10, CIFAR-100 (Krizhevsky 2009) and SVHN (Netzer et al. 2011), read by torchvision and held in memory.

Sizes and normalisation are the published constants of these data sets, so that a run can be planned before any file
exists.
"""

from abc import abstractmethod
from pathlib import Path
from typing import Any

import torch
from torchvision import datasets

from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.dataset import ArraySource
from dp_lightning.errors import DataError


class _TorchvisionImages(ImageDataModule):
    """Images that torchvision can download, and compares with their checksums.

    Args:
        root: Folder that holds the files in torchvision's layout (``cifar-10-batches-py``, ``cifar-100-python``,
            ``train_32x32.mat``), or into which they are downloaded.
        download: Download missing files into ``root`` before the run.
    """

    num_classes = 10
    in_channels = 3
    image_size = 32

    def __init__(self, root: str = "data", *, download: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = Path(root)
        self.download = download

    @abstractmethod
    def open(self, split: Split) -> tuple[torch.Tensor, Any]:
        """Read images (N, C, H, W) and labels (N,) with torchvision, which compares the files with their checksums."""

    def prepare_data(self) -> None:
        for split in self.own_splits:
            self.source(split)

    def read_split(self, split: Split) -> ArraySource:
        try:
            images, labels = self.open(split)
        except (OSError, RuntimeError) as error:
            raise DataError(
                f"{self.root} does not give the images of {type(self).__name__} ({error}). Set "
                f"{self.settings}.download: true, or {self.settings}.root to the folder that holds the files."
            ) from error
        return ArraySource(images.contiguous(), torch.as_tensor(labels, dtype=torch.int64))


class CIFAR10(_TorchvisionImages):
    """CIFAR-10: 50,000 training and 10,000 test images of 32x32 pixels in 10 classes."""

    num_available = 50_000
    published_mean = (0.4914, 0.4822, 0.4465)
    published_std = (0.2470, 0.2435, 0.2616)
    dataset_class = datasets.CIFAR10

    def open(self, split: Split) -> tuple[torch.Tensor, Any]:
        dataset = self.dataset_class(self.root, train=split == "train", download=self.download)
        return torch.from_numpy(dataset.data).permute(0, 3, 1, 2), dataset.targets


class CIFAR100(CIFAR10):
    """CIFAR-100: 50,000 training and 10,000 test images of 32x32 pixels in 100 classes."""

    num_classes = 100
    published_mean = (0.5071, 0.4865, 0.4409)
    published_std = (0.2673, 0.2564, 0.2762)
    dataset_class = datasets.CIFAR100


class SVHN(_TorchvisionImages):
    """SVHN: 73,257 training and 26,032 test images of 32x32 pixels in 10 classes.

    The extra images are not used. Augmentation only crops, since a mirrored digit has another shape.
    """

    num_available = 73_257
    published_mean = (0.4377, 0.4438, 0.4728)
    published_std = (0.1980, 0.2010, 0.1970)
    flip = False

    def open(self, split: Split) -> tuple[torch.Tensor, Any]:
        dataset = datasets.SVHN(self.root, split=split, download=self.download)
        return torch.from_numpy(dataset.data), dataset.labels
