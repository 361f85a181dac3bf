"""LightningModules as they are found in tutorials and repositories, none of which knows about privacy."""

import copy
import enum
import functools

import lightning.pytorch as pl
import timm
import torch
import torchvision
from lightning.pytorch.callbacks import LearningRateMonitor
from timm.scheduler import CosineLRScheduler
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy, MultilabelAUROC
from torchvision.transforms import v2

N, CLASSES, SIDE = 24, 3, 8


def images(seed=0):
    """Small images whose brightness tells the class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(N) % CLASSES
    return torch.rand(N, 3, SIDE, SIDE, generator=generator) * 0.3 + 0.3 * y.view(-1, 1, 1, 1), y


def loader(*tensors, batch_size=16):
    return DataLoader(TensorDataset(*tensors), batch_size=batch_size, shuffle=True)


def small_network(out=CLASSES):
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, out),
    )


class Wild(pl.LightningModule):
    """What most of them share: a network, a loss, loaders of their own."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or small_network()

    def forward(self, x):
        return self.net(x)

    def loss_of(self, batch):
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def train_dataloader(self):
        return loader(*images())


class Validated(Wild):
    """Has images for a validation too."""

    def val_dataloader(self):
        return loader(*images(1))


class OneCycle(Wild):
    """A schedule per step, as long as the run."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, total_steps=self.trainer.estimated_stepping_batches
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class StepsOfAnEpoch(Wild):
    """A schedule from the length of an epoch, and the older form of what configure_optimizers returns."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.num_training_batches * self.trainer.max_epochs
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        return [optimizer], [{"scheduler": schedule, "interval": "step", "name": "rate"}]


class Metrics(Validated):
    """Metrics of torchmetrics in training and validation, logged as objects."""

    def __init__(self):
        super().__init__()
        self.save_hyperparameters()
        self.train_accuracy = MulticlassAccuracy(CLASSES)
        self.val_accuracy = MulticlassAccuracy(CLASSES)
        self.mean = MeanMetric()

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, label_smoothing=0.1)
        self.train_accuracy(logits, y)
        self.mean(loss)
        self.log_dict({"train_accuracy": self.train_accuracy, "mean_loss": self.mean}, on_step=True, on_epoch=True)
        return {"loss": loss, "logits": logits.detach()}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.val_accuracy(self(x), y)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)


class MultiLabel(Wild):
    """Several labels for each image, weighted."""

    def __init__(self):
        super().__init__(small_network(4))
        self.auroc = MultilabelAUROC(4)
        self.loss = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def loss_of(self, batch):
        x, y = batch
        return self.loss(self(x), y.float())

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.auroc.update(self(x), y)

    def on_validation_epoch_end(self):
        self.log("val_auroc", self.auroc.compute())
        self.auroc.reset()

    def _labels(self, seed):
        x, y = images(seed)
        return x, torch.stack([y == 0, y == 1, y == 2, y > 0], dim=1).long()

    def train_dataloader(self):
        return loader(*self._labels(0))

    def val_dataloader(self):
        return loader(*self._labels(1))


