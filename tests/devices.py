"""A device without memory, on which a run takes every way that it would take on a GPU.

A tensor of the meta device has a shape and no numbers. Every number that is read from one makes a GPU's host wait, and
every operation that takes a tensor of the CPU beside one fails on a GPU.
"""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dp_lightning.privacy import secret_normals
from dp_lightning.ranks import Ranks

META = torch.device("meta")
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default, torch.ops.aten.to.device}


class OneDevice(TorchDispatchMode):
    """Refuses operations on tensors of two devices, and notes every number that is read or sent.

    Attributes:
        reads: where in the code each was read.
        waits_for_copies: where tensors were sent to the device by other code than `processors.sent`: a copy from
            ordinary memory waits.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads: list[list[str]] = []
        self.waits_for_copies: list[list[str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        flat = (
            part for value in (*args, *kwargs.values()) for part in (value if isinstance(value, list) else (value,))
        )
        tensors = [leaf for leaf in flat if isinstance(leaf, torch.Tensor)]
        of_memory = [tensor for tensor in tensors if tensor.device != META]
        # A number on the CPU may stand beside a GPU's tensors.
        if len(of_memory) < len(tensors) and any(tensor.dim() for tensor in of_memory) and func not in _COPIES:
            raise AssertionError(f"{func} takes {[(tensor.device.type, tuple(tensor.shape)) for tensor in tensors]}")
        if func is torch.ops.aten._local_scalar_dense.default and tensors[0].device == META:
            self._note(self.reads)
            return 1
        if func in _COPIES and tensors[-1].device != META:
            to = tensors[0].device if func is torch.ops.aten.copy_.default else kwargs.get("device", args[-1])
            if isinstance(to, torch.device) and to == META:
                # Lightning sends the zeros with which an epoch's means begin.
                self._note(self.waits_for_copies, unless=("processors.py", "logger_connector/result.py"))
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if "copy out of meta tensor" not in str(error):
                raise
            self._note(self.reads)
            if func is torch.ops.aten.copy_.default:
                return args[0]
            return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)

    def __enter__(self) -> "OneDevice":
        self._made = _Made(self)
        self._made.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._made.__exit__(*error)

    def _note(self, places: list[list[str]], unless: tuple[str, ...] = ()) -> None:
        frames = traceback.extract_stack()
        if not any(frame.filename.endswith(unless) for frame in frames):
            places.append([f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames])


class _Made(TorchFunctionMode):
    """Notes the tensors that are made on the device from numbers of Python, which are copied there."""

    def __init__(self, device: OneDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        from_device = bool(args) and isinstance(args[-1], torch.Tensor) and args[-1].device == META
        if func in (torch.tensor, torch.as_tensor, torch.Tensor.new_tensor) and made.device == META and not from_device:
            # Lightning makes a tensor of a number that is logged, such as epsilon at its milestones.
            self._device._note(self._device.waits_for_copies, unless=("core/module.py",))
        return made


def stand_in_for_a_gpu(monkeypatch: Any) -> None:
    """Let a private step take the meta device for a GPU."""
    monkeypatch.setitem(secret_normals._PAIRS, "meta", secret_normals._PAIRS["cuda"])
    monkeypatch.setattr(torch, "autocast", lambda *args, **kwargs: contextlib.nullcontext())  # meta has none
    monkeypatch.setattr(Ranks, "add_up", lambda self, tensor: None)
    monkeypatch.setattr(Ranks, "of_rank_0", lambda self, value: value)


@contextlib.contextmanager
def trainers_use_it(monkeypatch: Any) -> Iterator[None]:
    """Let a Trainer that is told to use the CPU take the meta device."""
    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda self, device: None)
    monkeypatch.setattr(SingleDeviceStrategy, "root_device", property(lambda self: META))
    monkeypatch.setattr(SingleDeviceStrategy, "teardown", lambda self: None)  # moves the module back
    # As on a GPU, the parameters stay the objects that they are.
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
