"""Features of a frozen network, computed once and kept in files, so that only a head is trained on them.

The network must have been trained on public data, or on none. Its features of private images are as private as the
images: no noise protects them, so their files are kept in a folder that only their owner can read. Anyone who can write
to a cache decides what is trained on.
"""

import fcntl
import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm import tqdm

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.datamodules.base import ImageDataModule, Split
from dp_lightning.datamodules.dataset import ImageDataset, normalized
from dp_lightning.models.feature_network import FeatureNetwork
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy.person_ids import Group

# Images of a file of features: what an interruption loses at most.
_PIECE = 4096


class _FeatureSet(TensorDataset):
    """Features, float32 as they are handed out, and labels, with the person id of each image if the data has them."""

    groups: Iterable[Group] | None = None

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        features, label = super().__getitem__(index)
        return features.float(), label


def _of_images(name: str) -> property:
    return property(attrgetter(f"images.{name}"))


class CachedFeatures(lightning.LightningDataModule):
    """Features of a frozen network instead of the images.

    A batch is (features, labels (n,)). The pooled features of a pretrained timm network are vectors, float32 (n, D);
    scattering coefficients, which need no other data, are maps, float32 (n, D, h, w), or (n, V, D, h, w) with V views,
    kept in 16 bits. Images are not augmented, since each has its features once. The first run computes them on its
    device and writes them to ``cache``; later runs read them, and continue where an earlier one was interrupted. They
    are computed again if the network, its weights or timm's version changes, or a label, or an image: a file is the
    same while its name, its size and its modification time are, and an image of an array while its pixels are.

    Args:
        images: Where the images come from.
        backbone: Name in timm's registry, such as ``vit_small_patch16_224.augreg_in21k``, or ``scattering``.
        weights: File with its weights; None downloads timm's. Scattering has none.
        cache: Folder of the features.
        input_size: Height and width that images are resized to; None uses the network's ``img_size`` if it is set, or
            else its own size, and with scattering that of the images.
        batch_size: Images per batch while features are computed.
        backbone_kwargs: Further arguments of the network; those of `ScatteringFeatures` are ``scales`` (2), ``angles``
            (8), ``mirror``, ``shift`` and ``average`` (false).

    Raises:
        ConfigurationError: The network cannot be built, or nothing can be written to ``cache``.
    """

    #: Features need no normalisation.
    mean, std = (0.0,), (1.0,)
    # As of the images.
    num_classes, num_train, num_train_groups = map(_of_images, ("num_classes", "num_train", "num_train_groups"))
    class_names, label_names, multi_label = map(_of_images, ("class_names", "label_names", "multi_label"))

    def __init__(
        self,
        images: ImageDataModule,
        backbone: str,
        *,
        weights: str | None = None,
        cache: str = "features",
        input_size: int | None = None,
        batch_size: int = 64,
        backbone_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.images = images
        self.images.augment = False
        self.images.settings = "data.init_args.images.init_args"
        self.batch_size = batch_size
        #: If `dpl export` has written this file, its private steps count in a private run on the features.
        self.weights_file = weights
        self._build = partial(
            FeatureNetwork,
            backbone,
            weights=weights,
            input_size=input_size,
            backbone_kwargs=backbone_kwargs or {},
            in_channels=images.in_channels,
            mean=images.mean,
            std=images.std,
        )
        if weights is None:
            # The network is built, and its weights are downloaded, when features are computed.
            with torch.device("meta"), without_weights():
                self._network = self._build()
        else:
            self._network = self._build()
        self.num_views = self._network.num_views
        pixels = {"window": images.window, "version": 2, "resized_to": images.resized_to, "size": images.image_size}
        made_by = [type(images).__name__, version("timm"), {**self._network.settings, "weights": None, **pixels}]
        key = hashlib.sha256(json.dumps(made_by, default=str).encode()).hexdigest()[:12]
        #: The name of the folder changes with the network and the preparation of the images.
        self.folder = Path(cache) / f"{backbone}-{key}"
        self._sets: dict[Split, _FeatureSet] = {}

    @property
    def in_channels(self) -> int:
        """Length D of a feature vector, or the channels of a map."""
        return self._network.length

    @property
    def image_size(self) -> int:
        """Height and width of a map of features; 1 for a vector."""
        return self._network.map_size(self.images.image_size)

    @property
    def feature_settings(self) -> dict[str, Any]:
        """The network and the preparation of its images, from which features of other images can be computed."""
        images = {name: getattr(self.images, name) for name in ("image_size", "resized_to", "window")}
        return {"network": self._network.settings, **images}

    def prepare_data(self) -> None:
        stage = None if self.trainer is None or self.trainer.state.fn is None else self.trainer.state.fn.value
        self.images.trainer = self.trainer
        self.images.prepare_data()
        self.images.setup(stage)
        require_writable(self.folder.parent, "data.init_args.cache")
        self.folder.mkdir(exist_ok=True, mode=0o700)
        with (self.folder / "lock").open("w") as lock:
            with suppress(OSError):  # on a file system without locks, two runs compute the same features
                fcntl.flock(lock, fcntl.LOCK_EX)
            for split, dataset in self._datasets(stage).items():
                for path, piece in self._files(split, dataset).items():
                    if not path.exists():
                        self._write(path, Subset(dataset, piece), f"Features of the {split} images")
        rank_zero_info(f"The features of the images are in {self.folder}.")

    def setup(self, stage: str | None = None) -> None:
        for split, dataset in self._datasets(stage).items():
            if split not in self._sets:
                features = torch.cat([load_file(path)["features"] for path in self._files(split, dataset)])
                self._sets[split] = _FeatureSet(features, dataset.labels)
                self._sets[split].groups = dataset.groups

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> dict[str, DataLoader] | list[DataLoader]:
        return {split: self._loader(split) for split in self._sets if split != "train"} or []

    def test_dataloader(self) -> DataLoader:
        return self._loader("test")

    predict_dataloader = test_dataloader

    def _loader(self, split: Split, *, shuffle: bool = False) -> DataLoader:
        return DataLoader(self._sets[split], batch_size=self.images.eval_batch_size, shuffle=shuffle)

    def _datasets(self, stage: str | None) -> dict[Split, ImageDataset]:
        """Return the images that a stage of a run needs; all for None."""
        if stage in ("test", "predict"):
            return {"test": self.images.test_dataset}
        found: dict[Split, ImageDataset | None] = {}
        if stage != "validate":
            found["train"] = self.images.train_dataset
        found["val"] = self.images.val_dataset
        if "test" in self.images.own_splits:
            found["test"] = self.images.test_dataset
        return {split: dataset for split, dataset in found.items() if dataset is not None}

    def _files(self, split: Split, dataset: ImageDataset) -> dict[Path, range]:
        """Return the files of a split's features with their images; the names change if an image or a label does."""
        digest = hashlib.sha256(dataset.labels.numpy().tobytes() + dataset.source.digest(dataset.indices)).hexdigest()
        pieces = [range(k, min(k + _PIECE, len(dataset))) for k in range(0, len(dataset), _PIECE)]
        return {self.folder / f"{split}-{digest[:16]}-{piece.start}.safetensors": piece for piece in pieces}

    def _write(self, path: Path, dataset: Subset[Any], what: str) -> None:
        """Compute the features of images and write them; a bar on a terminal says ``what`` is computed."""
        if self._network.device.type == "meta":
            self._network = self._build()
        network = self._network.to(torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device)
        loader = DataLoader(dataset, self.batch_size, num_workers=self.images.num_workers)
        features: list[Tensor] = []
        with torch.inference_mode():
            for images, _ in tqdm(loader, desc=what, unit="batch", disable=None):
                pixels = normalized(images.to(network.device), self.images.mean, self.images.std)
                features.append(network(pixels).cpu().to(network.stored_as))
        with replacing(path, private=True) as file:
            file.write(save({"features": torch.cat(features)}))
        self._network = network.cpu()
