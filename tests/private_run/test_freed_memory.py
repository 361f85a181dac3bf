"""Freed memory stays with the process: seen in its page faults."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from plain_run import Plain, examples, trainer
from torch.utils.data import DataLoader

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.private_run import run

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such limits")

# Two blocks of 64 MiB are written and freed, and then two blocks of another size; 4 KiB a fault.
WORK = """
import resource, torch
from dp_lightning.private_run.freed_memory import keep_freed_memory
def use(mib):
    blocks = [torch.ones(mib * 2**18) for _ in range(2)]
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    use(60)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
use(64)
returned = faults()
told = keep_freed_memory()
use(64)
print(returned, told, faults())
"""


def faults(**environment):
    """Before the process is told to keep its memory, what it answers, and after it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    shown = subprocess.run(
        [sys.executable, "-c", WORK],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**clean, **environment},
    )
    returned, told, kept = shown.stdout.split()
    return int(returned), told, int(kept)


@glibc
def test_freed_memory_is_used_again_without_page_faults():
    returned, told, kept = faults()
    assert told == "True"
    assert kept < 1000 < returned


@glibc
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}],
    ids=["variable", "tunable"],
)
def test_limits_of_the_environment_are_left_alone(environment):
    _, told, returned = faults(**environment)
    assert told == "False"
    assert returned > 1000


# Two blocks of 64 MiB are written and freed after each physical batch. What is allocated between them may now and then
# split a free block, so the least of the batches counts.
FIT = """
import itertools, resource, sys, torch
sys.path.insert(0, sys.argv[1])
from plain_run import Plain, examples, trainer
from torch.utils.data import DataLoader
from dp_lightning.callbacks import PrivacyCallback

marks = []

class Heavy(Plain):
    def on_train_batch_end(self, *args):
        blocks = [torch.ones(64 * 2**18) for _ in range(2)]
        del blocks
        marks.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)

settings = {"expected_batch_size": 20, "noise_multiplier": 1.0, "delta": 1e-3, "accountant": "rdp"}
of_a_step = []
for kept in (False, True):
    marks.clear()
    privacy = PrivacyCallback(**settings, keep_freed_memory=kept)
    trainer(f"{sys.argv[2]}/{kept}", privacy).fit(Heavy(), DataLoader(examples(), batch_size=7))
    of_a_step.append(min(after - before for before, after in itertools.pairwise(marks)))
print(*of_a_step)
"""


@glibc
def test_a_private_fit_on_a_cpu_keeps_its_memory_unless_told_otherwise(tmp_path, warm_python):
    (tmp_path / "fit.py").write_text(FIT)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    shown = subprocess.run(
        [warm_python, tmp_path / "fit.py", Path(__file__).parents[1], tmp_path],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=clean,
    )
    returned, kept = map(float, shown.stdout.split()[-2:])
    assert kept < 1000 < returned


def test_what_is_computed_once_before_the_first_step_is_given_back(tmp_path, monkeypatch):
    """A copy of the module, whose loss is compared, is as large as the module."""
    order = []
    monkeypatch.setattr(run, "warn_of_changed_meaning", lambda *given: order.append("compared"))
    monkeypatch.setattr(run, "keep_freed_memory", lambda: order.append("kept"))
    privacy = PrivacyCallback(expected_batch_size=20, noise_multiplier=1.0, delta=1e-3, accountant="rdp")
    monkeypatch.setattr(Plain, "on_train_batch_start", lambda *given: order.append("step"))
    trainer(tmp_path, privacy).fit(Plain(), DataLoader(examples(), batch_size=7))
    assert order[:3] == ["compared", "kept", "step"]
