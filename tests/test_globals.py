"""Importing the package and a whole fit leave every global, hook and class of the process as they were."""

import json
import subprocess
import sys
from pathlib import Path


def test_an_import_and_a_fit_change_no_global_and_leave_no_attribute(tmp_path):
    command = [sys.executable, "-W", "ignore", Path(__file__).with_name("compare_globals.py"), tmp_path]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert shown.returncode == 0, shown.stderr[-3000:]
    assert json.loads(shown.stdout.splitlines()[-1]) == [[], [], [], [], []]
