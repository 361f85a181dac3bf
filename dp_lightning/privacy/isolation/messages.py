"""Keeps a loss in its own process: what it sent to another rank, the loss of another example could see there.

The same holds for what reads an example. torch.distributed sends by the methods of process groups, of their backends,
and of stores. While such code runs, those that do more than tell a number or a name refuse its thread, and functional
collectives find no group. A method that was taken from a group before is found by the group's own count at the end.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.refusals import SENT
from dp_lightning.torch_internals import (
    ForeignThread,
    carriers_of_messages,
    groups_without_names,
    operations_of_groups,
    rpc_runs,
)

_HARMLESS = ("rank", "size", "name")
_RUNNING = threading.local()  # ``who``: whose code runs in this thread, in words


@contextmanager
def no_messages(who: str = "training_step") -> Iterator[None]:
    """Refuse to send to other processes, or to receive. Other Python threads may use stores.

    Args:
        who: whose code runs, in words.

    Raises:
        ModelError: where it is tried, or at the end.
    """
    if rpc_runs():
        raise ModelError(
            f"torch.distributed.rpc is in use. {who} could send by it. {SENT} Call rpc.shutdown() before the fit."
        )
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if not ranks or getattr(_RUNNING, "who", None) is not None:
        yield
        return
    before, begun = [(kind, name, vars(kind)[name]) for kind, name, _ in _refusing()], operations_of_groups()
    _RUNNING.who = who
    try:
        for kind, name, method in _refusing():
            setattr(kind, name, method)
        with groups_without_names():
            yield
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)
        _RUNNING.who = None
    if operations_of_groups() != begun:
        raise ModelError(f"A process group of torch.distributed was used while {who} ran. {SENT}")


@functools.cache
def _refusing() -> list[tuple[type, str, Callable[..., Any]]]:
    """For each class and name of a method: one that refuses where the code runs that sends nothing."""
    return [
        (kind, name, _closed(member, name))
        for kind in carriers_of_messages()
        for name, member in vars(kind).items()
        if callable(member) and not isinstance(member, type) and not name.startswith("__") and name not in _HARMLESS
    ]


def _closed(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    def sends(*args: Any, **kwargs: Any) -> Any:
        who = getattr(_RUNNING, "who", None)
        if who is None and isinstance(threading.current_thread(), ForeignThread):
            who = "training_step"  # its backward pass on a GPU, in a thread of autograd
        if who is None:
            return method(*args, **kwargs)
        raise ModelError(f"{who} uses torch.distributed ({name}). {SENT}")

    return sends
