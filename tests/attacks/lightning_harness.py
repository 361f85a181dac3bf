"""The same comparison through Lightning: a module with hooks, callbacks and optimizers of its own.

The transcript is replayed: on the second data set each release is replaced by that of the first, after it was
compared. So the weights of both runs, and everything that may follow from releases alone, have to be equal at the end.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from harness import OUTLIER, PHYSICAL, STEPS, N, examples
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, default_collate

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.privacy import PrivateStep


class LightningAttack(pl.LightningModule):
    """An ordinary LightningModule with something in it that may carry one example into the loss of another."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
        self.loader = DataLoader(TensorDataset(x, y), batch_size=4, collate_fn=self.collate)

    def collate(self, examples: list[Any]) -> Any:
        return default_collate(examples)

    def loss(self, batch: Any) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        return self.loader

    def data(self) -> pl.LightningDataModule | None:
        """A data module in the place of the loader."""
        return None

    def callbacks(self) -> list[pl.Callback]:
        """Of the trainer, after the private one."""
        return []


@dataclass
class Fit:
    """What a fit has released, and what it has left."""

    sums: list[Tensor] = field(default_factory=list)
    gradients: list[list[Tensor]] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)


def fit(
    kind: Callable[[Tensor, Tensor], LightningAttack], keep: list[int], mode: str, transcript: Fit | None = None
) -> Fit:
    """Fit on the examples in ``keep``, all of them in each draw."""
    x, y = examples()
    torch.manual_seed(0)
    module, done = kind(x[keep], y[keep]), Fit()
    release = PrivateStep.release

    def replayed(private: PrivateStep, *, stop: bool = False) -> bool:
        stopping = release(private, stop=stop)
        parameters = list(private.parameters.values())
        done.gradients.append([p.grad.clone() for p in parameters])
        done.sums.append(len(keep) * torch.cat([p.grad.double().flatten() for p in parameters]))
        if transcript is not None:
            for parameter, gradient in zip(parameters, transcript.gradients[len(done.sums) - 1], strict=True):
                parameter.grad.copy_(gradient)
        return stopping

    privacy = PrivacyCallback(
        expected_batch_size=len(keep),
        noise_multiplier=0.0,
        not_private=True,
        delta=1e-3,
        accountant="rdp",
        examples=mode,
        max_physical_batch_size=PHYSICAL,
    )
    with tempfile.TemporaryDirectory() as folder, mock.patch.object(PrivateStep, "release", replayed):
        trainer = pl.Trainer(
            callbacks=[privacy, *module.callbacks()],
            max_steps=STEPS,
            max_epochs=-1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=module.data())
    done.state = {name: value.clone() for name, value in module.state_dict().items()}
    return done


def compared(
    kind: Callable[[Tensor, Tensor], LightningAttack], mode: str = "together", removed: tuple[int, ...] = (OUTLIER,)
) -> tuple[float, bool]:
    """The largest change of a released sum, and whether equal releases leave equal weights."""
    whole = fit(kind, list(range(N)), mode)
    change, equal = 0.0, True
    for index in removed:
        rest = fit(kind, [other for other in range(N) if other != index], mode, whole)
        change = max(change, *(float((a - b).norm()) for a, b in zip(whole.sums, rest.sums, strict=True)))
        equal = equal and all(torch.equal(value, rest.state[name]) for name, value in whole.state.items())
    return change, equal
