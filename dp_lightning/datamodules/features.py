"""Features of a frozen network, computed once and kept in files, so that only a head is trained on them.

The network must have been trained on public data, or on none. Its features of private images are as private as the
images: no noise protects them, so their files are kept in a folder that only their owner can read. Anyone who can write
to a cache decides what is trained on.
"""

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm import tqdm

from dp_lightning.atomic_files import replacing, require_writable
from dp_lightning.datamodules.base import ImageDataModule, Split, require_whole
from dp_lightning.datamodules.dataset import ImageDataset
from dp_lightning.errors import DataError
from dp_lightning.models.feature_network import FeatureNetwork
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy.person_ids import Group

# Images per file: an interruption loses the features of one file.
_PER_FILE = 4096


class _FeatureSet(TensorDataset):
    """Features, float32 as they are handed out, and labels, with the person id of each image if the data has them."""

    groups: Iterable[Group] | None = None

    def __getitem__(self, index: Any) -> tuple[Tensor, ...]:
        features, label = super().__getitem__(index)
        return features.float(), label

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, ...]]:
        rows = torch.as_tensor(indices)
        features, labels = (tensor[rows] for tensor in self.tensors)
        return list(zip(features.float(), labels, strict=True))


class CachedFeatures(lightning.LightningDataModule):
    """Features of a frozen network instead of the images.

    A batch is (features, labels (n,)). The pooled features of a pretrained timm network are vectors, float32 (n, D);
    scattering coefficients, which need no other data, are maps, float32 (n, D, h, w), kept in 16 bits. Images are not
    augmented, since each has its features once. The first run computes them on its device and writes them to ``cache``;
    later runs with the same images and the same network read them. Other images or labels get files of their own. On a
    CPU, ``num_workers`` of the images is the number of processes that compute them.

    Args:
        images: Where the images come from.
        backbone: Name in timm's registry, such as ``vit_small_patch16_224.augreg_in21k``, or ``scattering``.
        weights: File with its weights; None downloads timm's. Scattering has none.
        cache: Folder of the features.
        input_size: Height and width that images are resized to; None uses the network's ``img_size`` if it is set, or
            else its own size, and with scattering that of the images.
        batch_size: Images per batch while features are computed.
        backbone_kwargs: Further arguments of the network; ``scales`` (2) and ``angles`` (8) of scattering.

    Raises:
        ConfigurationError: ``batch_size`` is not a whole number of at least 1, or the network cannot be built.
        DataError: A file of the cache is damaged.
    """

    #: Features need no normalisation.
    mean, std = (0.0,), (1.0,)

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
        require_whole("batch_size", batch_size, at_least=1)
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
        facts = {**self._network.settings, "weights": None, "resized_to": images.resized_to, "size": images.image_size}
        key = hashlib.sha256(json.dumps([type(images).__name__, facts], default=str).encode()).hexdigest()[:12]
        #: The name of the folder changes with the network and the preparation of the images.
        self.folder = Path(cache) / f"{backbone}-{key}"
        self._sets: dict[Split, _FeatureSet] = {}

    @property
    def num_classes(self) -> int:
        return self.images.num_classes

    @property
    def class_names(self) -> list[str] | None:
        return self.images.class_names

    @property
    def num_train(self) -> int:
        return self.images.num_train

    @property
    def num_train_groups(self) -> int:
        return self.images.num_train_groups

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
        images = {"image_size": self.images.image_size, "resized_to": self.images.resized_to}
        return {"network": self._network.settings, **images}

    def check_files(self) -> None:
        self.images.check_files()

    def prepare_data(self) -> None:
        stage = None if self.trainer is None or self.trainer.state.fn is None else self.trainer.state.fn.value
        self.images.trainer = self.trainer
        self.images.prepare_data()
        self.images.setup(stage)
        with _only_this_run_in(self.folder):
            for split, dataset in self._datasets(stage).items():
                if missing := [(rows, path) for rows, path in self._files(split, dataset) if not path.exists()]:
                    self._write(missing, dataset, f"Features of the {split} images")

    def setup(self, stage: str | None = None) -> None:
        for split, dataset in self._datasets(stage).items():
            if split not in self._sets:
                size = [self.image_size] * (0 if self.image_size == 1 else 2)
                features = torch.empty(len(dataset), self.in_channels, *size, dtype=self._network.stored_as)
                for rows, path in self._files(split, dataset):
                    features[rows.start : rows.stop] = _read(path)
                self._sets[split] = _FeatureSet(features, dataset.labels)
                self._sets[split].groups = dataset.groups

    def train_dataloader(self) -> DataLoader:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> dict[str, DataLoader] | list[DataLoader]:
        names: list[Split] = ["val", "test"] if self.images.test_every_epoch else ["val"]
        return {name: self._loader(name) for name in names if name in self._sets} or []

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

    def _files(self, split: Split, dataset: ImageDataset) -> list[tuple[range, Path]]:
        """Return the places of the images of each file, and its path, which changes if an image or a label does."""
        digest = hashlib.sha256(dataset.labels.numpy().tobytes() + dataset.source.digest(dataset.indices)).hexdigest()
        starts = range(0, len(dataset), _PER_FILE)
        rows = [range(start, min(start + _PER_FILE, len(dataset))) for start in starts]
        return [(each, self.folder / f"{split}-{digest[:16]}-{each.start:08d}.safetensors") for each in rows]

    def _write(self, files: list[tuple[range, Path]], dataset: ImageDataset, what: str) -> None:
        """Compute the features of images and write them; a bar on a terminal says ``what`` is computed.

        Raises:
            DataError: They cannot be written.
        """
        if self._network.device.type == "meta":
            self._network = self._build()
        network = self._network.to(torch.device("cpu") if self.trainer is None else self.trainer.strategy.root_device)
        compute, on_cpu = partial(_features, network), network.device.type == "cpu"
        for rows, path in files:
            # On a CPU the processes that read a batch compute its features as well.
            loader = DataLoader(
                Subset(dataset, rows),
                self.batch_size,
                num_workers=self.images.num_workers,
                collate_fn=compute if on_cpu else _stacked,
            )
            batches = tqdm(loader, desc=what, unit="batch", disable=None)
            features = torch.cat(list(batches if on_cpu else map(compute, batches)))
            try:
                with replacing(path, private=True) as file:
                    save_file({"features": features}, file.name)
            except (OSError, SafetensorError) as error:
                raise DataError(
                    f"{path} cannot be written ({error}). Make room, or set data.init_args.cache to another folder. "
                    "What was written before is kept."
                ) from error
            rank_zero_info(f"{what}: {rows.stop} of {len(dataset)} are in {self.folder}.")
        self._network = network.cpu()


