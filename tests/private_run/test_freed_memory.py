"""Freed memory stays with the process: seen in its page faults."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such limits")

# Two blocks of 64 MiB are written and freed, and then two blocks of another size; 4 KiB a fault.
WORK = """
import resource, sys, torch
from dp_lightning.private_run.freed_memory import keep_freed_memory
told = keep_freed_memory() if sys.argv[1] == "keep" else None
def use(mib):
    blocks = [torch.ones(mib * 2**18) for _ in range(2)]
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use(64)
before = faults()
use(60)
print(told, faults() - before)
"""


def faults(how, **environment):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    shown = subprocess.run(
        [sys.executable, "-c", WORK, how],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**clean, **environment},
    )
    told, count = shown.stdout.split()
    return told, int(count)


@glibc
def test_freed_memory_is_used_again_without_page_faults():
    told, kept = faults("keep")
    _, returned = faults("default")
    assert told == "True"
    assert kept < 1000 < returned


@glibc
@pytest.mark.parametrize(
    "environment",
    [{"MALLOC_TRIM_THRESHOLD_": "131072"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}],
    ids=["variable", "tunable"],
)
def test_limits_of_the_environment_are_left_alone(environment):
    told, returned = faults("keep", **environment)
    assert told == "False"
    assert returned > 1000


# Two blocks of 64 MiB are written and freed after each physical batch. What is allocated between them may now and then
# split a free block, so most of the batches count.
FIT = """
import itertools, resource, statistics, sys, torch
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
privacy = PrivacyCallback(**settings, keep_freed_memory=sys.argv[2] == "keep")
trainer(sys.argv[1], privacy).fit(Heavy(), DataLoader(examples(), batch_size=7))
print(statistics.median(after - before for before, after in itertools.pairwise(marks)))
"""


@glibc
def test_a_private_fit_on_a_cpu_keeps_its_memory_unless_told_otherwise(tmp_path):
    def faults_of_a_step(how):
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        shown = subprocess.run(
            [sys.executable, "-c", FIT, str(tmp_path), how],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
            env={**clean, "PYTHONPATH": os.pathsep.join([*map(str, Path(__file__).parents[1:3])])},
        )
        return float(shown.stdout.split()[-1])

    assert faults_of_a_step("keep") < 1000 < faults_of_a_step("return")
