"""Image data sets that know their classes and their number of training images before training starts."""

from dp_lightning.datamodules.base import ImageDataModule
from dp_lightning.datamodules.digits import Digits
from dp_lightning.datamodules.features import CachedFeatures
from dp_lightning.datamodules.folder import ImageFolder, ImageNet, TinyImageNet
from dp_lightning.datamodules.image_files import ImageFiles
from dp_lightning.datamodules.image_table import ImageTable
from dp_lightning.datamodules.npz import NpzImages
from dp_lightning.datamodules.torchvision_sets import CIFAR10, CIFAR100, SVHN

__all__ = [
    "CIFAR10",
    "CIFAR100",
    "SVHN",
    "CachedFeatures",
    "Digits",
    "ImageDataModule",
    "ImageFiles",
    "ImageFolder",
    "ImageNet",
    "ImageTable",
    "NpzImages",
    "TinyImageNet",
]
