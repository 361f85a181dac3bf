"""Any network of timm's registry, from scratch or fine-tuned from pretrained weights."""

from typing import Any, Literal, cast

from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from dp_lightning.lightning_modules.base import ImageClassifier
from dp_lightning.models import timm_model
from dp_lightning.models.pretrained import PretrainedInput
from dp_lightning.models.trained import train_low_rank, train_only


class TimmModule(ImageClassifier):
    """Any network of timm's registry.

    With pretrained weights the images are resized and normalised as in the network's training; the weights must come
    from public data.

    Args:
        name: Name in timm's registry, such as ``vit_small_patch16_224.augreg_in21k`` or ``resnet50_gn``.
        num_classes: Number of classes, linked from the data.
        pretrained: Start from timm's weights, downloaded when absent.
        weights: Start from the weights in this file (.safetensors, .pth or .bin with timm's names); nothing is
            downloaded.
        trained: Which parameters are trained: ``all``; ``head``, the last layer; ``bias``, biases and the last layer
            (BiTFiT); ``lora``, low-rank additions and the last layer; or a list of patterns of parameter names, such as
            ``[blocks.11.*]``, and the last layer.
        lora_rank: r of ``trained: lora``.
        lora_layers: Patterns of names of the layers that get low-rank additions; None means every linear layer and
            every convolution that is not depthwise.
        input_size: Height and width that images are resized to; None means the network's own size with pretrained
            weights, and the size of the images otherwise.
        in_channels: Channels of the images, linked from the data.
        mean: Mean of each channel in the data's normalisation, linked from the data.
        std: Standard deviation of each channel, likewise.
        model_kwargs: Further arguments of the network, such as ``{img_size: 32}`` for a vision transformer.
        **kwargs: Those of `ImageClassifier`.

    Raises:
        ConfigurationError: naming the setting and the fix.
    """

    def __init__(
        self,
        name: str,
        num_classes: int,
        *,
        pretrained: bool = False,
        weights: str | None = None,
        trained: Literal["all", "head", "bias", "lora"] | list[str] = "all",
        lora_rank: int = 8,
        lora_layers: list[str] | None = None,
        input_size: int | None = None,
        in_channels: int = 3,
        mean: tuple[float, ...] = (0.5,),
        std: tuple[float, ...] = (0.5,),
        model_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        has_weights = pretrained or weights is not None
        if trained != "all" and not has_weights:
            rank_zero_warn(
                f"trained: {trained} freezes the rest of {name}, which has no pretrained weights: it keeps its random "
                "weights. Set pretrained: true or weights, or trained: all."
            )
        own = {"in_channels": in_channels, **(model_kwargs or {})}
        model = timm_model(name, num_classes, pretrained=pretrained, weights=weights, **own)
        super().__init__(model, num_classes, **kwargs)
        #: If `dpl export` has written this file, its private steps count in a private run.
        self.weights_file = weights
        if trained == "lora":
            train_low_rank(model, self.head, rank=lora_rank, layers=lora_layers or ("*",))
        elif trained != "all":
            patterns: dict[str, tuple[str, ...]] = {"head": (), "bias": ("*.bias",)}
            names = patterns.get(trained, (trained,)) if isinstance(trained, str) else trained
            train_only(model, self.head, names)
        self.input: PretrainedInput | None = None
        if has_weights or input_size is not None:
            size = input_size or own.get("img_size")
            self.input = PretrainedInput.of(model, in_channels=in_channels, data_mean=mean, data_std=std, size=size)
        self.save_hyperparameters()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, num_classes) of images (N, C, H, W) as the data gives them."""
        return self.model(images if self.input is None else self.input(images))

    @property
    def head(self) -> nn.Module:
        """The last layer; for a distilled network, both of them."""
        found = self.model.get_classifier()  # type: ignore[operator]
        return nn.ModuleList(found) if isinstance(found, tuple) else cast(nn.Module, found)
