"""Keeps in every checkpoint what its outputs mean: the names of the classes, and how images were cropped."""

from typing import Any

import lightning.pytorch as pl

from dp_lightning.errors import DataError


class DataRecord(pl.Callback):
    """Keeps what the data module says besides the numbers that the network is built from.

    A checkpoint that is loaded for other class names is refused: its outputs would be given the names of other classes.
    Its state also has ``resized_to``, the shorter side of an image in pixels before the middle is cut out, ``window``,
    the values in the files that are black and white, and ``features``, the settings of the network whose features take
    the place of images; each is None where the data has none.

    Attributes:
        class_names: names of the classes in the order of the outputs; None where the data does not name its classes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.class_names: list[str] | None = None
        self._others: dict[str, Any] = {}

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        names = getattr(data, "class_names", None)
        self.class_names = None if names is None else [str(name) for name in names]
        others = {"resized_to": "resized_to", "window": "window", "features": "feature_settings"}
        self._others = {name: getattr(data, of_data, None) for name, of_data in others.items()}

    def state_dict(self) -> dict[str, Any]:
        return {"class_names": self.class_names, **self._others}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["class_names"]
        if None not in (saved, self.class_names) and saved != self.class_names:
            raise DataError(
                f"The classes are {self.class_names} in this data and {saved} in the checkpoint. Give data with the "
                "same class folders, or train a new network on this data (without ckpt_path)."
            )
        self.class_names = saved or self.class_names
