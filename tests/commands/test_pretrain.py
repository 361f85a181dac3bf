"""Weights from random images: the same again after a stop, a start for private runs, and said where they are used."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dp_lightning.cli import main
from dp_lightning.commands import pretrain
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules import ResNetModule, SmallCNNModule, WideResNetModule
from dp_lightning.models.pretraining import Pretraining
from dp_lightning.privacy.exported import metadata_of, recipe_of

SMALL = [
    "--config",
    str(Path("configs/digits.yaml").resolve()),
    "--images",
    "60",
    "--batch-size",
    "16",
    "--device",
    "cpu",
]


def run(out, *options, steps=6):
    main(["pretrain", *SMALL, "--out", str(out), "--steps", str(steps), *options])


def test_a_run_that_starts_from_the_weights_says_where_they_come_from(tmp_path, capsys):
    file, runs = tmp_path / "w.safetensors", tmp_path / "runs"
    run(file)
    told = capsys.readouterr().out
    assert "images from random processes: no private data, no photographs (recipe " in told
    with safe_open(file, framework="pt") as opened:
        recipe = json.loads(opened.metadata()["recipe"])
    assert (recipe["steps"], recipe["channels"], recipe["size"], recipe["seed"]) == (6, 1, 8, 0)
    assert recipe["network"]["class_path"].endswith("SmallCNNModule")
    short = ["--trainer.max_steps", "1", "--trainer.max_epochs", "-1", "--trainer.default_root_dir", str(runs)]
    main(["fit", "--config", "configs/digits.yaml", *short, "--model.init_args.weights", str(file)])
    statement = next(runs.rglob("privacy_statement.md")).read_text()
    digest = told.split("(recipe ")[1][:16]
    assert (
        f"by what it says, trained on images from random processes: no private data, no photographs (recipe {digest})"
        in statement
    )
    # A step from the weights, and not from others.
    module = SmallCNNModule(10, in_channels=1, weights=str(file))
    for name, value in load_file(file).items():
        assert torch.equal(module.model.state_dict()[name], value)
    assert "classifier.weight" not in load_file(file)


def test_a_training_that_is_stopped_goes_on_to_the_same_weights(tmp_path, monkeypatch, capsys):
    whole, part = tmp_path / "whole.safetensors", tmp_path / "part.safetensors"
    run(whole)
    step, steps = Pretraining.step, []

    def until_the_third(training):
        steps.append(training.steps)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(training)

    monkeypatch.setattr(Pretraining, "step", until_the_third)
    with pytest.raises(SystemExit) as ended:
        run(part)
    assert ended.value.code == 128 + signal.SIGTERM
    assert not part.exists()
    assert "Stopped after step 3. The same command goes on from there." in capsys.readouterr().out
    run(part)
    assert steps == [0, 1, 2, 3, 4, 5]
    assert metadata_of(whole) == metadata_of(part)
    assert all(torch.equal(value, load_file(part)[name]) for name, value in load_file(whole).items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part.safetensors", "whole.safetensors"]
    run(part)  # finished
    assert len(steps) == 6


def test_it_keeps_what_is_done_every_few_minutes(tmp_path, monkeypatch):
    assert unfinished(tmp_path, monkeypatch)[1]["steps"] == 4


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--steps", "0"], "--steps is 0"),
        (["--images", "0"], "--images is 0"),
        (["--batch-size", "1"], "--batch-size is 1"),
        (["--learning-rate", "0"], "--learning-rate is 0"),
        (["--learning-rate", "inf"], "--learning-rate is inf; it must be a finite number above 0"),
        (["--learning-rate", "1e30", "--steps", "4"], "The loss is nan at step 4: --learning-rate 1e.30 is too high"),
        (["--device", "tpu"], "--device is tpu; choose cpu or cuda"),
        (["--device", "meta"], "--device is meta; choose cpu or cuda"),
        (["--device", "cuda:99"], r"--device is cuda:99, and torch finds \d+ GPUs"),
        (["--view-size", "9"], "--view-size is 9; it must be from 4 to the 8 pixels of the images"),
        (["--view-size", "4"], "The network takes no views of 4 pixels .* Leave --view-size out"),
        (["--precision", "fp8"], "argument --precision: invalid choice: 'fp8'"),
        (["--out", "weights.pt"], "written as .safetensors"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_setting(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["pretrain", *SMALL, "--out", "w.safetensors", "--steps", "2", *options])
    assert ended.value.code == 2
    assert re.search(words, capsys.readouterr().err)


def test_without_a_configuration_it_says_what_it_needs(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["pretrain"])
    assert ended.value.code == 2
    assert "dpl pretrain needs the --config of a run" in capsys.readouterr().err


def test_another_recipe_does_not_go_on_with_a_file(tmp_path, monkeypatch, capsys):
    file = tmp_path / "w.safetensors"
    run(file)
    with pytest.raises(SystemExit):
        run(file, "--seed", "1")
    assert "of another recipe. Give another --out" in capsys.readouterr().err
    monkeypatch.setattr(pretrain, "_SAVE_EVERY", 0.0)
    file.rename(tmp_path / "done.safetensors")
    (tmp_path / "w.safetensors.unfinished").write_bytes(b"half a file")
    with pytest.raises(SystemExit):
        run(file)
    assert "cannot be read (" in capsys.readouterr().err
    file.write_bytes(b"something else")
    with pytest.raises(SystemExit):
        run(file)
    assert "w.safetensors cannot be read as safetensors" in capsys.readouterr().err
    assert file.read_bytes() == b"something else"


def unfinished(folder, monkeypatch):
    """A file of a training that was stopped after its fourth step, and its state."""
    monkeypatch.setattr(pretrain, "_SAVE_EVERY", 0.0)
    step = Pretraining.step
    with monkeypatch.context() as broken:
        broken.setattr(Pretraining, "step", lambda training: step(training) if training.steps < 4 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(folder / "w.safetensors")
    path = folder / "w.safetensors.unfinished"
    return path, torch.load(path, weights_only=True)


CHANGES = {
    "no parts": (lambda state: {"recipe": state["recipe"]}, "is damaged (KeyError: 'steps'). Remove it"),
    "a recipe of another form": (
        lambda state: {**state, "recipe": "[1]"},
        "unfinished is of another recipe. Remove it",
    ),
    "no mapping": (lambda state: [state], "cannot be read (AttributeError)"),
    "more steps than the recipe's": (lambda state: {**state, "steps": 99}, "is damaged (it is after step 99 of 6)"),
    "another network": (lambda state: {**state, "network": {}}, "is damaged (RuntimeError: Error(s) in loading"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_state_that_is_none_of_the_recipe_is_refused(tmp_path, monkeypatch, capsys, change):
    path, state = unfinished(tmp_path, monkeypatch)
    assert path.stat().st_mode & 0o777 == 0o600
    changed, words = CHANGES[change]
    torch.save(changed(state), path)
    with pytest.raises(SystemExit):
        run(tmp_path / "w.safetensors")
    assert words in capsys.readouterr().err


def test_a_state_that_others_can_write_is_refused(tmp_path, monkeypatch, capsys):
    path, _ = unfinished(tmp_path, monkeypatch)
    path.chmod(0o666)
    with pytest.raises(SystemExit):
        run(tmp_path / "w.safetensors")
    assert "is open to other users (mode 666). Others may have changed the weights" in capsys.readouterr().err


def test_another_recipe_is_refused_before_images_are_made(tmp_path, monkeypatch, capsys):
    unfinished(tmp_path, monkeypatch)
    monkeypatch.setattr("dp_lightning.models.pretraining.random_images", lambda *_: pytest.fail("images are made"))
    with pytest.raises(SystemExit):
        run(tmp_path / "w.safetensors", "--learning-rate", "0.1")
    assert "unfinished is of another recipe. Remove it" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "size"),
    [
        (lambda **more: WideResNetModule(4, depth=10, width=1, **more), 32),
        (lambda **more: ResNetModule(4, stem="cifar", **more), 32),
        (lambda **more: SmallCNNModule(4, **more), 8),
    ],
)
def test_every_network_starts_from_a_file_of_its_own(tmp_path, make, size):
    torch.manual_seed(0)
    saved = make().model.state_dict()
    path = tmp_path / "w.pt"
    torch.save({name: value for name, value in saved.items() if "classifier" not in name and "fc." not in name}, path)
    torch.manual_seed(1)
    loaded = make(weights=str(path))
    assert loaded.weights_file == str(path)
    last = {name: value for name, value in loaded.model.state_dict().items() if "classifier" in name or "fc." in name}
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, saved[name]) == (name not in last) or value.abs().sum() == 0
    assert loaded(torch.rand(2, 3, size, size)).shape == (2, 4)


def test_a_file_of_another_network_is_refused(tmp_path):
    path = tmp_path / "w.pt"
    torch.save(SmallCNNModule(4).model.state_dict(), path)
    with pytest.raises(ConfigurationError, match=r"w.pt are not those of the network: .*Missing key"):
        WideResNetModule(4, depth=10, width=1, weights=str(path))
    with pytest.raises(ConfigurationError, match=r"size mismatch for features.0.weight"):
        SmallCNNModule(4, channels=32, weights=str(path))
    torch.save({"features.0.weight": 1.0}, path)
    with pytest.raises(ConfigurationError, match=r"more than tensors: features.0.weight"):
        SmallCNNModule(4, weights=str(path))
    with pytest.raises(ConfigurationError, match="is not a file"):
        SmallCNNModule(4, weights=str(tmp_path / "none.pt"))


@pytest.mark.parametrize("source", [None, "photographs"])
def test_a_file_is_not_quoted_with_what_it_does_not_say(tmp_path, source):
    file = tmp_path / "w.safetensors"
    run(file)
    with safe_open(file, framework="pt") as opened:
        said = {**opened.metadata(), "source": source}
    save_file(load_file(file), file, {name: words for name, words in said.items() if words is not None})
    assert recipe_of(file) is None


def test_other_tensors_do_not_pass_under_the_recipe_of_a_file(tmp_path, capsys):
    file = tmp_path / "w.safetensors"
    run(file)
    with safe_open(file, framework="pt") as opened:
        said = opened.metadata()
    # Whoever trains on private images and keeps the metadata.
    save_file({name: value + 1e-3 for name, value in load_file(file).items()}, file, said)
    short = ["--trainer.max_steps", "1", "--trainer.max_epochs", "-1", "--trainer.default_root_dir", str(tmp_path)]
    with pytest.raises(SystemExit):
        main(["fit", "--config", "configs/digits.yaml", *short, "--model.init_args.weights", str(file)])
    assert f"{file} has other tensors than those that its recipe has made" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(file)
    assert "other tensors" in capsys.readouterr().err


def test_a_checkpoint_needs_no_file_that_its_run_started_from(tmp_path, capsys):
    file, runs = tmp_path / "w.safetensors", tmp_path / "runs"
    run(file)
    config = ["--config", SMALL[1], "--trainer.default_root_dir", str(runs), "--trainer.max_epochs", "-1"]
    main(["fit", *config, "--trainer.max_steps", "2", "--model.init_args.weights", str(file)])
    file.unlink()
    checkpoint = next(runs.rglob("*.ckpt"))
    main(["test", *config, "--trainer.max_steps", "2", "--ckpt_path", str(checkpoint)])
    more = ["--trainer.max_steps", "3", "--privacy.target_epsilon", "4"]
    main(["fit", *config, *more, "--ckpt_path", str(checkpoint)])
    statements = sorted(runs.rglob("privacy_statement.md"), key=lambda path: path.stat().st_mtime)
    assert "images from random processes" in statements[-1].read_text()


OWN = """
import torch
from dp_lightning.lightning_modules import ImageClassifier, SmallCNNModule

