"""The 8x8 digits of scikit-learn (Alpaydin and Kaynak 1998): a data set that needs no download.

They are the 1,797 test images of the UCI "Optical Recognition of Handwritten Digits" set and come with
scikit-learn.
"""

from typing import Any

import torch

from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.dataset import ArraySource

NUM_TEST = 360
# The split is public, so that everybody's test images are the same.
SPLIT_SEED = 0
# The pixels of the original are whole numbers from 0 to 16.
MAX_PIXEL = 16


class Digits(ImageDataModule):
    """Digits: 1,437 training and 360 test images of 8x8 pixels with one channel, in 10 classes.

    The split is stratified by class and always the same.

    Args:
        augment: Random crop of the training images after one pixel of padding.
    """

    num_classes = 10
    in_channels = 1
    image_size = 8
    num_available = 1_797 - NUM_TEST
    published_mean, published_std = (0.305,), (0.376,)
    crop_padding = 1
    flip = False

    def __init__(self, *, augment: bool = False, **kwargs: Any) -> None:
        super().__init__(augment=augment, **kwargs)

    def read_split(self, split: Split) -> ArraySource:
        from sklearn.datasets import load_digits  # takes a good part of a second, and only these images need it
        from sklearn.model_selection import train_test_split

        digits = load_digits()
        images = torch.from_numpy(digits.images / MAX_PIXEL * 255).round().to(torch.uint8).unsqueeze(1)
        places, labels = list(range(len(images))), torch.from_numpy(digits.target)
        train, test = train_test_split(places, test_size=NUM_TEST, stratify=labels, random_state=SPLIT_SEED)
        chosen = test if split == "test" else train
        return ArraySource(images[chosen], labels[chosen])
