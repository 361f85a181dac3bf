"""Unlabelled images in a folder, for predictions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from dp_lightning.datamodules.dataset import ImageDataset, Transform
from dp_lightning.datamodules.file_source import FileNames, FileSource, require_readable
from dp_lightning.datamodules.folder import warn_of_left_out
from dp_lightning.datamodules.pixels import PixelNormalization
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.models.feature_network import FeatureNetwork


class ImageFiles(lightning.LightningDataModule):
    """Every image file in a folder and its subfolders, in the order of their paths, for ``dpl predict``.

    The shorter side is resized and the centre is cropped, as for the test images of the run. Settings that are None
    come from the checkpoint. Hidden files are left out.

    Args:
        root: The folder.
        image_size: Height and width of an image as the network receives it, in pixels.
        resized_to: Length of the shorter side before the centre crop; ``image_size`` if the checkpoint does not say.
        num_classes: Number of classes of the network.
        in_channels: 3 for colour, 1 for grey.
        mean: Mean of each channel in the normalisation that the network was trained with.
        std: Standard deviation of each channel, likewise.
        features: For a linear probe, the arguments of the ``FeatureNetwork`` that it was trained on, whose features
            then replace the images.
        feature_weights: The file with the weights of that network; None is its path during training.
        batch_size: Images per batch.
        num_workers: Processes that load images; 0 loads them in the main process.
        read_first: Decode every file first, and name all that cannot be read.
    """

    def __init__(
        self,
        root: str,
        *,
        image_size: int | None = None,
        resized_to: int | None = None,
        num_classes: int | None = None,
        in_channels: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        features: dict[str, Any] | None = None,
        feature_weights: str | None = None,
        batch_size: int = 256,
        num_workers: int = 0,
        read_first: bool = False,
    ) -> None:
        super().__init__()
        self.root = Path(root)
        given = {"image_size": image_size, "num_classes": num_classes, "in_channels": in_channels}
        if in_channels not in (None, 1, 3):
            raise ConfigurationError(f"data.init_args.in_channels is {in_channels}; files give 1 or 3 channels.")
        missing = [name for name, value in {**given, "mean": mean, "std": std}.items() if value is None]
        if missing:
            raise ConfigurationError(
                f"data.init_args.{', '.join(missing)}: the checkpoint does not say. Give the values that the network "
                "was trained with."
            )
        self._network = None
        if features is not None:
            setting = "data.init_args.feature_weights"
            self._network = FeatureNetwork.again(features, weights=feature_weights, setting=setting)
        self.image_size, self.num_classes, self.channels = image_size, num_classes, in_channels
        #: Channels of the images, or length of the feature vectors, that the classifier receives.
        self.in_channels = in_channels if self._network is None else self._network.length
        self.resized_to = resized_to or image_size
        self.mean, self.std = mean, std
        self.batch_size, self.num_workers, self.read_first = batch_size, num_workers, read_first
        #: There is nothing to train on.
        self.num_train = None
        self.paths: list[Path] = []

    def setup(self, stage: str | None = None) -> None:
        if stage not in (None, "predict"):
            raise ConfigurationError("ImageFiles has no labels: it can be used only with dpl predict.")
        found = self.root.rglob("*") if self.root.is_dir() else []
        shown = (path for path in found if not any(part.startswith(".") for part in path.relative_to(self.root).parts))
        files = [path for path in shown if path.is_file()]
        self.paths = sorted(path for path in files if path.name.lower().endswith(IMG_EXTENSIONS))
        others = (path for path in files if not path.name.lower().endswith(IMG_EXTENSIONS))
        warn_of_left_out(Counter(path.suffix.lower() or "no extension" for path in others), str(self.root))
        if not self.paths:
            raise DataError(f"{self.root} holds no image files; set data.init_args.root to a folder of images")
        if self.read_first:
            require_readable(FileNames(map(str, self.paths)), self.num_workers, str(self.root))

    def predict_dataloader(self) -> DataLoader:
        assert self.image_size is not None
        assert self.mean is not None
        assert self.std is not None
        steps: list[Transform] = [v2.Resize(self.resized_to), v2.CenterCrop(self.image_size)]
        return DataLoader(
            ImageDataset(
                FileSource(map(str, self.paths), torch.zeros(len(self.paths), dtype=torch.int64)),
                torch.arange(len(self.paths)),
                v2.Compose(steps if self.channels == 3 else [*steps, _grey]),
                PixelNormalization(self.mean, self.std),
            ),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=_images,
            pin_memory=torch.cuda.is_available(),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Replace the images by their features, for a probe."""
        return batch if self._network is None else self._network.to(batch.device)(batch)


def _images(examples: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The images without their labels, which mean nothing here."""
    return torch.stack([image for image, _ in examples])


def _grey(image: Tensor) -> Tensor:
    """Luma of uint8 (3, H, W) by ITU-R 601, rounded, so that grey stays unchanged: uint8 (1, H, W)."""
    red, green, blue = image.to(torch.int32)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8).unsqueeze(0)
