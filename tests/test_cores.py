"""The cores of a container with a quota: OpenMP does not see it, so `dpl` tells it."""

import os
import subprocess
import sys
import types

import pytest

from dp_lightning import cli, cores


@pytest.fixture(autouse=True)
def _many_cores_and_no_settings(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: range(64), raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("quota", "given", "expected"),
    [(4, None, "4"), (64, None, None), (4, "2", "2"), (4, "16", "16")],
    ids=["quota", "no quota", "less is set", "more is set"],
)
def test_a_command_takes_no_more_threads_than_the_quota_has_cores(quota, given, expected, monkeypatch):
    seen = []
    main = types.SimpleNamespace(main=lambda arguments: seen.append(os.environ.get("OMP_NUM_THREADS")))
    monkeypatch.setattr(cores, "cpu_count", lambda: quota)
    monkeypatch.setattr(cli, "import_module", lambda name: cores if name.endswith(".cores") else main)
    monkeypatch.delitem(sys.modules, "dp_lightning.commands.verify", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", given or "")  # so that it is gone after the test
    if given is None:
        monkeypatch.delenv("OMP_NUM_THREADS")
    cli.main(["verify"])
    assert seen == [expected]


def test_torch_is_not_imported_before_it_has_been_told():
    code = "import os, sys; from dp_lightning.cores import respect_quota; respect_quota(); print("
    code += "os.environ['OMP_NUM_THREADS'], 'torch' in sys.modules)"
    environment = {**os.environ, "LOKY_MAX_CPU_COUNT": "1"}
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert made.stdout == "1 False\n"
