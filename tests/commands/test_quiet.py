"""What `dpl` leaves out of the messages of other packages, and what it shows."""

import ast
import os
import subprocess
import warnings
from pathlib import Path

import lightning
import pytest
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from lightning.pytorch.utilities.warnings import PossibleUserWarning
from plain_run import trainer

from dp_lightning.commands.quiet import NOTES, WARNINGS, quiet

ROOT = Path(__file__).parents[2]
LIGHTNING = Path(lightning.__file__).parent

OWN = """
import warnings
from dp_lightning.lightning_modules import SmallCNNModule

class Own(SmallCNNModule):
    def on_train_start(self):
        for kind in (UserWarning, FutureWarning):
            warnings.warn(f"a {kind.__name__} of mine", kind)
"""


@pytest.fixture(scope="module")
def shown(tmp_path_factory, warm_python):
    """What a run of a user's module writes to standard output and standard error."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "own_module.py").write_text(OWN)
    settings = ["--model", "own_module.Own", "--model.channels", "4", "--trainer.max_steps", "2"]
    settings += ["--ckpt_path", "last", "--privacy.accountant", "rdp"]
    command = [warm_python, ROOT / "cli.py", "fit", "--config", ROOT / "configs" / "digits.yaml", *settings]
    done = subprocess.run(
        [*command, "--trainer.accelerator", "cpu"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_run_shows_the_warnings_of_the_user_and_ours_and_nothing_else(shown):
    _, errors = shown
    notice, *ours, first, second = errors.splitlines()
    assert "A configuration is code" in notice
    assert first.endswith("UserWarning: a UserWarning of mine")
    assert second.endswith("FutureWarning: a FutureWarning of mine")
    assert "own_module.py:" in first
    # One paragraph, without the place in our code.
    assert ours[0].startswith("Warning: ckpt_path is 'last', but there is no checkpoint in")
    assert ours[-1].endswith("trainer.default_root_dir.")
    assert max(map(len, ours)) <= 80
    assert not any(".py" in line for line in ours)


def test_a_log_of_a_run_is_plain_and_begins_with_the_plan(shown):
    text, _ = shown
    assert text.startswith("method  ")
    assert text.isascii()
    assert "\x1b" not in text


def source_of(file, function):
    """The text of a function of Lightning."""
    for path in LIGHTNING.rglob("*.py"):
        if path.as_posix().endswith(f"/{file}"):
            text = path.read_text()
            parts = [part for part in ast.walk(ast.parse(text)) if isinstance(part, ast.FunctionDef)]
            yield from (ast.get_source_segment(text, part) for part in parts if part.name == function)


@pytest.mark.parametrize(("file", "function"), NOTES, ids=[function for _, function in NOTES])
def test_the_functions_whose_notes_are_left_out_write_notes(file, function):
    assert any("info(" in text for text in source_of(file, function))


def test_a_banner_is_left_out_and_other_notes_are_shown(caplog, tmp_path):
    with caplog.at_level("INFO"):
        trainer(tmp_path)
        assert "GPU available" in caplog.text
        caplog.clear()
        with quiet():
            trainer(tmp_path)
            rank_zero_info("a note of a user's code")
    assert [record.message for record in caplog.records] == ["a note of a user's code"]


SAMPLES = [
    (
        "pytorch.trainer.connectors.data_connector",
        PossibleUserWarning,
        "The 'val_dataloader' does not have many workers which",
    ),
    ("pytorch.trainer.connectors.data_connector", PossibleUserWarning, "Consider setting `persistent_workers=True` in"),
    ("pytorch.loops.fit_loop", PossibleUserWarning, "Found 3 module(s) in eval mode at the start of training."),
    ("pytorch.callbacks.model_checkpoint", UserWarning, "Checkpoint directory /a exists and is not empty."),
    ("pytorch.callbacks.model_checkpoint", UserWarning, "The dirpath has changed from 'a' to 'b'"),
    ("pytorch.cli", UserWarning, "`A.configure_optimizers` will be overridden by `B.configure_optimizers`."),
    ("pytorch.cli", DeprecationWarning, "skip_none parameter was deprecated"),
    ("pytorch.utilities._pytree", FutureWarning, "`isinstance(treespec, LeafSpec)` is deprecated"),
    (
        "pytorch.trainer.connectors.logger_connector.result",
        PossibleUserWarning,
        "It is recommended to use `self.log('privacy/snr', ..., sync_dist=True)`",
    ),
    ("fabric.utilities.seed", UserWarning, "No seed found, seed set to 0"),
]


def count(category, message, module):
    """How many of one such warning are shown."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        with quiet():
            warnings.warn_explicit(message, category, "file.py", 1, module=module)
        return len(found)


@pytest.mark.parametrize(("origin", "category", "message"), SAMPLES)
def test_a_warning_is_left_out_by_its_origin_and_its_class(origin, category, message):
    assert count(category, message, f"lightning.{origin}") == 0
    assert count(category, message, "a_package.of_a_user") == 1
    assert count(RuntimeWarning, message, f"lightning.{origin}") == 1


def test_each_rule_is_needed_for_a_sample(monkeypatch):
    for rule in WARNINGS:
        monkeypatch.setattr("dp_lightning.commands.quiet.WARNINGS", tuple(other for other in WARNINGS if other != rule))
        assert any(count(kind, text, f"lightning.{origin}") for origin, kind, text in SAMPLES), rule


def test_what_it_has_changed_is_put_back():
    before = warnings.formatwarning, list(warnings.filters)
    with quiet():
        assert warnings.formatwarning is not before[0]
    assert (warnings.formatwarning, list(warnings.filters)) == before
