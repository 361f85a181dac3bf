"""Keeps a loss in its own thread: neither its watch nor vmap sees other threads.

A thread that was started before may still be given work. A tensor of an example is useless there, since torch knows it
only inside the vmap, and its text is withheld.
"""

import _thread
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from dp_lightning.errors import ModelError
from dp_lightning.torch_internals import text_of_wrapped

# What starts a thread: one function under several names, and another one since Python 3.13.
_STARTS = [
    (module, name)
    for module in (_thread, threading)
    for name in (
        "start_new_thread",
        "start_new",
        "_start_new_thread",
        "start_joinable_thread",
        "_start_joinable_thread",
    )
    if hasattr(module, name)
]


@contextmanager
def no_threads() -> Iterator[None]:
    """Refuse to start a thread from the current thread; other threads may.

    Raises:
        ModelError: if one is started.
    """
    this = threading.get_ident()

    def closed(start: Callable[..., Any]) -> Callable[..., Any]:
        def started(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != this:
                return start(*args, **kwargs)
            raise ModelError(
                "training_step starts a thread (threading.Thread, ThreadPoolExecutor and the like). The thread could "
                "see more than one example. Do its work in training_step itself, or in the data set."
            )

        return started

    before = [(module, name, getattr(module, name)) for module, name in _STARTS]
    for module, name, start in before:
        setattr(module, name, closed(start))
    try:
        yield
    finally:
        for module, name, start in before:
            setattr(module, name, start)


@contextmanager
def no_text() -> Iterator[None]:
    """Context around a vmap: the text of a tensor shows no numbers, in any thread."""
    with text_of_wrapped("a tensor of one example"):
        yield
