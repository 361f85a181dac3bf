"""Keeps a loss in its own process: what it sent to another rank, the loss of another example could see there.

torch.distributed sends by the methods of process groups, of their backends, and of stores. While a loss runs, those
that do more than tell a number or a name refuse the loss's thread, and functional collectives find no group.
"""

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from dp_lightning.errors import ModelError
from dp_lightning.privacy.gradients.refusals import SENT
from dp_lightning.torch_internals import ForeignThread, carriers_of_messages, groups_without_names

_HARMLESS = ("rank", "size", "name")


@contextmanager
def no_messages() -> Iterator[None]:
    """Refuse to send to other processes, or to receive, from the current thread; other Python threads may.

    Raises:
        ModelError: where it is tried.
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

    before = _methods()
    for kind, name, method in before:
        setattr(kind, name, closed(method, name))
    try:
        with groups_without_names():
            yield
    finally:
        for kind, name, method in before:
            setattr(kind, name, method)


@functools.cache
def _methods() -> list[tuple[type, str, Any]]:
    return [
        (kind, name, member)
        for kind in carriers_of_messages()
        for name, member in vars(kind).items()
        if callable(member) and not isinstance(member, type) and not name.startswith("__") and name not in _HARMLESS
    ]
