"""The commands that `dpl fit` names at its end run as they are."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dp_lightning.cli import main

QUICK = ["--privacy.accountant", "rdp", "--privacy.expected_batch_size", "32", "--trainer.max_steps", "2"]
QUICK += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--model.init_args.channels", "4"]


def fit(capsys, *settings):
    """The named commands, each as its arguments, of a short run in the current folder."""
    main(["fit", "digits", *QUICK, *settings])
    _, _, named = capsys.readouterr().out.partition("\n\nWhat to do next:\n")
    return [shlex.split(line)[1:] for line in named.splitlines()]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "dpl" else None)


def test_a_run_is_used_and_shown_by_what_its_end_names(capsys):
    predict, export, report = fit(capsys)
    assert [predict[0], export[0], report[0]] == ["predict", "export", "report"]
    Path("FOLDER").mkdir()
    Image.fromarray(np.zeros((8, 8), np.uint8)).save("FOLDER/new.png")
    main(predict)
    assert "new.png" in Path("predictions.csv").read_text()
    main(report)
    assert Path(report[-1], "report.html").is_file()
    assert Path(export[export.index("--ckpt-path") + 1]).is_file()


def test_a_run_that_resumes_at_its_end_names_the_weights_of_its_statement(capsys):
    _, export, _ = fit(capsys)
    saved = Path(export[export.index("--ckpt-path") + 1])
    kept = shutil.copy(saved, saved.with_name("kept.ckpt"))
    _, export, _ = fit(capsys, "--ckpt_path", str(kept))
    assert export[export.index("--ckpt-path") + 1] == str(kept)


def test_without_a_checkpoint_nothing_is_named(capsys):
    assert fit(capsys, "--trainer.enable_checkpointing", "false") == []
