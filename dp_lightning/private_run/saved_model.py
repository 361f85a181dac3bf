"""The model that a checkpoint holds, and what its outputs mean."""

import inspect
import pydoc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl

from dp_lightning.lightning_internals import CLASS_PATH


@dataclass(frozen=True)
class SavedModel:
    """What a checkpoint says about its model; a part that it does not state is empty or None.

    Attributes:
        class_path: of the LightningModule.
        settings: its hyperparameters. Lightning saves what is linked from the data, such as image_size, with modules
            that have no such argument too.
        class_names: in the order of the outputs.
        resized_to: the shorter side of an image in pixels before the middle is cut out.
        features: the network whose features take the place of the images, and its images.
    """

    class_path: str | None
    settings: Mapping[str, Any]
    class_names: list[str] | None
    resized_to: int | None
    features: Mapping[str, Any] | None

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "SavedModel":
        """That of a checkpoint as `PrivateCheckpointIO` loads it."""
        hyperparameters = dict(checkpoint.get("hyper_parameters", {}))
        path = hyperparameters.get(CLASS_PATH)
        data = checkpoint.get("callbacks", {}).get("DataRecord", {})
        return cls(
            class_path=None if path is None else str(path),
            settings={name: value for name, value in hyperparameters.items() if not name.startswith("_")},
            class_names=data.get("class_names"),
            resized_to=data.get("resized_to"),
            features=data.get("features"),
        )

    def module_class(self, trusted: str | None = None) -> type[pl.LightningModule] | None:
        """The class of the module; None where the checkpoint names none that may be used.

        A checkpoint is data, and must not choose which code runs: its class is one of ours or the one that the user
        names.

        Args:
            trusted: path of a class that the user has named.
        """
        if self.class_path is None or not (self.class_path.startswith("dp_lightning.") or self.class_path == trusted):
            return None
        kind: Any = pydoc.locate(self.class_path)
        return kind if inspect.isclass(kind) and issubclass(kind, pl.LightningModule) else None

    def arguments_of(self, kind: type[pl.LightningModule]) -> dict[str, Any]:
        """The settings for which the class has arguments."""
        known = inspect.signature(kind).parameters
        return {name: value for name, value in self.settings.items() if name in known}
