"""Keeps a loss in its own process: what it sent to another rank, the loss of another example could see there.

torch.distributed sends by the methods of process groups, of their backends, and of stores. While a loss runs, those
that do more than tell a number or a name refuse the loss's thread, and functional collectives find no group. A method
that was taken from a group before is found by the group's own count, when the loss has ended.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.refusals import SENT
from dp_lightning.torch_internals import ForeignThread, carriers_of_messages, groups_without_names, operations_of_groups

_HARMLESS = ("rank", "size", "name")


@contextmanager
def no_messages() -> Iterator[None]:
    """Refuse to send to other processes, or to receive. Other Python threads may use stores.

    Raises:
        ModelError: where it is tried, or at the end.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        yield
        return
    this = threading.get_ident()

    def closed(method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def sends(*args: Any, **kwargs: Any) -> Any:
            # A backward pass on a GPU runs in threads of autograd.
            if threading.get_ident() == this or isinstance(threading.current_thread(), ForeignThread):
                raise ModelError(f"training_step uses torch.distributed ({name}). {SENT}")
            return method(*args, **kwargs)

        return sends

    before, begun = [(kind, name, vars(kind)[name]) for kind, name in _methods()], operations_of_groups()
    for kind, name, method in before:
        setattr(kind, name, closed(method, name))
    try:
        with groups_without_names():
            yield
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)
    if operations_of_groups() != begun:
        raise ModelError(f"A process group of torch.distributed was used during training_step. {SENT}")


@functools.cache
def _methods() -> list[tuple[type, str]]:
    return [
        (kind, name)
        for kind in carriers_of_messages()
        for name, member in vars(kind).items()
        if callable(member) and not isinstance(member, type) and not name.startswith("__") and name not in _HARMLESS
    ]
