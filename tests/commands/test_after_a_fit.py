"""The commands that `dpl fit` names at its end run as they are."""

import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from dp_lightning.cli import main

ROOT = Path(__file__).parents[2]
QUICK = ["--privacy.accountant", "rdp", "--privacy.expected_batch_size", "32", "--trainer.max_steps", "2"]
QUICK += ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false", "--model.init_args.channels", "4"]


def fit(capsys, *settings):
    """The named commands, each as its arguments, of a short run in the current folder."""
    main(["fit", "--config", str(ROOT / "configs" / "digits.yaml"), *QUICK, *settings])
    _, _, named = capsys.readouterr().out.partition("\n\nWhat to do next:\n")
    return [shlex.split(line)[1:] for line in named.splitlines()]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: name if name == "dpl" else None)


def test_a_run_is_evaluated_and_shown_by_what_its_end_names(capsys):
    test, predict, export, report = fit(capsys)
    assert [test[0], predict[0], export[0], report[0]] == ["test", "predict", "export", "report"]
    for command in (test, predict):
        main(command)
    assert "test/accuracy" in capsys.readouterr().out
    assert Path("predictions.csv").is_file()
    main(report)
    assert Path(report[-1], "report.html").is_file()
    assert Path(export[export.index("--ckpt-path") + 1]).is_file()


def test_without_a_test_set_the_validation_split_and_new_images_take_its_place(tmp_path, capsys):
    images, labels = np.random.default_rng(0).integers(0, 256, (96, 8, 8), np.uint8), np.arange(96) % 10
    arrays = {"train_images": images[:64], "train_labels": labels[:64]}
    np.savez(tmp_path / "images.npz", **arrays, val_images=images[64:], val_labels=labels[64:])
    validate, predict, *_ = fit(capsys, "--data", "NpzImages", "--data.path", "images.npz", "--privacy.delta", "1e-3")
    assert validate[0] == "validate"
    main(validate)
    assert predict[-4:] == ["--data", "ImageFiles", "--data.root", "FOLDER"]


def test_without_a_checkpoint_nothing_is_named(capsys):
    assert fit(capsys, "--trainer.enable_checkpointing", "false") == []
