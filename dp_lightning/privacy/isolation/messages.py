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


_CLOSED = threading.local()


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
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()) or getattr(_CLOSED, "now", False):
        yield
        return
    with _closed(who):
        yield


@contextmanager
def _closed(who: str) -> Iterator[None]:
    this = threading.get_ident()

    def closed(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def sends(*args: Any, **kwargs: Any) -> Any:
            # A backward pass on a GPU runs in threads of autograd.
            if threading.get_ident() == this or isinstance(threading.current_thread(), ForeignThread):
                raise ModelError(f"{who} uses torch.distributed ({name}). {SENT}")
            return method(*args, **kwargs)

        return sends

    before, begun = [(kind, name, vars(kind)[name]) for kind, name in _methods()], operations_of_groups()
    _CLOSED.now = True
    try:
        for kind, name, method in before:
            setattr(kind, name, closed(method, name))
        with groups_without_names():
            yield
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)
        _CLOSED.now = False
    if operations_of_groups() != begun:
        raise ModelError(f"A process group of torch.distributed was used while {who} ran. {SENT}")


@functools.cache
def _methods() -> list[tuple[type, str]]:
    return [
        (kind, name)
        for kind in carriers_of_messages()
        for name, member in vars(kind).items()
        if callable(member) and not isinstance(member, type) and not name.startswith("__") and name not in _HARMLESS
    ]
