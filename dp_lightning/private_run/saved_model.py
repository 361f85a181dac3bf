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
        class_path: import path of the class of the LightningModule.
        settings: hyperparameters of the module. Lightning also saves settings that are linked from the data, such as
            image_size, with modules that have no such argument.
        data: the attributes of `DataRecord`.
    """

    class_path: str | None
    settings: Mapping[str, Any]
    data: Mapping[str, Any]

    @classmethod
    def read(cls, checkpoint: Mapping[str, Any]) -> "SavedModel":
        """Read the model of a checkpoint that `PrivateCheckpointIO` has loaded."""
        hyperparameters = dict(checkpoint.get("hyper_parameters", {}))
        path = hyperparameters.get(CLASS_PATH)
        return cls(
            class_path=None if path is None else str(path),
            settings={name: value for name, value in hyperparameters.items() if not name.startswith("_")},
            data=checkpoint.get("callbacks", {}).get("DataRecord", {}),
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
        """The settings for which the class has arguments, or a class above it to which it passes them on."""
        known: dict[str, inspect.Parameter] = {}
        for each in kind.__mro__:
            own = inspect.signature(each.__dict__.get("__init__", each)).parameters
            known |= own
            if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in own.values()):
                break
        return {name: value for name, value in self.settings.items() if name in known}
