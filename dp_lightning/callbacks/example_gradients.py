"""One example's gradient at a time, around Lightning's own forward and backward pass over a physical batch."""

from collections.abc import Callable, Mapping
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from dp_lightning.callbacks.own_step import silent, training_loss
from dp_lightning.errors import ModelError
from dp_lightning.privacy.disk import DiSK, Extrapolation
from dp_lightning.privacy.gradients import GradientEngine
from dp_lightning.privacy.gradients.contribution import Contribution


class ExampleGradients:
    """Takes the per-example gradients of the trained parameters of a module.

    Args:
        module: parameters that require a gradient now are the trained ones.
        loss_reduction: whether the loss is the ``mean`` or the ``sum`` over examples.
        disk: where the gradients are taken; None is at the parameters.
    """

    def __init__(self, module: pl.LightningModule, *, loss_reduction: str, disk: DiSK | None) -> None:
        self.engine = GradientEngine(module)
        self._module, self._loss_reduction = module, loss_reduction
        # Two gradients of each example, of which the second one is taken at the extrapolated point and has this weight.
        self._second_weight = None if disk is None or disk.gamma is None else disk.weight
        self._extrapolation = None if disk is None else Extrapolation(self.engine.parameters, disk.length)
        self._versions: dict[str, int] = {}
        self._inputs: tuple[Any, int] = (None, 0)
        self._size = 0
        self._random: list[Tensor] = []

    @property
    def parameters(self) -> dict[str, Any]:
        """The trained parameters by name."""
        return self.engine.parameters

    def begin(
        self, batch: Any, batch_idx: int, *, size: int, first: bool, take: Callable[[Contribution], None]
    ) -> None:
        """Before the forward pass.

        Args:
            batch, batch_idx: as ``training_step`` gets them.
            size: number of examples.
            first: whether a logical batch starts with it.
            take: gets what the batch contributes to each parameter.
        """
        self._inputs, self._size = (batch, batch_idx), size
        if self._extrapolation is not None:
            if first:
                self._extrapolation.advance()
            if self._second_weight is None:
                self._extrapolation.away()
        if self._second_weight is not None:
            self._random = self._random_states()
        self._versions = self._tensor_versions()
        self.engine.begin(size, take, passes=1 if self._second_weight is None else 2)

    def scale(self, loss: Tensor, divided_by: float) -> None:
        """Between the passes: seed the backward pass, so that it gives the gradients of single losses.

        Args:
            loss: from which the backward pass starts.
            divided_by: by what the module's loss has been divided.
        """
        weight = 1.0 if self._second_weight is None else 1 - self._second_weight
        self.engine.scale(loss, divided_by * weight * self._examples_of_a_mean)

    def finish(self, trainer: pl.Trainer) -> None:
        """After the backward pass.

        Raises:
            ModelError: when a parameter or buffer was changed in the meantime.
        """
        self._require_versions()
        if self._second_weight is not None:
            assert self._extrapolation is not None
            self._extrapolation.away()
            self._versions = self._tensor_versions()
            self.engine.again()
            with (
                torch.random.fork_rng(self._cuda_devices),
                silent(self._module),
                trainer.precision_plugin.train_step_context(),
            ):
                self._repeat_random_states()
                loss = training_loss(self._module, *self._inputs)
            self.engine.scale(loss, self._second_weight * self._examples_of_a_mean)
            loss.backward()
            self._require_versions()
        self.engine.finish()
        self.end()

    def end(self) -> None:
        """Stop to listen, keep no example, and leave the parameters where the optimizer has put them."""
        self._inputs = (None, 0)
        self.engine.end()
        if self._extrapolation is not None:
            self._extrapolation.back()

    def close(self) -> None:
        """Take the hooks off the module."""
        self.end()
        self.engine.detach()

    def state_dict(self) -> dict[str, Tensor]:
        """What the next step needs of this one: empty without DiSK."""
        return {} if self._extrapolation is None else self._extrapolation.state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Continue from ``state_dict``."""
        if self._extrapolation is not None:
            self._extrapolation.load_state_dict(state)

    # Dropout has to draw the same in both passes: the difference of two masks would be weighted with c.
    @property
    def _cuda_devices(self) -> list[torch.device]:
        device = self._module.device
        return [device] if device.type == "cuda" else []

    def _random_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda_devices)]

    def _repeat_random_states(self) -> None:
        on_cpu, *on_cuda = self._random
        torch.set_rng_state(on_cpu)
        for device, state in zip(self._cuda_devices, on_cuda, strict=True):
            torch.cuda.set_rng_state(state, device)

    @property
    def _examples_of_a_mean(self) -> int:
        return self._size if self._loss_reduction == "mean" else 1

    def _tensor_versions(self) -> dict[str, int]:
        """How often each parameter and buffer was changed in place."""
        tensors = (*self._module.named_parameters(), *self._module.named_buffers())
        return {name: tensor._version for name, tensor in tensors if not tensor.is_inference()}

    def _require_versions(self) -> None:
        for name, count in self._tensor_versions().items():
            if count != self._versions.get(name, count):
                raise ModelError(
                    f"'{name}' is changed while an example's gradient is computed. A parameter or buffer computed from "
                    "raw examples would be saved with the model, outside of the guarantee."
                )
