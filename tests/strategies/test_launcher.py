"""A rank does not outlive the one that has started it, whatever it waits for."""

import os
import subprocess
from pathlib import Path

import pytest

from dp_lightning.strategies.launcher import starter_of

ROOT = Path(__file__).parents[2]


def test_a_rank_whose_starter_is_killed_during_the_start_ends(tmp_path, warm_python):
    shown = subprocess.run(
        [
            *(warm_python, ROOT / "tests" / "strategies" / "fit_without_rank_0.py", "fit"),
            *("--config", ROOT / "configs" / "digits.yaml", "--trainer.accelerator", "cpu", "--trainer.devices", "2"),
            *("--privacy.accountant", "rdp", "--trainer.default_root_dir", tmp_path),
        ],
        capture_output=True,  # read until the second rank has ended too
        text=True,
        timeout=120,  # without its starter, a rank would wait for the others much longer
        check=False,
    )
    assert shown.returncode == -9
    assert "The rank that started this one has ended" in shown.stderr


@pytest.mark.parametrize(
    ("started_by", "rank", "starter"), [(None, 1, None), ("7", 0, None), ("7", 1, 7), ("own", 1, None)]
)
def test_only_ranks_that_another_one_has_started_have_a_starter(monkeypatch, started_by, rank, starter):
    monkeypatch.delenv("DPL_STARTED_BY", raising=False)
    if started_by is not None:
        monkeypatch.setenv("DPL_STARTED_BY", str(os.getpid()) if started_by == "own" else started_by)
    assert starter_of(rank) == starter
