"""Importing the package and a whole fit leave every global, hook and class of the process as they were."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_an_import_and_a_fit_change_no_global_and_leave_no_attribute(tmp_path, mode):
    shown = subprocess.run(
        [sys.executable, "-W", "ignore", Path(__file__).parent / "compare_globals.py", tmp_path, mode],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr[-3000:]
    imported, fitted, left = json.loads(shown.stdout.splitlines()[-1])
    assert imported == []
    assert fitted == []
    assert left == []
