"""Stand-ins that refuse every use: as a number, as a container, as an operand."""

from collections.abc import Callable
from typing import Any

# Special methods, for which Python looks in the class only.
_UNARY = "abs bool bytes ceil complex float floor format hash index int invert neg pos reduce_ex round trunc"
_COMPARE = "eq ge gt le lt ne"
_CONTAINER = "array array_function array_ufunc call contains getitem iter len next reversed"
_BINARY = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_NAMES = f"{_UNARY} {_COMPARE} {_CONTAINER} {_BINARY} r{_BINARY.replace(' ', ' r')}".split()


def refuse_every_use(kind: type, refuse: Callable[..., Any]) -> None:
    """Let each special method by which code would use an instance of ``kind`` be ``refuse``, which raises.

    Its text, its attributes and how it is copied stay those of the class.
    """
    for name in _NAMES:
        setattr(kind, f"__{name}__", refuse)
