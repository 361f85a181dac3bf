"""The known name that a misspelt one stands for."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the known name most like ``name``, with a space before it; empty if none is like it."""
    by_lower_case = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return f" Did you mean {by_lower_case[near[0]]}?" if near else ""
