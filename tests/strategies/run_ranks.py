"""What one rank does in the tests: a private run, which leaves ``rank0.pt`` or so, and a release of noise alone."""

import hashlib
import os
from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback
from dp_lightning.callbacks.privacy import privacy_of
from dp_lightning.errors import DpLightningError
from dp_lightning.postprocess import Momentum, Orthogonalize
from dp_lightning.privacy import ClipPlan, PrivacyPlan, PrivateStep
from dp_lightning.ranks import Ranks


class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 10))
        self.register_buffer("scale", torch.ones(2))
        # A weight that is not contiguous has to reach the other ranks too.
        self.net = net.to(memory_format=torch.channels_last)

    def training_step(self, batch, batch_idx):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        # A collective in each step: ranks that differ in whether they log would wait for ever.
        self.log("loss", loss, sync_dist=True, on_step=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(pl.Callback):
    """What this rank saw in each step: which examples, the loss, and the weights after it."""

    def __init__(self):
        self.drawn, self.losses, self.hashes, self.indices = [], [], [], []

    def on_train_start(self, trainer, module):
        step = privacy_of(trainer).private_run.step
        accumulate = step.accumulate

        def noted(batch):
            self.indices += batch.place.indices
            accumulate(batch)

        step.accumulate = noted

    def on_train_batch_end(self, trainer, module, *args):
        state = b"".join(p.detach().contiguous().numpy().tobytes() for p in module.parameters())
        self.hashes.append(hashlib.sha256(state).hexdigest())
        self.losses.append(float(trainer.callback_metrics.get("loss", -1)))
        self.drawn.append(self.indices)
        self.indices = []


class Drift(pl.Callback):
    """Makes one rank differ from the others in the last bits of a number of a parameter and of a buffer."""

    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_rank == 1:
            with torch.no_grad():
                module.net[-1].bias[0].add_(1e-6)
                module.scale[0].add_(1e-6)


def main(settings):
    folder, place = Path(settings["folder"]), int(os.environ.get("LOCAL_RANK", 0))
    notes, others = Notes(), []
    if settings.get("muon"):
        others.append(PostProcessCallback([Momentum(0.9), Orthogonalize()]))
    if settings.get("drift"):
        others.append(Drift())

    def of_rank(group):
        return {name: values[place] for name, values in settings.get(group, {}).items()}

    defaults = {"delta": 1e-3, "accountant": "rdp"}
    privacy = PrivacyCallback(**{**defaults, **settings["privacy"], **of_rank("privacy_by_rank")})
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=settings["devices"],
        strategy=settings.get("strategy", "dp_ddp") if settings["devices"] > 1 else "auto",
        default_root_dir=folder,
        callbacks=[privacy, *others, notes],
        **dict.fromkeys(quiet, False),
        **{"max_steps": settings["max_steps"], **of_rank("trainer_by_rank")},
    )
    # Another seed on each rank: only the broadcast at the start makes their parameters equal.
    torch.manual_seed(place)
    module = Net()
    if settings.get("strategy") != "ddp":  # which does not send types that gloo does not know
        module.register_buffer("phases", torch.randn(3, dtype=torch.complex128))
        module.register_buffer("counts", torch.randint(100, (2, 3), dtype=torch.int16))
    for name in settings.get("frozen_by_rank", {place: []})[place]:
        module.get_parameter(name).requires_grad_(False)
    generator = torch.Generator().manual_seed(0)
    count = settings.get("num_train", 60)
    images, labels = torch.randn(count, 1, 8, 8, generator=generator), torch.randint(10, (count,), generator=generator)
    dataset = settings.get("data_by_rank", lambda dataset, place: dataset)(TensorDataset(images, labels), place)
    loader = DataLoader(dataset, batch_size=7, shuffle=True)
    trainer.fit(module, loader, ckpt_path=settings.get("ckpt_path"), weights_only=True)
    if "save" in settings:
        trainer.save_checkpoint(settings["save"])
    found = {name: vars(notes)[name] for name in ("hashes", "drawn", "losses")}
    found |= {"parameters": dict(module.state_dict())}
    found |= {"steps": privacy.ledger.num_steps, "global_step": trainer.global_step}
    torch.save(found, folder / f"rank{trainer.global_rank}.pt")


PLAN = PrivacyPlan(num_train=1000, expected_batch_size=50, num_steps=100, noise_multiplier=0.7, delta=1e-4)


def release(size, folder, claimed, bands):
    """Five releases of gradients that are zero: leaves the noise, times B, or the error, in ``rank<rank>.pt``."""
    rank = int(os.environ.get("RANK", 0))
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)
    module = nn.Linear(1, 500_000, bias=False)
    step = PrivateStep(
        module,
        lambda batch: 0 * module(batch[0]).sum(),
        TensorDataset(torch.ones(1000, 1)),
        plan=replace(PLAN, bands=bands, num_steps=5),
        clip_plan=ClipPlan.flat(max_grad_norm=3.0),
        max_physical_batch_size=8,
        ranks=Ranks(rank if claimed is None else claimed, size),
        seed=0,
    )
    noise = []
    try:
        for _ in range(5):
            for batch in step.batches():
                step.accumulate(batch)
            stop = step.release(stop=rank == size - 1)
            noise.append(module.weight.grad.flatten() * PLAN.expected_batch_size)
    except DpLightningError as error:
        result = str(error)
    else:
        result = {"noise": torch.stack(noise), "stop": stop, "coefficients": list(step.noise.coefficients)}
    torch.save(result, f"{folder}/rank{rank}.pt")
    torch.distributed.destroy_process_group()
