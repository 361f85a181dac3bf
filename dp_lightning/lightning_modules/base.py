"""What every image classifier shares: the loss, the metrics and their names, and a default optimizer.

Nothing here depends on privacy: ``training_step`` returns the mean cross-entropy of a batch, and the privacy callback
does the rest. The training loss is logged as ``unprotected/train_loss``, since a number computed from raw training
examples lies outside the guarantee.
"""

from collections.abc import Mapping
from typing import Any, cast

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from dp_lightning.errors import ConfigurationError
from dp_lightning.models.pretrained import load_weights
from dp_lightning.processors import below_avx512

Batch = tuple[Tensor, Tensor]
EVALUATIONS = ("val", "test")


class ImageClassifier(lightning.LightningModule):
    """Trains ``model`` by cross-entropy on batches of (images (N, C, H, W), labels (N,)).

    Logged: ``unprotected/train_loss`` at every step, and at the end of an evaluation ``val/loss`` and
    ``val/accuracy``, or ``test/loss`` and ``test/accuracy``. Validation may use one loader, called ``val``, or a dict
    of loaders with the keys ``val`` and ``test``.

    Args:
        model: Network from images to logits (N, num_classes). It is built before the run starts, so that it can be
            checked.
        num_classes: Number of logits, at least 2.
        weights: File with weights that the network starts from.

    Raises:
        ConfigurationError: There are fewer classes, or the file has not the network's weights.
    """

    def __init__(self, model: nn.Module, num_classes: int, *, weights: str | None = None) -> None:
        super().__init__()
        if num_classes < 2:
            raise ConfigurationError(f"num_classes is {num_classes}; a classifier tells at least 2 classes apart.")
        load_weights(model, weights)
        self.model = model
        #: If `dpl export` has written this file, its private steps count in a private run.
        self.weights_file = weights
        self.losses = nn.ModuleDict({name: MeanMetric() for name in EVALUATIONS})
        self.accuracies = nn.ModuleDict(
            {name: MulticlassAccuracy(num_classes, average="micro") for name in EVALUATIONS}
        )

    def setup(self, stage: str) -> None:
        # With AVX-512 convolutions are as fast on other images; on GPUs, GroupNorm copies images with channels last.
        if below_avx512(self.trainer.strategy.root_device):
            self.model.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log(
            "unprotected/train_loss",
            loss,
            on_step=True,
            on_epoch=False,
            prog_bar=True,
            batch_size=len(labels),
        )
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._evaluate(batch, self._evaluation_name(dataloader_idx))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Class probabilities (N, num_classes); labels in the batch are ignored."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self(images).softmax(dim=-1)

    def configure_optimizers(self) -> Any:
        """SGD with learning rate 0.3 and momentum 0.9; ``optimizer`` in a configuration replaces it."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.3, momentum=0.9)

    def _evaluation_name(self, dataloader_idx: int) -> str:
        loaders = self.trainer.val_dataloaders
        names = list(loaders) if isinstance(loaders, Mapping) else ["val"]
        if dataloader_idx >= len(names) or names[dataloader_idx] not in EVALUATIONS:
            raise ConfigurationError("val_dataloader must return one loader, or a dict with the keys 'val' and 'test'")
        return names[dataloader_idx]

    def _evaluate(self, batch: Batch, name: str) -> None:
        images, labels = batch
        logits = self(images)
        loss = cast(MeanMetric, self.losses[name])
        accuracy = cast(MulticlassAccuracy, self.accuracies[name])
        loss.update(F.cross_entropy(logits, labels), weight=len(labels))
        accuracy.update(logits, labels)
        self.log_dict(
            {f"{name}/loss": loss, f"{name}/accuracy": accuracy},
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            add_dataloader_idx=False,
            batch_size=len(labels),
        )
