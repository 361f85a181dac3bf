"""Lets a function mode see inside an autograd function that vmap maps by itself.

torch runs ``forward`` and ``backward`` of such a function under a vmap of its own, on tensors that it wraps anew.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


def watched(
    function: type[torch.autograd.Function], mode: TorchFunctionMode, note: Callable[[Any], None]
) -> type[torch.autograd.Function]:
    """The same function, with a mode that sees inside it.

    Args:
        function: a function with ``generate_vmap_rule``.
        mode: sees what the function calls.
        note: gets the tensors that the function is given.
    """

    def seen(own: Callable[..., Any]) -> Any:
        def run(*args: Any) -> Any:
            note(args)
            note(tuple(getattr(args[0], "saved_tensors", ())) if args else ())
            with mode:
                return own(*args)

        return staticmethod(run)

    members = {name: seen(getattr(function, name)) for name in ("forward", "setup_context", "backward")}
    return type(function.__name__, (function,), members)
