"""Unlabelled images in a folder, for predictions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms import v2

from dp_lightning.datamodules.dataset import Transform
from dp_lightning.datamodules.file_source import IMAGE_EXTENSIONS, FileNames, decode, grey
from dp_lightning.datamodules.folder import require_channels, require_folder, warn_of_left_out
from dp_lightning.datamodules.pixels import PixelNormalization
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
        in_channels: 3 for colour, 1 for grey.
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
    ) -> None:
        super().__init__()
        self.root = Path(root)
        given = {"image_size": image_size, "num_classes": num_classes, "in_channels": in_channels}
        if in_channels is not None:
            require_channels(in_channels)
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
        self._pixels, self.num_classes, self.channels = image_size, num_classes, in_channels
        #: Height, width and channels of what the classifier receives: of the images, or of their features.
        self.image_size, self.in_channels = image_size, in_channels
        if self._network is not None:
            assert image_size is not None
            self.image_size, self.in_channels = self._network.map_size(image_size), self._network.length
        self.resized_to = resized_to or image_size
        self.mean, self.std = mean, std
        self.batch_size, self.num_workers = batch_size, num_workers
        #: There is nothing to train on.
        self.num_train = None
        self.paths: list[Path] = []
        self.problems: list[str | None] = []

    def setup(self, stage: str | None = None) -> None:
        if stage not in (None, "predict"):
            raise ConfigurationError("ImageFiles has no labels: it can be used only with dpl predict.")
        require_folder(self.root, "data.init_args.root")
        found = self.root.rglob("*") if self.root.is_dir() else []
        shown = (path for path in found if not any(part.startswith(".") for part in path.relative_to(self.root).parts))
        files = [path for path in shown if path.is_file()]
        self.paths = sorted(path for path in files if path.name.lower().endswith(IMAGE_EXTENSIONS))
        others = (path for path in files if not path.name.lower().endswith(IMAGE_EXTENSIONS))
        warn_of_left_out(Counter(path.suffix.lower() or "no extension" for path in others), str(self.root))
        if not self.paths:
            raise DataError(f"{self.root} holds no image files; set data.init_args.root to a folder of images")
        self.problems = []

    def predict_dataloader(self) -> DataLoader:
        assert self._pixels is not None
        assert self.mean is not None
        assert self.std is not None
        steps: list[Transform] = [v2.Resize(self.resized_to), v2.CenterCrop(self._pixels)]
        return DataLoader(
            _Files(
                FileNames(map(str, self.paths)),
                v2.Compose(steps if self.channels == 3 else [*steps, grey]),
                PixelNormalization(self.mean, self.std),
                torch.zeros(self.channels or 3, self._pixels, self._pixels),
            ),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=_batch,
            pin_memory=torch.cuda.is_available(),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Keep the problems of the files; replace the images by their features, for a probe."""
        images, problems = batch
        self.problems += problems
        return images if self._network is None else self._network.to(images.device)(images)


class _Files(Dataset[tuple[Tensor, str | None]]):
    """Item i is (image float32 (C, H, W), None), or (``blank``, the reason) if file i cannot be read."""

    def __init__(self, paths: FileNames, prepare: Transform, normalize: Transform, blank: Tensor) -> None:
        self._paths, self._prepare, self._normalize, self._blank = paths, prepare, normalize, blank

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, str | None]:
        try:
            image = decode(self._paths[index])
        except ValueError as error:
            return self._blank, str(error)
        return self._normalize(self._prepare(image).unsqueeze(0))[0], None


def _batch(items: Sequence[tuple[Tensor, str | None]]) -> tuple[Tensor, list[str | None]]:
    return torch.stack([image for image, _ in items]), [problem for _, problem in items]
