"""Freed memory stays with the process: seen in its page faults."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from dp_lightning.cli import main
from dp_lightning.commands import training

CONFIG = Path(__file__).parents[2] / "configs" / "digits.yaml"

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no such limits")

# Two blocks of 64 MiB are written and freed, and then two blocks of another size; 4 KiB a fault.
WORK = """
import resource, sys, torch
from dp_lightning.commands.memory import keep_freed_memory
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


def test_a_training_run_on_a_cpu_keeps_its_memory(monkeypatch, tmp_path):
    class ToldError(Exception):
        pass

    def tell():
        raise ToldError

    monkeypatch.setattr(training, "keep_freed_memory", tell)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ToldError):
        main(["fit", "--config", str(CONFIG), "--trainer.accelerator", "cpu"])