class UNet(nn.Module):
    """Ronneberger et al. 2015, two levels."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True))
        self.bottom = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up, self.head = nn.ConvTranspose2d(8, 4, 2, stride=2), nn.Conv2d(8, 1, 1)

    def forward(self, x):
        skip = self.down(x)
        return self.head(torch.cat([skip, self.up(self.bottom(skip))], dim=1))


class Segmentation(Wild):
    """A U-Net with cross-entropy and Dice loss."""

    def __init__(self):
        super().__init__(UNet())

    def loss_of(self, batch):
        x, mask = batch
        logits = self(x)
        p = logits.sigmoid()
        dice = 1 - (2 * (p * mask).sum((1, 2, 3)) + 1) / (p.sum((1, 2, 3)) + mask.sum((1, 2, 3)) + 1)
        return F.binary_cross_entropy_with_logits(logits, mask) + dice.mean()

    def train_dataloader(self):
        x, _ = images()
        return loader(x, (x.mean(1, keepdim=True) > 0.5).float())


class HuggingFace(Wild):
    """A vision transformer of transformers, with its own loss and its own schedule."""

    def __init__(self):
        from transformers import ViTConfig, ViTForImageClassification

        config = ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            image_size=SIDE, patch_size=4, num_labels=CLASSES,
        )  # fmt: skip
        super().__init__(ViTForImageClassification(config))

    def loss_of(self, batch):
        x, y = batch
        return self.net(pixel_values=x, labels=y).loss

    def configure_optimizers(self):
        from transformers import get_linear_schedule_with_warmup

        decayed = [p for name, p in self.named_parameters() if "bias" not in name]
        others = [p for name, p in self.named_parameters() if "bias" in name]
        optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}], lr=1e-3
        )
        steps = self.trainer.estimated_stepping_batches
        schedule = get_linear_schedule_with_warmup(optimizer, num_warmup_steps=steps // 5, num_training_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step", "frequency": 1}}


class TimmSchedule(Wild):
    """A network of timm, and a schedule of timm, which needs lr_scheduler_step."""

    def __init__(self):
        size = {"img_size": 16, "patch_size": 8, "embed_dim": 24, "depth": 1, "num_heads": 2}
        super().__init__(timm.create_model("vit_tiny_patch16_224", num_classes=CLASSES, **size))

    def forward(self, x):
        return self.net(F.interpolate(x, size=16, mode="bilinear"))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = CosineLRScheduler(optimizer, t_initial=self.trainer.max_epochs, warmup_t=1, warmup_lr_init=1e-3)
        return [optimizer], [{"scheduler": schedule, "interval": "epoch"}]

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step(epoch=self.current_epoch)


class Autoencoder(Wild):
    """A variational autoencoder (Kingma and Welling 2014)."""

    def __init__(self):
        super().__init__(nn.Linear(3 * SIDE * SIDE, 8))
        self.decoder = nn.Linear(4, 3 * SIDE * SIDE)

    def training_step(self, batch, batch_idx):
        x = batch[0].flatten(1)
        mean, log_var = self.net(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_var).exp()
        kl = -0.5 * (1 + log_var - mean.pow(2) - log_var.exp()).sum(1).mean()
        loss = F.mse_loss(self.decoder(z), x, reduction="sum") / len(x) + kl
        self.log_dict({"kl": kl, "loss": loss})
        return loss


class Plateau(Validated):
    """A schedule that follows the validation loss."""

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", F.cross_entropy(self(x), y))

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


class Augmented(Dataset):
    """Images as a transform of torchvision gives them, in a dict."""

    def __init__(self):
        self.x, self.y = images()
        self.transform = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop(SIDE, padding=1)])

    def __len__(self):
        return len(self.y)

    def __getitem__(self, index):
        return {"image": self.transform(self.x[index]), "label": int(self.y[index])}


class Frozen(Wild):
    """A frozen backbone with a head, batches of dicts, weighted classes, and two rates."""

    def __init__(self):
        super().__init__(small_network(6))
        self.net.requires_grad_(False)
        self.head = nn.Sequential(nn.Dropout(0.2), nn.Linear(6, CLASSES))
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))

    def loss_of(self, batch):
        with torch.no_grad():
            features = self.net(batch["image"])
        return F.cross_entropy(self.head(features), batch["label"], weight=self.weights, reduction="none").mean()

    def configure_optimizers(self):
        weight, bias = self.head[1].weight, self.head[1].bias
        return torch.optim.Adam([{"params": [weight], "lr": 1e-2}, {"params": [bias], "lr": 1e-1}])

    def train_dataloader(self):
        return DataLoader(Augmented(), batch_size=16, shuffle=True)


class Epochs(Wild):
    """Notes numbers of an epoch in the hooks of the epoch, and the rate by a callback."""

    def on_train_epoch_start(self):
        self.rate = self.optimizers().param_groups[0]["lr"]

    def on_train_epoch_end(self):
        self.log("rate", self.rate)

    def configure_callbacks(self):
        return [LearningRateMonitor("step")] if self.trainer.logger else []


class RateInTheStep(Wild):
    """Logs the learning rate where the loss is logged."""

    def training_step(self, batch, batch_idx):
        self.log("lr", self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)


class LastDraw(Wild):
    """Augments on the device, and keeps its last draw, as the augmentations of kornia do."""

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        self.brightness = 0.9 + 0.2 * torch.rand(len(x), 1, 1, 1)
        return x * self.brightness, y


class WarmsUp(Wild):
    """Counts its steps, caches constants in the first one, and keeps the last sample of a weight."""

    def __init__(self):
        super().__init__()
        self.steps, self.grid = 0, None

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.steps += 1
        if self.grid is None:
            self.grid = torch.linspace(-0.1, 0.1, SIDE)
        last = self.net[-1]
        self.sample = last.weight + 0.01 * torch.randn_like(last.weight)
        logits = F.linear(self.net[:-1](x + self.grid), self.sample, last.bias)
        return min(1.0, self.steps / 2) * F.cross_entropy(logits, y)


class Teacher(Wild):
    """A moving average of the weights after each step teaches the next one."""

    def __init__(self):
        super().__init__()
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)

    def loss_of(self, batch):
        x, y = batch
        logits = self(x)
        return F.cross_entropy(logits, y) + F.mse_loss(logits, self.teacher(x.flip(-1)))

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
            slow.data.lerp_(fast.data, 0.1)


class Task(enum.Enum):
    ONE_LABEL = enum.auto()


class Hyperparameters(Wild):
    """Hyperparameters of all kinds; a schedule for every second step, with a monitor that nothing reads."""

    def __init__(self, task=Task.ONE_LABEL, loss=nn.CrossEntropyLoss, net=None, weights=(1.0, 2.0, 3.0)):
        super().__init__(net or small_network())
        make, weights = functools.partial(loss, label_smoothing=0.1), torch.tensor(weights)
        self.save_hyperparameters({"task": task, "loss": loss, "make": make, "net": self.net, "weights": weights})
        self.loss = make(weight=weights)

    def loss_of(self, batch):
        x, y = batch
        return self.loss(self(x), y)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        config = {"scheduler": schedule, "interval": "step", "frequency": 2, "monitor": "val_loss"}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Flips(Wild):
    """Augments on the device by a transform that decides in Python."""

    def __init__(self):
        super().__init__()
        self.flip = v2.RandomHorizontalFlip()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        x, y = batch
        return (self.flip(x) if self.trainer.training else x), y


class BatchNorm(Wild):
    """A network of torchvision."""

    def __init__(self):
        super().__init__(torchvision.models.resnet18(num_classes=CLASSES))


class Manual(Wild):
    """Two optimizers, stepped by hand, as in a GAN."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1), torch.optim.SGD(self.parameters(), lr=0.1)]


