"""Features of a frozen network, computed once and kept in files, so that only a head is trained on them.

The network must have been trained on public data, or on none. Its features of private images are as private as the
images: no noise protects them, so their files are kept in a folder that only their owner can read.

Anyone who can write to a cache decides what is trained on. An existing cache is used if its folder and files belong to
the user, nobody else can write to them, and the features of some of its images, drawn at random, are those that the
network computes now. This detects a file of other features, but not a single changed row.
"""

import hashlib
import json
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader, Subset, TensorDataset
from tqdm import tqdm

from dp_lightning.datamodules import feature_files, forked
from dp_lightning.datamodules.base import ImageDataModule, Split, require_whole
from dp_lightning.datamodules.dataset import ImageDataset
from dp_lightning.errors import DataError, DpLightningError
from dp_lightning.models.feature_network import FeatureNetwork, has_weights
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy.person_ids import Group

# Images per file: one is computed while the one before is written, so an interruption can lose two.
_PER_FILE = 4096
# Images that are compared with those of a cache before it is used.
_COMPARED = 32
# Images per cache file whose features are computed again before it is used, and how far the stored ones may differ from
# them, relative to their norm: other hardware and TF32 cause differences of a few thousandths.
_COMPUTED_AGAIN = 2
_TOLERANCE = 0.05


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
    later runs with the same images and the same network read them.

    Args:
        images: Where the images come from.
        backbone: Name in timm's registry, such as ``vit_small_patch16_224.augreg_in21k``, or ``scattering``.
        weights: File with its weights; None downloads timm's. Scattering has none.
        cache: Folder of the features.
        input_size: Height and width that images are resized to; None uses the network's ``img_size`` if it is set, or
            else its own size, and with scattering that of the images.
        batch_size: Images per batch while features are computed. On a CPU each core computes a batch, so that memory
            grows with the cores; the environment variable ``OMP_NUM_THREADS`` sets how many are used.
        backbone_kwargs: Further arguments of the network; ``scales`` (2) and ``angles`` (8) of scattering.

    Raises:
        ConfigurationError: ``batch_size`` is not a whole number of at least 1, or the network cannot be built.
        DataError: The cache belongs to other images or to another user, or does not hold the network's features.
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
            # prepare_data builds it, which may download its weights, after the files of the images were read.
            with torch.device("meta"), without_weights():
                self._network = self._build()
        else:
            self._network = self._build()
        self.folder = Path(cache) / self._key()
        #: Features as they are kept, and labels int64 (n,).
        self._sets: dict[Split, _FeatureSet] = {}

    @property
    def num_classes(self) -> int:
        with _settings_of_images():
            return self.images.num_classes

    @property
    def class_names(self) -> list[str] | None:
        with _settings_of_images():
            return self.images.class_names

    @property
    def num_train(self) -> int:
        with _settings_of_images():
            return self.images.num_train

    @property
    def num_train_groups(self) -> int:
        with _settings_of_images():
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
    def _shape(self) -> tuple[int, ...]:
        """Of the features of one image."""
        return (self.in_channels,) if self.image_size == 1 else (self.in_channels, self.image_size, self.image_size)

    @property
    def feature_settings(self) -> dict[str, Any]:
        """The network and the preparation of its images, from which features of other images can be computed."""
        images = {"image_size": self.images.image_size, "resized_to": self.images.resized_to}
        return {"network": self._network.settings, **images}

    def check_files(self) -> None:
        with _settings_of_images():
            self.images.check_files()

    def prepare_data(self) -> None:
        stage = None if self.trainer is None or self.trainer.state.fn is None else self.trainer.state.fn.value
        self.images.trainer = self.trainer
        with _settings_of_images():
            self.images.prepare_data()
            self.images.setup(stage)
        datasets = self._datasets(stage)
        if self._network.device.type == "meta":
            if has_weights(backbone := self._network.settings["backbone"]):
                rank_zero_info(f"Loading the weights of {backbone}, or downloading them once.")
            self._network = self._build()
        with feature_files.held(self.folder):
            for split, dataset in datasets.items():
                self._require_same_images(split, dataset)
                self._compute(split, dataset)

    def setup(self, stage: str | None = None) -> None:
        for split, dataset in self._datasets(stage).items():
            if split not in self._sets:
                features = torch.empty(len(dataset), *self._shape, dtype=self._network.stored_as)
                for rows, path in self._files(split, dataset):
                    # One after the other: together they may fill the memory.
                    features[rows.start : rows.stop] = feature_files.read(path, self._shape)["features"]
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
        """The images that a stage of a run needs; all for None."""
        with _settings_of_images():
            if stage in ("test", "predict"):
                return {"test": self.images.test_dataset}
            found: dict[Split, ImageDataset | None] = {}
            if stage != "validate":
                found["train"] = self.images.train_dataset
            found["val"] = self.images.val_dataset
            if "test" in self.images.own_splits:
                found["test"] = self.images.test_dataset
        return {split: dataset for split, dataset in found.items() if dataset is not None}

    def _key(self) -> str:
        """A name for the network, the images and their preparation."""
        # Without what cached properties have read from the files, which is stored beside the settings.
        kind = type(self.images)
        settings = {
            name: str(value)
            for name, value in sorted(vars(self.images).items())
            if not name.startswith("_") and not isinstance(getattr(kind, name, None), cached_property)
        }
        passed_by = {"download", "crop_edges", "eval_batch_size", "num_workers", "test_every_epoch", "read_first"}
        passed_by |= {"prepare_data_per_node", "trainer"}
        network = self._network.settings
        facts = [
            *(network[name] for name in ("backbone", "digest", "input_size", "backbone_kwargs")),
            kind.__name__,
            {name: value for name, value in settings.items() if name not in passed_by},
        ]
        return f"{network['backbone']}-{hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()[:12]}"

    def _files(self, split: Split, dataset: ImageDataset) -> list[tuple[range, Path]]:
        """The places of the images of each file, and its path."""
        starts = range(0, len(dataset), _PER_FILE)
        return [
            (range(start, min(start + _PER_FILE, len(dataset))), self.folder / f"{split}-{start:08d}.safetensors")
            for start in starts
        ]

    def _require_same_images(self, split: Split, dataset: ImageDataset) -> None:
        """Compare the labels and the source's digest of all images, and the pixels of a few."""
        places = range(0, len(dataset), max(len(dataset) // _COMPARED, 1))
        pixels = _pixels(dataset, places)
        parts = [dataset.labels.numpy().tobytes(), pixels.numpy().tobytes(), dataset.source.digest(dataset.indices)]
        found = hashlib.sha256(b"".join(parts)).hexdigest()
        path = self.folder / f"{split}.json"
        if not path.is_file() or not any(os.path.lexists(file) for _, file in self._files(split, dataset)):
            with feature_files.writing(path) as file:
                file.write(json.dumps({"images": found}).encode())
            return
        feature_files.require_own(path)
        if path.read_text() != json.dumps({"images": found}):
            raise DataError(
                f"{self.folder} holds features of other images: the {split} images have changed. Remove the folder, or "
                "set data.init_args.cache to another one."
            )

    def _compute(self, split: Split, dataset: ImageDataset) -> None:
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        network = self._network.to(device)
        with ThreadPoolExecutor(max_workers=1) as writer:  # a file is written while the next one is computed
            writing: Future[None] | None = None
            for rows, path in self._files(split, dataset):
                if os.path.lexists(path):
                    self._require_features(path, dataset, rows, network)
                    continue
                features = self._features_of(Subset(dataset, rows), network, f"Features of the {split} images")
                piece = {"features": features, "labels": dataset.labels[rows.start : rows.stop]}
                if writing is not None:
                    writing.result()
                told = f"Features of {rows.stop} of {len(dataset)} {split} images are in {self.folder}."
                writing = writer.submit(feature_files.write, path, piece, told)
            if writing is not None:
                writing.result()
        self._network = self._network.cpu()

    def _features_of(self, images: Subset, network: FeatureNetwork, what: str) -> Tensor:
        """Features (n, ...) of images (n), as they are kept; a bar on a terminal says ``what`` is computed."""
        shape, dtype = (len(images), *self._shape), network.stored_as
        loader = DataLoader(images, self.batch_size, num_workers=self.images.num_workers)
        batches, compute = _batches(loader), partial(_features, network)
        count = forked.processes(len(loader)) if network.device.type == "cpu" else 0
        found = forked.shared_tensor(shape, dtype) if count else torch.empty(shape, dtype=dtype)
        places = found.split(self.batch_size)
        if count:
            done = forked.applied(compute, batches, places, count)
        else:
            done = (place.copy_(compute(batch)) for place, batch in zip(places, batches, strict=True))
        for _ in tqdm(done, desc=what, total=len(loader), unit="batch", disable=None):
            pass
        return found

    def _require_features(self, path: Path, dataset: ImageDataset, rows: range, network: FeatureNetwork) -> None:
        """Refuse a file whose labels differ, or whose features differ for the images that are computed again."""
        held = feature_files.read(path, self._shape)
        same = torch.equal(held["labels"], dataset.labels[rows.start : rows.stop])
        if same:
            chosen = random.SystemRandom().sample(rows, min(_COMPUTED_AGAIN, len(rows)))
            features = _features(network, _pixels(dataset, chosen)).flatten(1)
            found = held["features"][torch.tensor(chosen) - rows.start].flatten(1).float()
            same = bool(((found - features).norm(dim=1) <= _TOLERANCE * features.norm(dim=1) + 1e-6).all())
        if not same:
            raise DataError(
                f"{path} does not hold this network's features of these images: it was damaged, or written by "
                "something else. Remove it, and it will be computed again."
            )


@contextmanager
def _settings_of_images() -> Iterator[None]:
    """Messages of the images' own data module name its settings where they stand: below ``images``."""
    try:
        yield
    except DpLightningError as error:
        told = str(error).replace("data.init_args.", "data.init_args.images.init_args.")
        raise type(error)(told) from error


def _pixels(dataset: ImageDataset, places: Sequence[int]) -> Tensor:
    with _settings_of_images():
        return torch.stack([image for image, _ in dataset.__getitems__(places)])


def _batches(loader: DataLoader) -> Iterator[Tensor]:
    with _settings_of_images():
        yield from (images for images, _ in loader)


@torch.inference_mode()
def _features(network: FeatureNetwork, images: Tensor) -> Tensor:
    return network(images.to(network.device)).cpu()