class Mine(SmallCNNModule):
    pass
"""


@pytest.mark.parametrize("module", ["mine_of_random.Mine", "TimmModule", "LinearProbeModule"])
def test_a_module_that_may_start_from_something_is_refused(tmp_path, monkeypatch, capsys, module):
    """The file would say that it comes from nothing."""
    (tmp_path / "mine_of_random.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    more = ["--model.init_args.name", "vit_tiny_patch16_224"] if module == "TimmModule" else []
    with pytest.raises(SystemExit):
        run(tmp_path / "w.safetensors", "--model", module, *more)
    said = capsys.readouterr().err
    assert "dpl pretrain trains ResNetModule, SmallCNNModule, WideResNetModule on images; " in said
    with pytest.raises(SystemExit):
        run(tmp_path / "w.safetensors", "--model.init_args.weights", "private.pt")
    assert "pretraining starts from nothing" in capsys.readouterr().err


def test_the_recipe_says_how_many_classes_the_first_weights_were_drawn_for(tmp_path):
    run(tmp_path / "w.safetensors")
    with safe_open(tmp_path / "w.safetensors", framework="pt") as opened:
        assert json.loads(opened.metadata()["recipe"])["network"]["num_classes"] == 10


def test_its_help_answers_at_once():
    shown = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "dp_lightning", "pretrain", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "dpl pretrain" in shown.stdout
    assert " torch\n" not in shown.stderr
