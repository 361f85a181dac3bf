"""What all tests have in common."""

import fcntl
import gc
import logging
import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

# Tests run beside each other where pytest-xdist is asked for it, each of them and the processes that they start on
# their share of the cores. torch reads it when it is imported.
_WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
if _WORKERS > 1:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _WORKERS)))

# Looking for garbage takes a fifth of the time of the imports, and finds none.
gc.disable()

import pytest  # noqa: E402
import torch  # noqa: E402
import warm_python as warm  # noqa: E402

# How long torch waits for a worker of a loader to end by itself; one whose data set has failed does not.
torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5

_shared = ExitStack()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Have all workers use one warm Python, which the process that started them starts."""
    gc.enable()  # this process collects no tests
    if not hasattr(node.config, "warm_python"):
        node.config.warm_python = _shared.enter_context(_warm_python())
    node.workerinput["warm_python"] = str(node.config.warm_python)


def pytest_sessionfinish() -> None:
    """End it."""
    _shared.close()


def pytest_collection_finish() -> None:
    """Look for garbage from here on."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One more worker than cores: a fifth of the time tests wait for processes that they have started."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the slow tests first, so that no worker starts one when the others are done.

    ``--dist worksteal`` gives each worker an equal part of the list, in order, and takes from the ends of the parts.
    """
    slow = [item for item in items if item.get_closest_marker("slow")]
    others = [item for item in items if not item.get_closest_marker("slow")]
    count, items[:] = len(items), []
    for worker in range(_WORKERS):
        part = slow[worker::_WORKERS]
        size = max(count // (_WORKERS - worker) - len(part), 0)
        items += [*part, *others[:size]]
        others, count = others[size:], count - len(part) - size


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip the tests that need a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    """What was imported or stays is not looked through again at each collection of garbage, which takes a second."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test's numbers depend on earlier tests, nor does it leave a handler of a signal or the level of a logger."""
    torch.default_generator.manual_seed(0)
    monkeypatch.delenv("PL_GLOBAL_SEED", raising=False)  # of an earlier test's seed_everything
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    known = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    levels = [(logger, logger.level) for logger in (logging.root, *known)]
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    for logger, level in levels:
        if logger.level != level:
            logger.setLevel(level)


@contextmanager
def _warm_python() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield from warm.started(Path(folder))


@pytest.fixture(scope="session")
def warm_python(request: pytest.FixtureRequest) -> Iterator[Path]:
    """An executable that stands in for ``python`` where a test starts processes that import Lightning."""
    shared = getattr(request.config, "workerinput", {}).get("warm_python")
    with nullcontext(Path(shared)) if shared else _warm_python() as executable:
        yield executable


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished ``dpl fit digits`` of 12 steps, made once for all workers. Copy it before changing it.

    It is ``lightning_logs/version_0`` with one checkpoint, of the last step; the accountant is RDP, the cheapest one.
    """
    from dp_lightning.cli import main

    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # which the workers of one session share
    root = root / "finished_run"
    folder = root / "lightning_logs" / "version_0"
    with open(f"{root}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "result.json").exists():
            settings = {"max_epochs": "4", "accelerator": "cpu", "enable_progress_bar": "false"}
            settings = {f"trainer.{name}": value for name, value in settings.items()}
            settings |= {"trainer.default_root_dir": str(root), "privacy.accountant": "rdp"}
            main(["fit", "digits", *(f"--{name}={value}" for name, value in settings.items())])
    return folder
