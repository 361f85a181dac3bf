"""LightningModules that train the networks of ``dp_lightning.models`` as image classifiers."""

from dp_lightning.lightning_modules.base import ImageClassifier
from dp_lightning.lightning_modules.classifiers import (
    LinearProbeModule,
    ResNetModule,
    SmallCNNModule,
    WideResNetModule,
)
from dp_lightning.lightning_modules.timm_module import TimmModule

__all__ = [
    "ImageClassifier",
    "LinearProbeModule",
    "ResNetModule",
    "SmallCNNModule",
    "TimmModule",
    "WideResNetModule",
]
