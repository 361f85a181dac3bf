"""Networks without batch statistics: plain ``nn.Module`` classes that work with or without Lightning."""

from dp_lightning.models.batch_norm import batch_norm_to_group_norm, freeze_batch_norm
from dp_lightning.models.pretrained import timm_model
from dp_lightning.models.resnet import ResNet
from dp_lightning.models.small_cnn import SmallCNN
from dp_lightning.models.wide_resnet import WideResNet

__all__ = [
    "ResNet",
    "SmallCNN",
    "WideResNet",
    "batch_norm_to_group_norm",
    "freeze_batch_norm",
    "timm_model",
]
