"""What `dpl` leaves out of the messages of Lightning, and what it shows."""

import logging
import os
import subprocess
import warnings
from pathlib import Path

import pytest

from dp_lightning.commands.quiet import quiet

ROOT = Path(__file__).parents[2]

OWN = """
import warnings
from dp_lightning.lightning_modules import SmallCNNModule

class Own(SmallCNNModule):
    def on_train_start(self):
        for kind in (UserWarning, FutureWarning):
            warnings.warn(f"a {kind.__name__} of mine", kind)
"""


def test_a_run_shows_the_warnings_of_the_user_and_ours_and_nothing_else(tmp_path, warm_python):
    """Standard output is a plain log that begins with the plan."""
    (tmp_path / "own_module.py").write_text(OWN)
    settings = ["--model", "own_module.Own", "--model.channels", "4", "--trainer.max_steps", "2"]
    settings += ["--ckpt_path", "last", "--privacy.accountant", "rdp", "--trainer.accelerator", "cpu"]
    done = subprocess.run(
        [warm_python, ROOT / "cli.py", "fit", "--config", ROOT / "configs" / "digits.yaml", *settings],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    ours, first, second = (line for line in done.stderr.splitlines() if not line.startswith("  "))
    assert "ckpt_path is 'last', but there is no checkpoint in" in ours
    assert "own_module.py:" in first
    assert first.endswith("UserWarning: a UserWarning of mine")
    assert second.endswith("FutureWarning: a FutureWarning of mine")
    assert done.stdout.startswith("method  ")
    assert done.stdout.isascii()
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize(("module", "count"), [("lightning.pytorch.cli", 0), ("a_package.of_a_user", 1)])
def test_a_warning_is_left_out_by_its_text_and_its_origin(module, count):
    before = list(warnings.filters)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with quiet():
            warnings.warn_explicit("`A.b` will be overridden by `C.d`.", UserWarning, "file.py", 1, module=module)
            warnings.warn_explicit("something else", UserWarning, "file.py", 2, module=module)
        assert len(found) == 1 + count
    assert list(warnings.filters) == before


def test_a_quiet_within_a_quiet_leaves_the_outer_one():
    handler, *_ = logging.root.handlers  # pytest's
    with quiet():
        with quiet():
            pass
        assert handler.filters
    assert not handler.filters
