"""Memory, disk and the operating system: what a private run needs of them, tried in the current folder."""

import os
import secrets
import shutil
import statistics
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dp_lightning.atomic_files import replacing
from dp_lightning.commands.doctor import Finding, judged

_GIB = 2**30
# A process with torch and Lightning takes about one before it has a model.
_LEAST_MEMORY = 2 * _GIB
# Checkpoints of a few networks, and no data set.
_LEAST_DISK = 2 * _GIB
# Each step waits until its line of the journal is on disk; ordinary disks take below 20 ms.
_SLOW_SYNC = 0.1
_SYNCS = 5
# A fair draw is outside with probability 2e-9.
_DRAWN, _DEVIATIONS = 4096, 6.0


def memory() -> Iterator[Finding]:
    """Main memory, within the limit of a container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    available = total
    with suppress(OSError):
        facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        available = 1024 * int(facts["MemAvailable"].split()[0])
    with suppress(OSError, ValueError):  # absent, or "max"
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
        total, available = min(total, limit), min(available, max(limit - used, 0))
    found = f"{available / _GIB:.1f} of {total / _GIB:.1f} GiB available"
    fix = "end other programs, or lower privacy.max_physical_batch_size"
    yield judged("memory", found, holds=available >= _LEAST_MEMORY, fix=fix)


def disk() -> Iterator[Finding]:
    """Free space of the current folder."""
    free = shutil.disk_usage(".").free
    found = f"{free / _GIB:.1f} GiB free in {Path.cwd()}"
    fix = "checkpoints and downloads may not fit; set trainer.default_root_dir"
    yield judged("disk", found, holds=free >= _LEAST_DISK, fix=fix)


def files() -> Iterator[Finding]:
    """Whether files in the current folder are replaced as a whole and reach the disk, as a run needs it."""
    elsewhere = "run dpl in a folder of a local disk, or set trainer.default_root_dir"
    try:
        with TemporaryDirectory(prefix=".dpl-doctor-", dir=".") as folder:
            kept, waited = _is_replaced_as_a_whole(Path(folder)), _time_of_sync(Path(folder))
    except OSError as error:
        yield Finding("problem", "files", f"{Path.cwd()} cannot be written to as runs do ({error})", elsewhere)
        return
    if not kept:
        yield Finding("problem", "files", "a file that was being replaced is not what it was before", elsewhere)
    else:
        yield Finding("ok", "files", "the folder is writable, and files are replaced as a whole")
    found = f"a line of the journal is on disk after {1000 * waited:.1f} ms, which each step waits for"
    yield judged("fsync", found, holds=waited <= _SLOW_SYNC, fix=elsewhere)


def _is_replaced_as_a_whole(folder: Path) -> bool:
    path = folder / "replaced"
    for content in (b"first", b"second"):
        with replacing(path) as file:
            file.write(content)
    with suppress(InterruptedError), replacing(path) as file:
        file.write(b"unfinished")
        raise InterruptedError
    return path.read_bytes() == b"second" and list(folder.iterdir()) == [path]


def _time_of_sync(folder: Path) -> float:
    """Median seconds until an appended line is on disk."""
    seconds = []
    with (folder / "journal").open("ab", buffering=0) as file:
        for _ in range(_SYNCS):
            start = time.perf_counter()
            file.write(b"x" * 200 + b"\n")
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def randomness() -> Iterator[Finding]:
    """The operating system's random numbers, from which all keys of a private run come."""
    first, second = secrets.token_bytes(_DRAWN), secrets.token_bytes(_DRAWN)
    ones, bits = int.from_bytes(first + second).bit_count(), 16 * _DRAWN
    deviations = (ones - bits / 2) / (bits / 4) ** 0.5
    found = f"{2 * _DRAWN} bytes of the operating system have {ones} ones among {bits} bits"
    if first == second or abs(deviations) > _DEVIATIONS:
        yield Finding(
            "problem", "randomness", f"{found}: they can be predicted", "do not train privately on this machine"
        )
    else:
        yield Finding("ok", "randomness", found)
