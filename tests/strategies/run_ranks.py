"""A private run of one rank, for the tests: ``main({"folder": ..., "devices": 2, ...})`` leaves ``rank0.pt`` or so."""

import hashlib
import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback
from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.postprocess import Momentum, Orthogonalize
from dp_lightning.strategies import private


class Net(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 10))
        self.register_buffer("scale", torch.ones(2))
        # A weight that is not contiguous has to reach the other ranks too.
        self.net = net.to(memory_format=torch.channels_last)
        self.lr = lr

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        # A collective in each step: ranks that differ in whether they log would wait for ever.
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Notes(pl.Callback):
    """What this rank saw."""

    def __init__(self):
        self.hashes, self.sizes, self.losses, self.size = [], [], [], 0
        self.drawn, self.indices = [], []

    def on_train_start(self, trainer, module):
        step = privacy_of(trainer).private_run.step
        accumulate = step.accumulate

        def noted(batch):
            self.size += int(batch.counted.sum())
            self.indices += batch.place.indices
            accumulate(batch)

        step.accumulate = noted

    def on_train_batch_end(self, trainer, module, *args):
        state = b"".join(p.detach().contiguous().numpy().tobytes() for p in module.parameters())
        self.hashes.append(hashlib.sha256(state).hexdigest())
        self.sizes.append(self.size)
        self.losses.append(float(trainer.callback_metrics.get("loss", -1)))
        self.drawn.append(self.indices)
        self.size, self.indices = 0, []


class Drift(pl.Callback):
    """Makes one rank differ from the others in the last bits of one number, or in a buffer."""

    def __init__(self, where):
        self.where = where

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_rank == 1:
            with torch.no_grad():
                {"parameter": module.net[-1].bias, "buffer": module.scale}[self.where][0].add_(1e-6)


class Owned(Orthogonalize):
    """Notes which matrices this rank orthogonalizes."""

    def __init__(self):
        super().__init__()
        self.names = []

    def update(self, gradients, state, noise):
        self.names.append(sorted(gradients))
        return super().update(gradients, state, noise)


def examples(count):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 1, 8, 8, generator=generator)
    return TensorDataset(images, torch.randint(10, (count,), generator=generator))


def main(settings):
    folder = Path(settings["folder"])
    # Another seed on each rank: only the broadcast at the start makes their parameters equal.
    ranks = settings.get("devices", 1)
    notes = Notes()
    owned, others = Owned(), []
    if settings.get("deal_out"):
        private._CPU = (1e-9, 0.0)
        others.append(PostProcessCallback([Momentum(0.9), owned]))
    if settings.get("drift"):
        others.append(Drift(settings["drift"]))
    place = int(os.environ.get("LOCAL_RANK", 0))

    def of_rank(group):
        return {name: values[place] for name, values in settings.get(group, {}).items()}

    defaults = {"delta": 1e-3, "accountant": "rdp"}
    privacy = PrivacyCallback(**{**defaults, **settings["privacy"], **of_rank("privacy_by_rank")})
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=ranks,
        strategy=settings.get("strategy", "dp_ddp") if ranks > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[privacy, *others, notes],
        **settings["trainer"],
        **of_rank("trainer_by_rank"),
    )
    torch.manual_seed(settings.get("seed", 0) + place)
    module = Net(settings.get("lr", 0.1))
    if settings.get("strategy") != "ddp":  # which does not send types that gloo does not know
        module.register_buffer("phases", torch.randn(3, dtype=torch.complex128))
        module.register_buffer("counts", torch.randint(100, (2, 3), dtype=torch.int16))
    for name in settings.get("frozen_by_rank", {place: []})[place]:
        module.get_parameter(name).requires_grad_(False)
    dataset = examples(settings.get("num_train", 60) - place * settings.get("fewer_by_rank", 0))
    if settings.get("rolled"):
        dataset = TensorDataset(*(tensor.roll(place, 0) for tensor in dataset.tensors))
    if settings.get("own_split"):
        dataset = torch.utils.data.random_split(dataset, [50, 10])[0]
    loader = DataLoader(dataset, batch_size=7, shuffle=True)
    trainer.fit(module, loader, ckpt_path=settings.get("ckpt_path"), weights_only=True)
    if "save" in settings:
        trainer.save_checkpoint(settings["save"])
    torch.save(
        {
            "parameters": dict(module.state_dict()),
            "hashes": notes.hashes,
            "sizes": notes.sizes,
            "drawn": notes.drawn,
            "losses": notes.losses,
            "owned": owned.names,
            "steps": privacy.ledger.num_steps,
            "global_step": trainer.global_step,
        },
        folder / f"rank{trainer.global_rank}.pt",
    )
