"""Unlabelled images in a folder, for predictions."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from dp_lightning.datamodules.dataset import Transform, normalized
from dp_lightning.datamodules.decoding import Window, fitted, open_image
from dp_lightning.datamodules.listing import files_in, what_is_in
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.models.feature_network import FeatureNetwork


class ImageFiles(lightning.LightningDataModule):
    """Every image file in a folder and its subfolders, in the order of their paths, for ``dpl predict``.

    The shorter side is resized and the centre is cropped, as for the test images of the run. Settings that are None
    come from the checkpoint. Hidden files are left out. A file that cannot be read gets no prediction; ``problems``
    says why.

    Args:
        root: The folder.
        image_size: Height and width of an image as the network receives it, in pixels.
        resized_to: Length of the shorter side before the centre crop; ``image_size`` if the checkpoint does not say.
        num_classes: Number of classes of the network.
        multi_label: Whether an image may have several labels.
        in_channels: 3 for colour, 1 for grey.
        window: The values in the files that are black and white, as in training; None for files of 8 bits.
        mean: Mean of each channel in the normalisation that the network was trained with.
        std: Standard deviation of each channel, likewise.
        features: For a linear probe, the arguments of the ``FeatureNetwork`` that it was trained on, whose features
            then replace the images.
        feature_weights: The file with the weights of that network; None is its path during training.
        batch_size: Images per batch.
        num_workers: Processes that load images; 0 loads them in the main process.

    Attributes:
        paths: The files in the order of the predictions.
        problems: Why each file that was loaded so far could not be read, in the same order; None for those that could.
        skipped: The files that are not images by the ends of their names.
        num_constant: The number of images that were loaded so far whose pixels are all equal.
    """

    #: There is nothing to train on.
    num_train = None

    def __init__(
        self,
        root: str,
        *,
        image_size: int | None = None,
        resized_to: int | None = None,
        num_classes: int | None = None,
        multi_label: bool | None = None,
        in_channels: int | None = None,
        window: Window | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        features: dict[str, Any] | None = None,
        feature_weights: str | None = None,
        batch_size: int = 256,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        self.root = Path(root)
        if image_size is None or num_classes is None or in_channels is None or mean is None or std is None:
            raise ConfigurationError(
                "The checkpoint does not say all of what is needed. Give the values that the network was trained with "
                f"in data.init_args: {image_size=}, {num_classes=}, {in_channels=}, {mean=}, {std=}."
            )
        self._prepare = partial(fitted, shorter_side=resized_to or image_size, size=image_size, in_channels=in_channels)
        self._open = partial(open_image, window=window)
        self._normalize = partial(normalized, mean=mean, std=std)
        self._blank = torch.zeros(in_channels, image_size, image_size)
        self._network = None
        #: Height, width and channels of what the classifier receives: of the images, or of their features.
        self.image_size, self.in_channels, self.num_classes = image_size, in_channels, num_classes
        self.multi_label = multi_label
        if features is not None:
            setting = "data.init_args.feature_weights"
            self._network = FeatureNetwork.again(features, weights=feature_weights, setting=setting)
            self.image_size, self.in_channels = self._network.map_size(image_size), self._network.length
        self.batch_size, self.num_workers = batch_size, num_workers
        self.paths: list[Path] = []
        self.problems: list[str | None] = []
        self.skipped: list[str] = []
        self.num_constant = 0

    def setup(self, stage: str | None = None) -> None:
        images, others = files_in(self.root)
        self.paths, self.skipped = sorted(map(Path, images)), others
        if not self.paths:
            found = what_is_in(self.root) if self.root.exists() else f"{self.root} does not exist."
            raise DataError(f"There are no image files; set data.init_args.root to a folder of images. {found}")
        self.problems = []

    def predict_dataloader(self) -> DataLoader:
        read = partial(_read, decode=self._open, prepare=self._prepare, normalize=self._normalize, blank=self._blank)
        return DataLoader(
            np.array(self.paths, dtype=np.str_),  # type: ignore[arg-type]
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=read,
            pin_memory=torch.cuda.is_available(),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keep the problems of the files; replace the images by their features, for a probe."""
        images, problems = batch
        self.problems += problems
        low, high = images.flatten(2).aminmax(dim=2)
        constant = (low == high).all(dim=1).tolist()
        self.num_constant += sum(each and why is None for each, why in zip(constant, problems, strict=True))
        return images if self._network is None else self._network.to(images.device)(images)


def _read(
    paths: Sequence[str], *, decode: Transform, prepare: Transform, normalize: Transform, blank: Tensor
) -> tuple[Tensor, list[str | None]]:
    """Return images, float32 (n, C, H, W), and why each file cannot be read: ``blank`` takes the place of its image."""
    images, problems = [], list[str | None]()
    for path in paths:
        try:
            images.append(normalize(prepare(decode(path)).unsqueeze(0))[0])
            problems.append(None)
        except ValueError as error:
            images.append(blank)
            problems.append(str(error))
    return torch.stack(images), problems
