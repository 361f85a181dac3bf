"""Stand-ins that refuse every use: as a number, as a container, as an operand."""

from collections.abc import Callable
from typing import Any

# Special methods, which Python looks up only in the class.
_UNARY = "abs bool bytes ceil complex float floor format hash index int invert neg pos reduce_ex round trunc"
_COMPARE = "eq ge gt le lt ne"
_CONTAINER = "array array_function array_ufunc call contains getitem iter len next reversed"
_BINARY = "add and divmod floordiv lshift matmul mod mul or pow rshift sub truediv xor"
_NAMES = f"{_UNARY} {_COMPARE} {_CONTAINER} {_BINARY} r{_BINARY.replace(' ', ' r')}".split()


def refuse_every_use(kind: type, refuse: Callable[..., Any]) -> None:
    """Replace each special method by which code would use an instance of ``kind`` by ``refuse``, which raises.

    Its text, its attributes and the way it is copied stay those of the class.
    """
    for name in _NAMES:
        setattr(kind, f"__{name}__", refuse)
