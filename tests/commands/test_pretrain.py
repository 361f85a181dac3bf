"""Weights from random images: the same again after a stop, a start for private runs, and said where they are used."""

import json
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dp_lightning.cli import main
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules import ResNetModule, SmallCNNModule, WideResNetModule
from dp_lightning.models.pretraining import Pretraining
from dp_lightning.privacy.exported import metadata_of, recipe_of

SMALL = ["digits", "--images", "60", "--batch-size", "16", "--device", "cpu"]
SOURCE = "images from random processes: no private data, no photographs"


def run(out, *options, steps=6):
    main(["pretrain", *SMALL, "--out", str(out), "--steps", str(steps), *options])


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main([*map(str, arguments)])
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A finished file of weights."""
    file = tmp_path_factory.mktemp("made") / "w.safetensors"
    run(file)
    return file


@pytest.fixture
def copy(made, tmp_path):
    (tmp_path / "copy.safetensors").write_bytes(made.read_bytes())
    return tmp_path / "copy.safetensors"


def test_a_run_that_starts_from_the_weights_says_where_they_come_from_and_no_longer_needs_the_file(copy, tmp_path):
    recipe = json.loads(metadata_of(copy)["recipe"])
    assert (recipe["steps"], recipe["channels"], recipe["size"], recipe["seed"]) == (6, 1, 8, 0)
    assert recipe["network"]["class_path"].endswith("SmallCNNModule")
    assert recipe["network"]["num_classes"] == 10  # for which the first weights were drawn
    said = f"by what it says, trained on {SOURCE} (recipe {recipe_of(copy)[:16]})"
    config = ["digits", "--trainer.default_root_dir", str(tmp_path / "runs"), "--trainer.max_epochs", "-1"]
    main(["fit", *config, "--trainer.max_steps", "2", "--model.init_args.weights", str(copy)])
    assert said in next((tmp_path / "runs").rglob("privacy_statement.md")).read_text()
    # A step from the weights, and not from others.
    module = SmallCNNModule(10, in_channels=1, weights=str(copy))
    tensors = load_file(copy)
    assert "classifier.weight" not in tensors
    assert all(torch.equal(module.model.state_dict()[name], value) for name, value in tensors.items())
    copy.unlink()
    checkpoint = str(next((tmp_path / "runs").rglob("*.ckpt")))
    main(["test", *config, "--ckpt_path", checkpoint])
    more = ["--trainer.max_steps", "3", "--privacy.target_epsilon", "4"]
    main(["fit", *config, *more, "--ckpt_path", checkpoint])
    statements = sorted((tmp_path / "runs").rglob("privacy_statement.md"), key=lambda path: path.stat().st_mtime)
    assert said in statements[-1].read_text()


@pytest.fixture
def unfinished(tmp_path, monkeypatch):
    """A file of a training that was stopped after its fourth step."""
    step = Pretraining.step
    with monkeypatch.context() as broken:
        broken.setattr(Pretraining, "step", lambda training: step(training) if training.steps < 4 else 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run(tmp_path / "w.safetensors")
    return tmp_path / "w.safetensors.unfinished"


def test_a_training_that_is_stopped_resumes_to_the_same_weights(made, unfinished, tmp_path, monkeypatch):
    step, steps = Pretraining.step, []
    monkeypatch.setattr(Pretraining, "step", lambda training: steps.append(training.steps) or step(training))
    for _ in range(2):  # the second time it is finished
        run(tmp_path / "w.safetensors")
    assert steps == [4, 5]
    assert metadata_of(tmp_path / "w.safetensors") == metadata_of(made)
    torch.testing.assert_close(load_file(tmp_path / "w.safetensors"), load_file(made), rtol=0, atol=0)
    assert not unfinished.exists()


def test_another_recipe_does_not_resume_from_a_file(copy, unfinished, capsys):
    command = ("pretrain", *SMALL, "--steps", 6, "--seed", 1, "--out")
    assert f"{copy} is of another recipe. Give another --out" in refusal(capsys, *command, copy)
    said = refusal(capsys, *command, unfinished.with_suffix(""))
    assert "unfinished is of another recipe. Remove it" in said


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--learning-rate", "1e30", "--steps", "4"], r"The loss is nan at step \d: --learning-rate 1e.30 is too high"),
        (["--view-size", "4"], "The network takes no views of 4 pixels .* Leave --view-size out"),
        (["--out", "weights.pt"], "written as .safetensors"),
        (["--model.init_args.weights", "private.pt"], "pretraining starts from nothing"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_setting(tmp_path, monkeypatch, capsys, options, words):
    monkeypatch.chdir(tmp_path)
    assert re.search(words, refusal(capsys, "pretrain", *SMALL, "--out", "w.safetensors", "--steps", "2", *options))


OWN = """
from dp_lightning.lightning_modules import SmallCNNModule

class Mine(SmallCNNModule):
    pass
"""


@pytest.mark.parametrize("module", ["mine_of_random.Mine", "LinearProbeModule"])
def test_a_module_that_may_start_from_something_is_refused(tmp_path, monkeypatch, capsys, module):
    """The file would say that it comes from nothing."""
    (tmp_path / "mine_of_random.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    said = refusal(capsys, "pretrain", *SMALL, "--out", tmp_path / "w.safetensors", "--model", module)
    assert "dpl pretrain trains ResNetModule, SmallCNNModule, WideResNetModule on images; " in said


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
    with pytest.raises(ConfigurationError, match="is not a file"):
        SmallCNNModule(4, weights=str(tmp_path / "none.pt"))


@pytest.mark.parametrize("source", [None, "photographs"])
def test_a_file_is_not_quoted_with_what_it_does_not_say(copy, source):
    said = {**metadata_of(copy), "source": source}
    save_file(load_file(copy), copy, {name: words for name, words in said.items() if words is not None})
    assert recipe_of(copy) is None


def test_other_tensors_do_not_pass_under_the_recipe_of_a_file(copy, tmp_path, capsys):
    with safe_open(copy, framework="pt") as opened:
        said = opened.metadata()
    # Whoever trains on private images and keeps the metadata.
    save_file({name: value + 1e-3 for name, value in load_file(copy).items()}, copy, said)
    fit = ("fit", "digits", "--trainer.default_root_dir", tmp_path, "--model.init_args.weights", copy)
    for command in (fit, ("pretrain", *SMALL, "--steps", 6, "--out", copy)):
        assert f"{copy} has other tensors than those that its recipe has made" in refusal(capsys, *command)
