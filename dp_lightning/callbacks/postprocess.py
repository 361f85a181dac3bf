"""The Lightning hook that applies a chain of transforms to the privatized gradients.

It acts in `on_before_optimizer_step`, where each parameter's `.grad` holds the privatized gradient, provided
that the callback that privatizes stands before it in `Trainer(callbacks=[...])`. It reads and writes `.grad`
and nothing else.
"""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Chain, Transform
from dp_lightning.strategies.private import trainer_ranks


class PostProcessCallback(Callback):
    """Transform the privatized gradients before the optimizer steps.

    The state of the transforms is saved in checkpoints under the names of the module's parameters.

    Args:
        transforms: applied in this order. None or an empty list leaves the gradients as they are.

    Raises:
        ConfigurationError: momentum is applied twice to the same parameters. When training starts: an
            optimizer with momentum beside a transform with momentum, or more than one optimizer.
    """

    def __init__(self, transforms: list[Transform] | None = None) -> None:
        self.chain = Chain(transforms or ())

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.chain.ranks = trainer_ranks(trainer)
        if not self.chain.transforms:
            return
        if len(trainer.optimizers) > 1:
            raise ConfigurationError(
                f"postprocess.transforms: the module has {len(trainer.optimizers)} optimizers, and every "
                "step of one would transform all gradients; return one optimizer from configure_optimizers"
            )
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        if self.chain.has_momentum and any(group.get("momentum", 0) > 0 for group in groups):
            raise ConfigurationError(
                "Momentum in two places: postprocess.transforms contains Momentum and the optimizer has "
                "momentum > 0. Set optimizer.init_args.momentum to 0, or remove Momentum from the transforms"
            )

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        gradients = {
            name: parameter.grad
            for name, parameter in pl_module.named_parameters()
            if parameter.requires_grad and parameter.grad is not None
        }
        for name, transformed in self.chain(gradients).items():
            gradients[name].copy_(transformed)

    def state_dict(self) -> dict[str, Any]:
        return self.chain.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.chain.load_state_dict(state_dict)


def describe_chains(trainer: Trainer) -> str:
    """What a trainer's callbacks do to the privatized gradient, in words."""
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    names = [
        type(transform).__name__
        for callback in callbacks
        if isinstance(callback, PostProcessCallback)
        for transform in callback.chain.transforms
    ]
    return ", then ".join(names) or "none"
