"""Files that decide what is trained on, so nobody but their owner may have written them."""

import os
import stat
from collections.abc import Callable
from pathlib import Path


def why_not_own(path: Path, *, others: int, is_kind: Callable[[int], bool] = stat.S_ISREG) -> str | None:
    """What is wrong with the owner, the kind or the mode of a path; None if nothing is.

    Args:
        others: the permission bits that it must not have.
        is_kind: of its mode.
    """
    facts = path.lstat()
    if not is_kind(facts.st_mode):
        return "is a link" if stat.S_ISLNK(facts.st_mode) else "is of another kind than what is kept there"
    if facts.st_uid != os.geteuid():
        return "belongs to another user"
    if facts.st_mode & others:
        return f"is open to other users (mode {stat.S_IMODE(facts.st_mode):o})"
    return None
