"""One example's gradient at a time, around Lightning's own forward and backward pass over a physical batch."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dp_lightning.callbacks.own_step import silent, training_loss
from dp_lightning.errors import ConfigurationError, ModelError
from dp_lightning.privacy.checks.layers import refuse_batch_statistics
from dp_lightning.privacy.disk import DiSK, Extrapolation
from dp_lightning.privacy.gradients import GradientEngine
from dp_lightning.privacy.gradients.contribution import Contribution


@dataclass(frozen=True)
class GradientSettings:
    """What an example's gradient is, before it is clipped.

    Args:
        loss_reduction: whether the loss is the ``mean`` or the ``sum`` over the rows of a batch.
        augmult: K, the views of each example, rows that follow each other. Its gradient is the mean over them.
        disk: where the gradients are taken; None is at the parameters.

    Raises:
        ConfigurationError: naming the setting.
    """

    loss_reduction: str
    augmult: int
    disk: DiSK | None

    def __post_init__(self) -> None:
        if self.loss_reduction not in ("mean", "sum"):
            raise ConfigurationError(f"privacy.loss_reduction is {self.loss_reduction!r}; choose 'mean' or 'sum'.")
        if self.augmult < 1:
            raise ConfigurationError(f"privacy.augmult is {self.augmult}; it must be at least 1.")

    @property
    def clipped(self) -> dict[str, Any]:
        """What a run that goes on has to keep: its statement says it once for all steps."""
        return {"augmult": self.augmult, "disk": None if self.disk is None else asdict(self.disk)}

    def require_same(self, earlier: dict[str, Any]) -> None:
        """Compare with ``clipped`` of the run that goes on.

        Raises:
            ConfigurationError: naming the settings that differ.
        """
        now = self.clipped
        if differing := [name for name in now if earlier[name] != now[name]]:
            differences = ", ".join(f"privacy.{name} {earlier[name]}, and it is {now[name]} now" for name in differing)
            raise ConfigurationError(
                f"The checkpoint's run has {differences}: the statement could not say what the run clips. Set it to "
                "the run's value."
            )

    def describe(self) -> dict[str, str]:
        """What differs from one gradient at the parameters, for the privacy statement."""
        views = {} if self.augmult == 1 else {"augmult": f"mean over {self.augmult} views of each example"}
        return views | ({} if self.disk is None else {"gradients": self.disk.describe()})


class ExampleGradients:
    """Takes the per-example gradients of the trained parameters of a module.

    Args:
        module: parameters that require a gradient now are the trained ones.
        settings: what an example's gradient is.
    """

    def __init__(self, module: pl.LightningModule, settings: GradientSettings) -> None:
        self.engine = GradientEngine(module)
        self._module, self._settings, disk = module, settings, settings.disk
        # Two gradients of each example, of which the second one is taken at the extrapolated point and has this weight.
        self._second_weight = None if disk is None or disk.gamma is None else disk.weight
        self._extrapolation = None if disk is None else Extrapolation(self.engine.parameters, disk.length)
        self._versions: dict[str, tuple[Tensor, int]] = {}
        self._norms = [
            (name, m) for name, m in module.named_modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        ]
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
            size: number of examples, of K rows each.
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
        passes = 1 if self._second_weight is None else 2
        self.engine.begin(size, take, augmult=self._settings.augmult, passes=passes)

    def scale(self, loss: Tensor, divided_by: float) -> None:
        """Between the passes: seed the backward pass, so that it gives the gradients of single losses.

        Args:
            loss: from which the backward pass starts.
            divided_by: by what the module's loss has been divided.
        """
        weight = 1.0 if self._second_weight is None else 1 - self._second_weight
        self.engine.scale(loss, divided_by * weight * self._per_example)

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
            self.engine.scale(loss, self._second_weight * self._per_example)
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

    def require_no_others(self, optimizer: Optimizer) -> None:
        """Before an optimizer's step.

        Raises:
            ModelError: when a parameter has a gradient that is not one of the trained ones.
        """
        trained = {id(p) for p in self.parameters.values()}
        for group in optimizer.param_groups:
            for raw in group["params"]:
                if raw.grad is not None and id(raw) not in trained:
                    raise ModelError(
                        f"A parameter of shape {tuple(raw.shape)} that was frozen when training started has a raw "
                        "gradient. Which parameters are trained must not change during a private run."
                    )

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
    def _per_example(self) -> float:
        """What makes of the loss the sum over examples of the mean over their views."""
        return self._size if self._settings.loss_reduction == "mean" else 1 / self._settings.augmult

    def _tensor_versions(self) -> dict[str, tuple[Tensor, int]]:
        """Each parameter and buffer, and how often it was changed in place."""
        tensors = (*self._module.named_parameters(), *self._module.named_buffers())
        return {name: (tensor, tensor._version) for name, tensor in tensors if not tensor.is_inference()}

    def _require_versions(self) -> None:
        for name, norm in self._norms:
            refuse_batch_statistics(name, norm)
        for name, (tensor, count) in self._tensor_versions().items():
            before, earlier = self._versions.get(name, (None, 0))
            if tensor is not before or count != earlier:
                raise ModelError(
                    f"'{name}' is changed while an example's gradient is computed. A parameter or buffer computed from "
                    "raw examples would be saved with the model, outside of the guarantee."
                )
