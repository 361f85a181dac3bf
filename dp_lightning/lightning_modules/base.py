"""What every image classifier shares: the loss, the metrics and their names, and a default optimizer.

Nothing here depends on privacy: ``training_step`` returns the mean loss of a batch, and the privacy callback does the
rest. The training loss is logged as ``unprotected/train_loss``, since a number computed from raw training
examples lies outside the guarantee.
"""

from collections.abc import Mapping
from typing import Any, cast

import lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MultilabelAccuracy

from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules.evaluation import metrics_of_test_images, report_of
from dp_lightning.models.pretrained import load_weights
from dp_lightning.processors import below_avx512

Batch = tuple[Tensor, Tensor]
EVALUATIONS = ("val", "test")
_DIMENSIONS_WITH_VIEWS = 5


class ImageClassifier(lightning.LightningModule):
    """Trains ``model`` by cross-entropy on batches of (images (N, C, H, W), labels (N,)).

    Images may have V views each: (N, V, C, H, W). The loss is then the mean over images and views, and the logits that
    an evaluation, a prediction and `forward` give are means over views.

    Logged: ``unprotected/train_loss`` at every step, and at the end of an evaluation ``val/loss`` and
    ``val/accuracy``, or ``test/loss``, ``test/accuracy`` and the means of ``test_report``. Validation may use one
    loader, called ``val``, or a dict of loaders with the keys ``val`` and ``test``.

    Args:
        model: Network from images to logits (N, num_classes). It is built before the run starts, so that it can be
            checked.
        num_classes: Number of logits, at least 2.
        weights: Start from the weights in this file, such as one of `dpl pretrain`, but for the last layer.
        multi_label: An image may have several labels or none, linked from the data. Labels are then float32
            (N, num_classes) of 0 and 1, the loss is the mean over labels of their sigmoid cross-entropies, and the
            accuracy is that of all answers.
        class_weights: Weight of each class, a public number: the loss of an image is multiplied by the weight of its
            class, and with ``multi_label`` that of each label that it has. Clipping comes after that: a weight
            above 1 makes no gradient longer than ``privacy.max_grad_norm``, so give the rarest class the weight 1.

    Attributes:
        test_report: What the last evaluation of test images has found: see `report_of`.

    Raises:
        ConfigurationError: There are fewer classes, the number of weights is another one, or the file has not the
            network's weights.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        *,
        weights: str | None = None,
        multi_label: bool = False,
        class_weights: list[float] | None = None,
    ) -> None:
        super().__init__()
        if num_classes < 2:
            raise ConfigurationError(f"num_classes is {num_classes}; a classifier tells at least 2 classes apart.")
        if class_weights is not None and not (len(class_weights) == num_classes and min(class_weights) >= 0):
            raise ConfigurationError(f"class_weights is {class_weights}; give a number from 0 for each class.")
        load_weights(model, weights)
        self.model = model
        #: If `dpl export` has written this file, its private steps count in a private run.
        self.weights_file = weights
        self.num_classes, self.multi_label = num_classes, multi_label
        weight = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float32)
        self.class_weights: Tensor | None
        self.register_buffer("class_weights", weight, persistent=False)
        accuracy = MultilabelAccuracy if multi_label else MulticlassAccuracy
        self.losses = nn.ModuleDict({name: MeanMetric() for name in EVALUATIONS})
        self.accuracies = nn.ModuleDict({name: accuracy(num_classes, average="micro") for name in EVALUATIONS})
        self._test_metrics: MetricCollection | None = None  # only while test images are evaluated
        self.test_report: dict[str, Any] = {}

    def setup(self, stage: str) -> None:
        data = self.trainer.datamodule  # type: ignore[attr-defined]
        if getattr(data, "multi_label", False) and not self.multi_label:
            raise ConfigurationError(
                f"The images of {type(data).__name__} have several labels each, and {type(self).__name__} expects one. "
                "Give its __init__ an argument multi_label, and pass it to ImageClassifier."
            )
        # With AVX-512 convolutions are as fast on other images; on GPUs, GroupNorm copies images with channels last.
        if below_avx512(self.trainer.strategy.root_device):
            self.model.to(memory_format=torch.channels_last)

    def forward(self, images: Tensor) -> Tensor:
        if images.ndim != _DIMENSIONS_WITH_VIEWS:
            return self.model(images)
        return self.model(images.flatten(0, 1)).unflatten(0, (-1, images.shape[1])).mean(dim=1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        if images.ndim == _DIMENSIONS_WITH_VIEWS:
            images, labels = images.flatten(0, 1), labels.repeat_interleave(images.shape[1], dim=0)
        loss = self._loss(self(images), labels)
        self.log("unprotected/train_loss", loss, prog_bar=True, batch_size=len(labels))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        loaders = self.trainer.val_dataloaders
        names = list(loaders) if isinstance(loaders, Mapping) else ["val"]
        if dataloader_idx >= len(names) or names[dataloader_idx] not in EVALUATIONS:
            raise ConfigurationError("val_dataloader must return one loader, or a dict with the keys 'val' and 'test'")
        self._evaluate(batch, names[dataloader_idx])

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def on_validation_epoch_end(self) -> None:
        """Keep the report of the test images, if there were any, and log its means."""
        if self._test_metrics is not None:
            names = getattr(self.trainer.datamodule, "label_names", None)  # type: ignore[attr-defined]
            self.test_report, self._test_metrics = report_of(self._test_metrics, names), None
            means = {name.replace("_", "/", 1): mean for name, mean in self.test_report.items()}
            self.log_dict({name: mean for name, mean in means.items() if isinstance(mean, float)}, sync_dist=True)

    on_test_epoch_end = on_validation_epoch_end

    def predict_step(self, batch: Batch | Tensor, batch_idx: int) -> Tensor:
        """Probabilities of the classes or labels (N, num_classes); labels in the batch are ignored."""
        images = batch if isinstance(batch, Tensor) else batch[0]
        return self._probabilities(self(images))

    def configure_optimizers(self) -> Any:
        """SGD with learning rate 0.3 and momentum 0.9; ``optimizer`` in a configuration replaces it."""
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), lr=0.3, momentum=0.9)

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.multi_label:
            return F.binary_cross_entropy_with_logits(logits, labels, pos_weight=self.class_weights)
        # The mean over images: torch's weighted mean divides by the weights, which cancel for one image.
        reduction = "mean" if self.class_weights is None else "none"
        return F.cross_entropy(logits, labels, self.class_weights, reduction=reduction).mean()

    def _probabilities(self, logits: Tensor) -> Tensor:
        return logits.sigmoid() if self.multi_label else logits.softmax(dim=-1)

    def _evaluate(self, batch: Batch, name: str) -> None:
        images, labels = batch
        logits = self(images)
        loss = cast(MeanMetric, self.losses[name])
        accuracy = cast(MulticlassAccuracy, self.accuracies[name])
        loss.update(self._loss(logits, labels), weight=len(labels))
        probabilities = self._probabilities(logits)
        accuracy.update(probabilities if self.multi_label else logits, labels.long())
        if name == "test":
            if self._test_metrics is None:
                metrics = metrics_of_test_images(self.num_classes, multi_label=self.multi_label)
                self._test_metrics = metrics.to(self.device)
            self._test_metrics.update(probabilities, labels.long())
        found = {f"{name}/loss": loss, f"{name}/accuracy": accuracy}
        self.log_dict(found, prog_bar=True, add_dataloader_idx=False, batch_size=len(labels))