class Item(Wild):
    """Keeps the loss as a number."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


class Outputs(Wild):
    """Collects what its steps return, for the end of the epoch."""

    def __init__(self):
        super().__init__()
        self.outputs = []

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self):
        self.log("epoch_loss", torch.stack(self.outputs).mean())
        self.outputs.clear()


class Mixup(Wild):
    """Mixes images of a batch (Zhang et al. 2018) in the collation."""

    def train_dataloader(self):
        mix = v2.MixUp(num_classes=CLASSES)
        return DataLoader(
            TensorDataset(*images()),
            batch_size=16,
            collate_fn=lambda rows: mix(*torch.utils.data.default_collate(rows)),
        )


class Clipped(Wild):
    """Clips the gradient of the batch by hand."""

    def on_before_optimizer_step(self, optimizer):
        self.clip_gradients(optimizer, gradient_clip_val=1.0)


class Weighted(Wild):
    """Draws rare classes more often."""

    def train_dataloader(self):
        x, y = images()
        sampler = torch.utils.data.WeightedRandomSampler(torch.ones(N), N)
        return DataLoader(TensorDataset(x, y), batch_size=16, sampler=sampler)


TRAIN = (
    *(OneCycle, StepsOfAnEpoch, Metrics, MultiLabel, Segmentation, HuggingFace, TimmSchedule, Autoencoder, Plateau),
    *(Frozen, Epochs, RateInTheStep, LastDraw, WarmsUp, Teacher, Hyperparameters, Mixup, Clipped),
)
"""Modules that train as they are."""

REFUSED = {
    Flips: ("self.flip(x)", "one_by_one"),
    BatchNorm: ("self.net(x)", "batch_norm_to_group_norm"),
    Manual: ("automatic_optimization of Manual is False", "Use automatic optimization with one optimizer"),
    Item: ("self.last = loss.item()", "keep numbers in tensors"),
    Outputs: ("Outputs.outputs", "self.log"),
    Weighted: ("WeightedRandomSampler", "Remove it"),
}
"""Modules that are refused: what the message names, and the change that it asks for."""
