"""Keeps in every checkpoint what its outputs mean: the names of the classes, and how images were cropped."""

from typing import Any

import lightning.pytorch as pl

from dp_lightning.errors import DataError


class DataRecord(pl.Callback):
    """Keeps what the data module says besides the numbers that the network is built from.

    A checkpoint that is loaded for other class names is refused: its outputs would be given the names of other classes.

    Attributes:
        class_names: names of the classes in the order of the outputs; None where the data does not name its classes.
        resized_to: the shorter side of an image in pixels before the middle is cut out; None where nothing is resized.
        window: the values in the files that are black and white; None for files of 8 bits.
        features: settings of the network whose features take the place of images; None for images themselves.
    """

    def __init__(self) -> None:
        super().__init__()
        self.class_names: list[str] | None = None
        self.resized_to: int | None = None
        self.window: tuple[float, float] | None = None
        self.features: dict[str, Any] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        data = trainer.datamodule  # type: ignore[attr-defined]
        names = getattr(data, "class_names", None)
        self.class_names = None if names is None else [str(name) for name in names]
        self.resized_to = getattr(data, "resized_to", None)
        self.window = getattr(data, "window", None)
        self.features = getattr(data, "feature_settings", None)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("class_names", "resized_to", "window", "features")}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        saved = state_dict["class_names"]
        if None not in (saved, self.class_names) and saved != self.class_names:
            raise DataError(
                f"The classes are {self.class_names} in this data and {saved} in the checkpoint. Give data with the "
                "same class folders, or train a new network on this data (without ckpt_path)."
            )
        self.class_names = saved or self.class_names
