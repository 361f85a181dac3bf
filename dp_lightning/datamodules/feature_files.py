"""The files of a cache of features, which nobody but their owner may have written."""

import fcntl
import hashlib
import math
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dp_lightning.atomic_files import replacing, require_writable, why_not_own
from dp_lightning.errors import DataError
from dp_lightning.processors import all_finite

# What a file holds, and where its metadata has the digest.
_PARTS, _DIGEST = ("features", "labels"), "digest"
_SETTING = "data.init_args.cache"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Within this context no other run writes into the folder, which is created if missing, for its owner alone.

    A run that finds it held waits, however long. On a file system without locks, it does not.

    Raises:
        ConfigurationError: it cannot be created.
        DataError: others can read it, it belongs to another user, or it cannot be opened.
    """
    place = _opened(folder)
    while not _is(place, folder):  # it was removed while this run waited
        os.close(place)
        place = _opened(folder)
    try:
        yield
    finally:
        with suppress(OSError):  # closing is not enough: a process that was forked since then has the lock too
            fcntl.flock(place, fcntl.LOCK_UN)
        os.close(place)


def _opened(folder: Path) -> int:
    """A descriptor of the folder with its lock."""
    if not os.path.lexists(folder):
        require_writable(folder.parent, _SETTING)
        folder.mkdir(exist_ok=True, mode=0o700)
    _require(folder, stat.S_ISDIR, 0o077)
    try:
        place = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise DataError(f"{folder} cannot be opened ({error.strerror}). Set {_SETTING} to another folder.") from error
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        rank_zero_info(f"Another run uses the features in {folder}. This one waits for it.")
        fcntl.flock(place, fcntl.LOCK_EX)
    except OSError:  # it has no locks
        pass
    return place


def _is(place: int, folder: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(place), folder.stat())
    except FileNotFoundError:
        return False


def require_own(path: Path) -> None:
    """Refuse a file that others can write, or that belongs to another user.

    Raises:
        DataError: naming it.
    """
    _require(path, stat.S_ISREG, 0o022)


@contextmanager
def writing(path: Path) -> Iterator[BinaryIO]:
    """A new file for its owner alone, which stands at ``path`` when it is complete.

    Raises:
        DataError: it cannot be written.
    """
    try:
        with replacing(path, private=True) as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{path} cannot be written ({error}). Make room, or set {_SETTING} to another folder. What was written "
            "before is kept."
        ) from error


def write(path: Path, piece: dict[str, Tensor], told: str) -> None:
    """Write features (n, ...) and labels (n,), and say ``told``; raises as `writing` does."""
    with writing(path) as file:
        save_file(piece, file.name, {_DIGEST: _digest(piece)})
    rank_zero_info(told)


def _digest(piece: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name in _PARTS:
        numbers: Any = piece[name].contiguous().view(torch.uint8).numpy()  # without a copy
        found.update(numbers)
    return found.hexdigest()


def _require(path: Path, is_kind: Callable[[int], bool], others: int) -> None:
    """Refuse a path of another kind or owner, or one with any of the permission bits ``others``."""
    if (fault := why_not_own(path, is_kind=is_kind, others=others)) is not None:
        raise DataError(
            f"{path} {fault}. Features are as private as the images, and anyone who can write them decides what is "
            f"trained on. If it is your own and its mode is the reason, change it to "
            f"{'700' if others == 0o077 else '600'} with chmod; or set {_SETTING} to another folder."
        )


def read(path: Path, shape: tuple[int, ...]) -> dict[str, Tensor]:
    """Features (n, *shape) and labels int64 (n,).

    Raises:
        DataError: the file is not the user's own, or is damaged.
    """
    if os.path.lexists(path):
        require_own(path)
    try:
        with safe_open(path, framework="pt") as file:
            digest, found = (file.metadata() or {}).get(_DIGEST), {name: file.get_tensor(name) for name in _PARTS}
        if digest != _digest(found):
            reason = "its numbers have changed"
        elif found["features"].shape != (len(found["labels"]), *shape) or not all_finite(found["features"]):
            reason = f"it does not hold {math.prod(shape)} finite numbers for each image"
        else:
            return found
    except Exception as error:  # the file may contain anything
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    raise DataError(f"{path} cannot be read ({reason}). Remove it, and it will be computed again.")
