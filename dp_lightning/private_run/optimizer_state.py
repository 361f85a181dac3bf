"""The state and settings of an optimizer, which only its own step and schedules may change."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from dp_lightning.errors import ModelError
from dp_lightning.privacy.isolation.contents import Contents
from dp_lightning.privacy.isolation.later import Later


class OptimizerState:
    """Compares the settings of an optimizer's groups, and its tensors, with those that were there before.

    Args:
        optimizer: of the run.
        later: where what a GPU finds out is given to be read.
    """

    def __init__(self, optimizer: Optimizer, later: Later) -> None:
        self._optimizer, self._later = optimizer, later
        self._settings: list[dict[str, Any]] | None = None
        self._tensors: list[tuple[str, Tensor]] = []
        self._contents: Contents | None = None

    def note(self) -> None:
        """The optimizer has stepped: from here on nothing else may change its tensors, nor its settings."""
        self.note_settings()
        tensors = self._found()
        if self._contents is None or [id(tensor) for _, tensor in tensors] != [
            id(tensor) for _, tensor in self._tensors
        ]:
            self._tensors, self._contents = tensors, Contents([tensor for _, tensor in tensors])
        else:
            self._contents.hold()

    def note_settings(self) -> None:
        """A schedule has stepped."""
        self._settings = self._settings_now()

    def require_same_settings(self) -> None:
        """Refuse a setting that was changed by code other than the optimizer's step and schedules.

        Where the optimizer has not stepped yet, those of now are noted.

        Raises:
            ModelError: naming the setting.
        """
        now = self._settings_now()
        if self._settings is None:
            self._settings = now
        elif now != self._settings:
            pairs = zip(self._settings, now, strict=False)
            names = sorted({name for before, after in pairs for name in after if before.get(name) != after[name]})
            raise ModelError(
                f"The optimizer's {', '.join(names) or 'groups'} changed between two steps, by other code than "
                "optimizer_step and the schedules of configure_optimizers, such as a hook. Only what the steps release "
                "may change the model. Set it by a schedule, or in optimizer_step."
            )

    def require_same(self) -> None:
        """Refuse a setting or a tensor that was changed by other code; tensors of a GPU when they are read.

        Raises:
            ModelError: naming it.
        """
        self.require_same_settings()
        if self._contents is None:
            return
        there = {id(tensor) for _, tensor in self._found()}
        known = [name for name, _ in self._tensors]

        def unread(flags: Tensor, indices: list[int]) -> None:
            def tell(read: Tensor) -> None:
                _refuse([known[index] for index, differs in zip(indices, read.tolist(), strict=True) if differs])

            self._later.read(flags, tell)

        names = [known[index] for index in self._contents.changed(unread)]
        _refuse([*names, *(name for name, tensor in self._tensors if id(tensor) not in there)])

    def _found(self) -> list[tuple[str, Tensor]]:
        states = self._optimizer.state.values()
        return [(str(name), value) for state in states for name, value in state.items() if isinstance(value, Tensor)]

    def _settings_now(self) -> list[dict[str, Any]]:
        groups = self._optimizer.param_groups
        return [{name: _value(group[name]) for name in group if name != "params"} for group in groups]


def _refuse(names: list[str]) -> None:
    if names:
        raise ModelError(
            f"The optimizer's {', '.join(sorted(set(names)))} changed between two steps, by other code than the "
            "optimizer, such as a hook. Only what the steps release may change the model. Change it in optimizer_step."
        )


def _value(setting: Any) -> Any:
    return setting.tolist() if isinstance(setting, Tensor) else setting
