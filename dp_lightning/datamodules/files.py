"""Images of a folder that have no labels, for predictions."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2

from dp_lightning.datamodules.dataset import Transform
from dp_lightning.datamodules.file_source import FileNames, FileSource, require_readable
from dp_lightning.datamodules.folder import warn_of_left_out
from dp_lightning.datamodules.pixels import PixelNormalization
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.models.feature_network import FeatureNetwork


class ImageFiles(lightning.LightningDataModule):
    """Every image file in a folder and the folders inside it, in the order of their paths, for ``dpl predict``.

    The shorter side is resized and the middle is cut out, as it was for the test images of the run. What is None comes
    from the checkpoint. Hidden files are left out.

    Args:
        root: The folder.
        image_size: Height and width of an image as the network receives it, in pixels.
        resized_to: The shorter side before the middle is cut out; ``image_size`` where the checkpoint does not say.
        num_classes: Number of classes of the network.
        in_channels: 3 for colour, 1 for grey.
        mean: Of the normalisation that the network was trained with.
        std: Likewise.
        features: What a linear probe was trained on: the arguments of ``FeatureNetwork``, whose features then take the
            place of the images.
        feature_weights: Where the file with the weights of that network lies now; None is where it lay.
        batch_size: Images at a time.
        num_workers: Processes that load images; 0 loads them in the main process.
        read_first: Decode every file before anything else, and name all that cannot be read.
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
        #: Of what the network receives.
        self.in_channels = in_channels if self._network is None else self._network.length
        self.resized_to = resized_to or image_size
        self.mean, self.std = mean, std
        self.batch_size, self.num_workers, self.read_first = batch_size, num_workers, read_first
        #: There is nothing to train on.
        self.num_train = None
        self.paths: list[Path] = []

    def setup(self, stage: str | None = None) -> None:
        if stage not in (None, "predict"):
            raise ConfigurationError("data ImageFiles has no labels: it is for dpl predict alone.")
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
        return DataLoader(
            _Unlabelled(self),
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            pin_memory=torch.cuda.is_available(),
        )

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Features in the place of the images, for a probe."""
        return batch if self._network is None else self._network.to(batch.device)(batch)


class _Unlabelled(Dataset[Tensor]):
    """Item i is the float image (C, H, W) of the i-th file."""

    def __init__(self, data: ImageFiles) -> None:
        assert data.image_size is not None
        assert data.mean is not None
        assert data.std is not None
        steps: list[Transform] = [v2.Resize(data.resized_to), v2.CenterCrop(data.image_size)]
        self._transform = v2.Compose(steps if data.channels == 3 else [*steps, _grey])
        self._normalize = PixelNormalization(data.mean, data.std)
        self._source = FileSource(map(str, data.paths), torch.zeros(len(data.paths), dtype=torch.int64))

    def __len__(self) -> int:
        return len(self._source.paths)

    def __getitem__(self, index: int) -> Tensor:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Tensor]:
        return list(self._normalize(self._source.read(indices, self._transform)))


def _grey(image: Tensor) -> Tensor:
    """Luma of uint8 (3, H, W) by ITU-R 601, rounded, so that grey stays what it is: uint8 (1, H, W)."""
    red, green, blue = image.to(torch.int32)
    return ((299 * red + 587 * green + 114 * blue + 500) // 1000).to(torch.uint8).unsqueeze(0)
