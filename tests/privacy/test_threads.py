"""The thread of a loss starts no other; threads of other code do."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from dp_lightning.errors import ModelError
from dp_lightning.privacy.isolation.threads import no_threads


def started():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    return True


def test_only_the_thread_of_the_loss_starts_none():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(started).result()
        with no_threads():
            assert pool.submit(started).result()
            with pytest.raises(ModelError, match="starts a thread"):
                started()
    assert started()
    assert threading.active_count() == len(threading.enumerate())
