"""What all tests have in common."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

# Tests run beside each other where pytest-xdist is asked for it, each of them and the processes that they start on
# their share of the cores. torch reads it when it is imported.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _WORKERS)))

import pytest  # noqa: E402
import torch  # noqa: E402
import warm_python as warm  # noqa: E402


@pytest.fixture(autouse=True)
def _same_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test's numbers depend on which ones ran before it."""
    torch.manual_seed(0)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # of an earlier test's seed_everything


@pytest.fixture(scope="session")
def warm_python() -> Iterator[Path]:
    """An executable that stands in for ``python`` where a test starts processes that import Lightning."""
    with tempfile.TemporaryDirectory() as folder:
        yield from warm.started(Path(folder))