def _stacked(items: Sequence[tuple[Tensor, int]]) -> Tensor:
    return torch.stack([image for image, _ in items])


@torch.inference_mode()
def _features(network: FeatureNetwork, items: Tensor | Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the features of images, or of elements of a data set of images, as they are kept."""
    images = items if isinstance(items, Tensor) else _stacked(items)
    return network(images.to(network.device)).cpu().to(network.stored_as)


def _read(path: Path) -> Tensor:
    """Return the features in a file.

    Raises:
        DataError: The file is damaged.
    """
    try:
        return load_file(path)["features"]
    except (OSError, SafetensorError, KeyError) as error:
        raise DataError(f"{path} cannot be read ({error}). Remove it, and it will be computed again.") from error


@contextmanager
def _only_this_run_in(folder: Path) -> Iterator[None]:
    """Within this context no other run writes into the folder, which is created if missing, for its owner alone.

    A run that finds another one in it waits. On a file system without locks, it does not.

    Raises:
        ConfigurationError: The folder cannot be created.
    """
    require_writable(folder.parent, "data.init_args.cache")
    folder.mkdir(exist_ok=True, mode=0o700)
    place = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            try:
                fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                rank_zero_info(f"Another run uses the features in {folder}. This one waits for it.")
                fcntl.flock(place, fcntl.LOCK_EX)
        yield
    finally:
        with suppress(OSError):  # closing is not enough: a process that was forked since then has the lock too
            fcntl.flock(place, fcntl.LOCK_UN)
        os.close(place)
