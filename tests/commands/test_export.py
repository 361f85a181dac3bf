"""What ``dpl export`` writes is the network of the checkpoint, and its statement is that of the checkpoint's steps."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch

from dp_lightning.cli import main
from dp_lightning.commands import export as export_module
from dp_lightning.commands.verify import verify
from dp_lightning.datamodules import Digits
from dp_lightning.errors import ConfigurationError, DataError, ModelError
from dp_lightning.lightning_modules import LinearProbeModule, SmallCNNModule
from dp_lightning.models.feature_network import FeatureNetwork
from dp_lightning.privacy.exported import statement_of
from dp_lightning.privacy.statement import STATEMENT
from dp_lightning.private_run.resume import PRIVATE_RUN
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

onnxruntime = pytest.importorskip("onnxruntime")
safetensors_torch = pytest.importorskip("safetensors.torch")
DIGITS = str(Path(__file__).parents[2] / "configs" / "digits.yaml")
EMA = str(Path(__file__).parents[2] / "configs" / "fragments" / "averaging" / "ema.yaml")


def fit(folder, *settings):
    main(
        [
            *("fit", "--config", DIGITS, "--privacy.accountant", "rdp", "--trainer.accelerator", "cpu"),
            *("--trainer.enable_progress_bar", "false", "--trainer.logger", "false"),
            *("--trainer.default_root_dir", str(folder), *settings),
        ]
    )
    return folder


def checkpoint_of(folder):
    (found,) = folder.rglob("*.ckpt")
    return found


def beside(checkpoint, folder):
    """The folder, which has the journal of the checkpoint."""
    folder.mkdir(exist_ok=True)
    for journal in checkpoint.parent.glob("privacy_journal_*.jsonl"):
        shutil.copy(journal, folder)
    return folder


def save(checkpoint, path):
    """Write an edited checkpoint."""
    PrivateCheckpointIO().save_checkpoint(checkpoint, path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("run"), "--config", EMA, "--trainer.max_steps", "12")


def export(*arguments):
    """The status that the command exits with."""
    try:
        main(["export", *map(str, arguments)])
    except SystemExit as exit_:
        return exit_.code
    return 0


def digits():
    data = Digits()
    data.setup("test")
    return torch.stack([image for image, _ in data.test_dataset])


def test_both_files_hold_the_average_of_the_weights(trained, tmp_path):
    assert export("--ckpt-path", checkpoint_of(trained), "--out", tmp_path) == 0
    saved = torch.load(checkpoint_of(trained), weights_only=True)
    module = SmallCNNModule(10, in_channels=1, channels=16)
    module.load_state_dict(saved["state_dict"])
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    expected = {name: p for name, p in module.model.state_dict().items()}
    assert set(tensors) == set(expected)
    for name, tensor in tensors.items():
        assert torch.equal(tensor, expected[name])
    images = digits()
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    for part in (images, images[:1]):  # of any number of images
        (logits,) = session.run(None, {"images": part.numpy()})
        np.testing.assert_allclose(logits, module.eval()(part).detach().numpy(), rtol=1e-4, atol=1e-5)
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["settings"]["mean"] == [0.305]
    assert any(
        (raw - saved["state_dict"][name]).abs().max() > 1e-3 for name, raw in saved["current_model_state"].items()
    )


def test_a_layer_on_scattering_coefficients_is_exported_with_them(tmp_path, capsys):
    images = ["--data", "CachedFeatures", "--data.images", "Digits", "--data.backbone", "scattering"]
    images += ["--data.backbone_kwargs", "{angles: 2}", "--data.cache", str(tmp_path / "cache")]
    run, short = tmp_path / "run", ["--trainer.max_steps", "2", "--privacy.reproducible", "true"]
    fit(run, *images, "--model", "LinearProbeModule", "--model.normalize", "unit", *short)
    assert export("--ckpt-path", checkpoint_of(run), "--out", tmp_path / "out") == 0
    assert "The exported network is not for release: " in capsys.readouterr().err
    module = LinearProbeModule(10, in_channels=9, image_size=2, normalize="unit")
    module.load_state_dict(torch.load(checkpoint_of(run), weights_only=True)["state_dict"])
    assert module.model[1].weight.abs().max() > 0
    pixels = digits()
    settings = {"weights": None, "input_size": None, "backbone_kwargs": {"angles": 2}, "in_channels": 1}
    network = FeatureNetwork("scattering", **settings, mean=Digits().mean, std=Digits().std)
    expected = module.eval()(network(pixels)).detach()
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    for part in (pixels, pixels[:1]):
        (logits,) = session.run(None, {"images": part.numpy()})
        np.testing.assert_allclose(logits, expected[: len(part)], rtol=1e-3, atol=1e-4)


def test_one_format_alone_can_be_asked_for(trained, tmp_path):
    assert export("--ckpt-path", checkpoint_of(trained), "--out", tmp_path, "--format", "safetensors") == 0
    assert not (tmp_path / "model.onnx").exists()


def test_the_statement_is_that_of_the_checkpoints_steps(tmp_path):
    run = tmp_path / "run"
    every = ["--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks.every_n_train_steps", "4"]
    fit(run, "--trainer.max_steps", "8", *every, "--trainer.callbacks.save_top_k", "-1")
    last = json.loads((run / "privacy_statement.json").read_text())
    by_steps = {torch.load(path, weights_only=True)["global_step"]: path for path in run.rglob("*.ckpt")}
    for steps, path in by_steps.items():
        assert export("--ckpt-path", path, "--out", tmp_path / str(steps), "--format", "safetensors") == 0
        found = json.loads((tmp_path / str(steps) / "privacy_statement.json").read_text())
        assert found["num_steps"] == steps
        assert found["epsilon"]["rdp"] <= last["epsilon"]["rdp"]
    assert sorted(by_steps) == [4, 8]
    whole = json.loads((tmp_path / "8" / "privacy_statement.json").read_text())
    own = {"weights": "", "files": {}}
    assert {**whole, **own} == {**last, **own}
    # The digest is that of the tensors in the export, which anyone can check.
    assert not any(finding for _, finding in verify(tmp_path / "8", []))
    tensors = safetensors_torch.load_file(tmp_path / "8" / "model.safetensors")
    next(iter(tensors.values())).mul_(1.01)
    safetensors_torch.save_file(tensors, tmp_path / "8" / "model.safetensors")
    assert "model.safetensors has the statement of its tensors" in [
        what for what, wrong in verify(tmp_path / "8", []) if wrong
    ]
    first = json.loads((tmp_path / "4" / "privacy_statement.json").read_text())
    assert first["epsilon"]["rdp"] < last["epsilon"]["rdp"]
    assert "| num steps | 4 |" in (tmp_path / "4" / "privacy_statement.md").read_text()


def test_an_edit_of_any_file_of_an_export_is_found(trained, tmp_path):
    out = tmp_path / "out"
    assert export("--ckpt-path", checkpoint_of(trained), "--out", out) == 0
    assert not [wrong for _, wrong in verify(out, []) if wrong]
    files = sorted(out.iterdir())
    assert {"model.safetensors", "model.onnx", "model.json", "privacy_statement.md"} < {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        other = b"8" if whole[-30:-29] == b"9" else b"9"
        for edited in (whole[:-30] + other + whole[-29:], b"some text", None):
            path.unlink()
            if edited is not None:
                path.write_bytes(edited)
            if path.name == "privacy_statement.json" and edited is None:
                with pytest.raises(DataError):
                    list(verify(out, []))
            else:
                assert any(wrong for _, wrong in verify(out, [])), path
            path.write_bytes(whole)
    # Another statement of the same tensors, or none.
    weights = out / "model.safetensors"
    tensors, whole = safetensors_torch.load_file(weights), weights.read_bytes()
    claims = statement_of(weights)
    for metadata in ({}, {STATEMENT: json.dumps(replace(claims, run="another").saved())}):
        safetensors_torch.save_file(tensors, weights, metadata=metadata)
        assert any(wrong for _, wrong in verify(out, []))
    weights.write_bytes(whole)
    assert not [wrong for _, wrong in verify(out, []) if wrong]


def test_pretrained_weights_are_not_loaded_again(tmp_path):
    weights = tmp_path / "network.pth"
    torch.save(timm.create_model("test_efficientnet").state_dict(), weights)
    fit(
        tmp_path / "run",
        *("--model", "TimmModule", "--model.name", "test_efficientnet", "--model.weights", str(weights)),
        *("--model.batch_norm", "frozen", "--model.trained", "head", "--model.input_size", "32"),
        *("--privacy.expected_batch_size", "16", "--trainer.max_steps", "1"),
    )
    weights.unlink()
    assert export("--ckpt-path", checkpoint_of(tmp_path / "run"), "--out", tmp_path / "out") == 0
    saved = torch.load(checkpoint_of(tmp_path / "run"), weights_only=True)["state_dict"]
    tensors = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["conv_stem.weight"], saved["model.conv_stem.weight"])
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    assert session.run(None, {"images": digits()[:3].numpy()})[0].shape == (3, 10)


def test_a_head_on_features_takes_vectors():
    module = LinearProbeModule(3, in_channels=16).eval()
    content = export_module._onnx(module, 16, 1)
    features = torch.randn(5, 16)
    (logits,) = onnxruntime.InferenceSession(content).run(None, {"images": features.numpy()})
    np.testing.assert_allclose(logits, module(features).detach().numpy(), atol=1e-5)


def test_an_export_of_low_rank_additions_is_the_network_itself(tmp_path):
    pytest.importorskip("peft")
    fit(
        tmp_path / "run",
        *("--model", "TimmModule", "--model.name", "test_efficientnet_gn", "--model.trained", "lora"),
        *("--privacy.expected_batch_size", "200", "--optimizer.lr", "1", "--trainer.max_steps", "3"),
    )
    assert export("--ckpt-path", checkpoint_of(tmp_path / "run"), "--out", tmp_path / "out") == 0
    whole = timm.create_model("test_efficientnet_gn", num_classes=10, in_chans=1).eval()
    whole.load_state_dict(safetensors_torch.load_file(tmp_path / "out" / "model.safetensors"))
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    images = digits()[:5]
    (logits,) = session.run(None, {"images": images.numpy()})
    np.testing.assert_allclose(logits, whole(images).detach().numpy(), rtol=1e-4, atol=1e-4)


def test_a_statement_never_stands_beside_another_network(trained, tmp_path, capsys, monkeypatch):
    path, out = checkpoint_of(trained), tmp_path / "out"

    def broken(*arguments):
        raise ConfigurationError("no ONNX of this network")

    with monkeypatch.context() as patch:
        patch.setattr(export_module, "_onnx", broken)
        assert export("--ckpt-path", path, "--out", out) == 2
    assert list(out.iterdir()) == []
    assert export("--ckpt-path", path, "--out", out) == 0
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    capsys.readouterr()
    assert export("--ckpt-path", path, "--out", out, "--format", "safetensors") == 2
    assert "model.safetensors of an earlier export. Give another folder" in capsys.readouterr().err
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_what_cannot_be_exported_is_refused_with_the_reason(trained, tmp_path, capsys, monkeypatch):
    path = checkpoint_of(trained)

    def refusal(*arguments):
        assert export("--out", tmp_path / "out", *arguments) == 2
        return capsys.readouterr().err

    assert "missing.ckpt cannot be loaded" in refusal("--ckpt-path", tmp_path / "missing.ckpt")
    saved = torch.load(path, weights_only=True)
    beside(path, tmp_path / "plain")
    torch.save({key: value for key, value in saved.items() if key != PRIVATE_RUN}, tmp_path / "plain" / "a.ckpt")
    assert "has no privacy statement" in refusal("--ckpt-path", tmp_path / "plain" / "a.ckpt")
    save({**saved, "hyper_parameters": {}}, tmp_path / "plain" / "b.ckpt")
    assert "is of the class (not named)" in refusal("--ckpt-path", tmp_path / "plain" / "b.ckpt")
    sizeless = {key: value for key, value in saved["hyper_parameters"].items() if key != "image_size"}
    save({**saved, "hyper_parameters": sizeless}, tmp_path / "plain" / "d.ckpt")
    assert "Give --image-size" in refusal("--ckpt-path", tmp_path / "plain" / "d.ckpt")
    saved["state_dict"]["model.classifier.weight"][0] += 1
    torch.save(saved, tmp_path / "plain" / "e.ckpt")
    assert "do not belong together" in refusal("--ckpt-path", tmp_path / "plain" / "e.ckpt")
    monkeypatch.setattr(export_module.pydoc, "safeimport", lambda package: None)
    assert "pip install 'dp-lightning[export]'" in refusal("--ckpt-path", path)
    assert not list((tmp_path / "out").glob("*.onnx"))


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_does_not_choose_which_code_runs(trained, tmp_path, capsys, named):
    trap = beside(checkpoint_of(trained), tmp_path) / "sprung"
    saved = torch.load(checkpoint_of(trained), weights_only=True)
    saved["hyper_parameters"] = {"_class_path": "subprocess.Popen", "args": ["touch", str(trap)]}
    save(saved, tmp_path / "trap.ckpt")
    trust = ["--module-class", "subprocess.Popen"] if named else []
    assert export("--ckpt-path", tmp_path / "trap.ckpt", "--out", tmp_path / "out", *trust) == 2
    assert "A file does not choose which code runs" in capsys.readouterr().err
    assert not trap.exists()


def test_a_module_of_ones_own_is_exported_when_it_is_named(trained, tmp_path):
    saved = torch.load(checkpoint_of(trained), weights_only=True)
    path = f"{OwnModule.__module__}.OwnModule"
    saved["hyper_parameters"]["_class_path"] = path
    save(saved, beside(checkpoint_of(trained), tmp_path) / "own.ckpt")
    arguments = ["--ckpt-path", tmp_path / "own.ckpt", "--out", tmp_path / "out", "--format", "safetensors"]
    assert export(*arguments) == 2
    assert export(*arguments, "--module-class", path) == 0


class OwnModule(SmallCNNModule):
    """A class that is not the project's."""


def test_a_model_of_which_torch_makes_no_program_is_refused(monkeypatch):
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: None)
    with pytest.raises(ModelError, match="--format safetensors"):
        export_module._onnx(torch.nn.Linear(4, 2), 4, 1)
