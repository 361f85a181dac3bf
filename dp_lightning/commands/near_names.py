"""The known name that a mistyped one stands for."""

import difflib
from collections.abc import Iterable

# Below it two names have so little in common that naming one for the other would mislead.
_LEAST_LIKENESS = 0.6


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that is most like ``name``; None if none is like it.

    Alike are names that share most letters in order (``widht`` and ``width``), names whose words are among those of the
    other (``model_name`` and ``name``), and a name and its initials (``learning_rate`` and ``lr``). Dotted names are
    compared whole, and by their last parts where the parts before are equal.
    """
    best = max(((_likeness(name, other), other) for other in sorted(known)), default=(0.0, ""))
    return best[1] if best[0] >= _LEAST_LIKENESS else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question that names the nearest known name, with a space before it; empty if there is none."""
    near = nearest(name, known)
    return "" if near is None else f" Did you mean {near}?"


def _likeness(name: str, other: str) -> float:
    group, _, last = name.lower().rpartition(".")
    other_group, _, other_last = other.lower().rpartition(".")
    if group != other_group:
        return difflib.SequenceMatcher(None, name.lower(), other.lower()).ratio()
    letters = difflib.SequenceMatcher(None, last, other_last).ratio()
    words, other_words = last.split("_"), other_last.split("_")
    if set(words) < set(other_words) or set(other_words) < set(words):
        return max(letters, 0.8)
    if last in _initials(other_words) or other_last in _initials(words):
        return max(letters, 0.7)
    return letters


def _initials(words: list[str]) -> set[str]:
    return {"".join(word[:1] for word in words)} if len(words) > 1 else set()
