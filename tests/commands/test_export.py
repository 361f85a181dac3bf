"""What ``dpl export`` writes is the network of the checkpoint, and its statement is that of the checkpoint's steps."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import timm
import torch

from dp_lightning.cli import main
from dp_lightning.commands import export as export_module
from dp_lightning.commands.analysis_run import AnalysisRun
from dp_lightning.commands.verify import verify
from dp_lightning.datamodules import Digits
from dp_lightning.errors import DataError
from dp_lightning.lightning_modules import LinearProbeModule, SmallCNNModule, TimmModule
from dp_lightning.models import batch_norm_to_group_norm
from dp_lightning.models.feature_network import FeatureNetwork
from dp_lightning.privacy.exported import statement_of
from dp_lightning.privacy.statement import STATEMENT
from dp_lightning.private_run.resume import PRIVATE_RUN
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

onnxruntime = pytest.importorskip("onnxruntime")
safetensors_torch = pytest.importorskip("safetensors.torch")


def fit(folder, *settings):
    main(
        [
            *("fit", "digits", "--privacy.accountant", "rdp", "--trainer.accelerator", "cpu"),
            *("--trainer.enable_progress_bar", "false", "--trainer.logger", "false"),
            *("--trainer.default_root_dir", str(folder), *settings),
        ]
    )
    return folder


def checkpoint_of(folder):
    (found,) = folder.rglob("*.ckpt")
    return found


@pytest.fixture(scope="module")
def averaged(tmp_path_factory):
    """A checkpoint whose weights are an average."""
    return checkpoint_of(fit(tmp_path_factory.mktemp("run"), "--config", "ema", "--trainer.max_steps", "12"))


@pytest.fixture
def edited(averaged, tmp_path):
    """Writes a checkpoint with other content beside its journal."""

    def write(**changes):
        folder = tmp_path / "edited"
        folder.mkdir(exist_ok=True)
        for journal in averaged.parent.glob("privacy_journal_*.jsonl"):
            shutil.copy(journal, folder)
        saved = {**torch.load(averaged, weights_only=True), **changes}
        saved = {name: value for name, value in saved.items() if value is not None}
        PrivateCheckpointIO().save_checkpoint(saved, folder / "edited.ckpt")
        return folder / "edited.ckpt"

    return write


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
    images = torch.stack([image for image, _ in data.test_dataset])
    return data.on_after_batch_transfer([images], 0)[0]


def logits_of(folder, images):
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    return session.run(None, {"images": images.numpy()})[0]


def test_both_files_hold_the_average_of_the_weights(averaged, tmp_path):
    assert export("--ckpt-path", averaged, "--out", tmp_path) == 0
    saved = torch.load(averaged, weights_only=True)
    module = SmallCNNModule(10, in_channels=1, channels=16)
    module.load_state_dict(saved["state_dict"])
    tensors = safetensors_torch.load_file(tmp_path / "model.safetensors")
    torch.testing.assert_close(tensors, dict(module.model.state_dict()), rtol=0, atol=0)
    images = digits()
    for part in (images, images[:1]):  # of any number of images
        expected = module.eval()(part).detach().numpy()
        np.testing.assert_allclose(logits_of(tmp_path, part), expected, rtol=1e-4, atol=1e-5)
    facts = json.loads((tmp_path / "model.json").read_text())
    assert facts["settings"]["mean"] == [0.305]
    assert any(
        (raw - saved["state_dict"][name]).abs().max() > 1e-4 for name, raw in saved["current_model_state"].items()
    )


def test_a_layer_on_scattering_coefficients_is_exported_with_them(tmp_path, capsys):
    images = ["--data", "CachedFeatures", "--data.images", "Digits", "--data.backbone", "scattering"]
    images += ["--data.backbone_kwargs", "{scales: 1, angles: 2}", "--data.cache", str(tmp_path / "cache")]
    short = ["--trainer.max_steps", "2", "--privacy.reproducible", "true"]
    fit(tmp_path / "run", *images, "--model", "LinearProbeModule", "--model.normalize", "unit", *short)
    path = checkpoint_of(tmp_path / "run")
    assert export("--ckpt-path", path, "--out", tmp_path / "out") == 0
    assert "The exported network is not for release: " in capsys.readouterr().err
    module = LinearProbeModule(10, in_channels=3, image_size=4, normalize="unit")
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    settings = {"weights": None, "input_size": None, "backbone_kwargs": {"scales": 1, "angles": 2}, "in_channels": 1}
    network = FeatureNetwork("scattering", **settings, mean=Digits().mean, std=Digits().std)
    pixels = digits()
    expected = module.eval()(network(pixels)).detach()
    np.testing.assert_allclose(logits_of(tmp_path / "out", pixels), expected, rtol=1e-3, atol=1e-4)


def test_the_statement_is_that_of_the_checkpoints_steps(tmp_path):
    run = tmp_path / "run"
    every = ["--trainer.callbacks+", "ModelCheckpoint", "--trainer.callbacks.every_n_train_steps", "4"]
    fit(run, "--trainer.max_steps", "8", *every, "--trainer.callbacks.save_top_k", "-1")
    last = json.loads((run / "privacy_statement.json").read_text())
    by_steps = {torch.load(path, weights_only=True)["global_step"]: path for path in run.rglob("*.ckpt")}
    found = {}
    for steps, path in by_steps.items():
        out = tmp_path / str(steps)
        assert export("--ckpt-path", path, "--out", out, "--format", "safetensors") == 0
        assert not (out / "model.onnx").exists()
        found[steps] = json.loads((out / "privacy_statement.json").read_text())
        assert found[steps]["num_steps"] == steps
    assert sorted(found) == [4, 8]
    assert found[4]["epsilon"]["rdp"] < last["epsilon"]["rdp"]
    own = {"weights": "", "files": {}}
    assert {**found[8], **own} == {**last, **own}


def test_an_edit_of_any_file_of_an_export_is_found(finished_run, tmp_path):
    out = tmp_path / "out"
    assert export("--ckpt-path", checkpoint_of(finished_run), "--out", out) == 0
    assert not [wrong for _, wrong in verify(out) if wrong]
    files = sorted(out.iterdir())
    assert {"model.safetensors", "model.onnx", "model.json", "privacy_statement.md"} < {path.name for path in files}
    for path in files:
        whole = path.read_bytes()
        other = b"8" if whole[-30:-29] == b"9" else b"9"
        for content in (whole[:-30] + other + whole[-29:], None):
            path.unlink()
            if content is not None:
                path.write_bytes(content)
            if path.name == "privacy_statement.json" and content is None:
                with pytest.raises(DataError):
                    list(verify(out))
            else:
                assert any(wrong for _, wrong in verify(out)), path
            path.write_bytes(whole)
    # Another statement of the same tensors, none, and other tensors under the same statement.
    weights = out / "model.safetensors"
    tensors, claims = safetensors_torch.load_file(weights), statement_of(weights)
    moved = {name: tensor + 1 for name, tensor in tensors.items()}
    for changed, said in ((tensors, None), (tensors, replace(claims, run="another")), (moved, claims)):
        metadata = {} if said is None else {STATEMENT: json.dumps(said.saved())}
        safetensors_torch.save_file(changed, weights, metadata=metadata)
        assert any(wrong for _, wrong in verify(out))


def predictions(folder):
    rows = (folder / "predictions.csv").read_text().splitlines()
    names = rows[0].split(",")
    return torch.tensor([[float(row.split(",")[names.index(f"p{k}")]) for k in range(10)] for row in rows[1:]])


def test_a_network_whose_batch_norm_was_replaced_is_resumed_predicted_analysed_and_exported(tmp_path, capsys):
    noise = ("--privacy.target_epsilon", "null", "--privacy.noise_multiplier", "1")
    numbers = ("--privacy.expected_batch_size", "200", *noise)
    model = ("--model", "TimmModule", "--model.name", "test_efficientnet", "--privacy.batch_norm", "group")
    fit(tmp_path / "run", *model, *numbers, "--trainer.max_steps", "2")
    assert "BatchNorm layers (model.bn1 to " in capsys.readouterr().out
    path, quiet = checkpoint_of(tmp_path / "run"), ("--trainer.logger", "false", "--trainer.accelerator", "cpu")
    fit(tmp_path / "more", "--ckpt_path", str(path), *numbers, "--trainer.max_steps", "3")
    statement = json.loads((tmp_path / "more" / "privacy_statement.json").read_text())
    assert statement["num_steps"] == 3
    assert "became GroupNorm" in statement["batch_norm"]
    assert export("--ckpt-path", path, "--out", tmp_path / "out") == 0
    # The configuration has another model and no such setting: both come from the checkpoint.
    main(["predict", "digits", "--ckpt_path", str(path), *quiet, "--trainer.default_root_dir", str(tmp_path / "csv")])
    module = batch_norm_to_group_norm(TimmModule("test_efficientnet", num_classes=10, in_channels=1)).eval()
    module.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    images = digits()
    expected = module(images).detach()
    # Behind the last layers an image is one pixel, and rounding grows where the two values of a group are close.
    np.testing.assert_allclose(logits_of(tmp_path / "out", images), expected, rtol=0, atol=1e-2)
    torch.testing.assert_close(predictions(tmp_path / "csv"), expected.softmax(1), rtol=0, atol=1e-3)
    assert json.loads((tmp_path / "out" / "model.json").read_text())["batch_norm"] == "group"
    analysed = AnalysisRun(["--config", "digits", *model, *numbers], path).module.model.state_dict()
    torch.testing.assert_close(analysed, module.model.state_dict(), rtol=0, atol=0)


def test_pretrained_weights_are_not_loaded_again(tmp_path):
    weights = tmp_path / "network.pth"
    network = timm.create_model("test_efficientnet")
    network.bn1.running_mean.fill_(0.1)  # it has seen data
    torch.save(network.state_dict(), weights)
    fit(
        tmp_path / "run",
        *("--model", "TimmModule", "--model.name", "test_efficientnet", "--model.weights", str(weights)),
        *("--privacy.batch_norm", "freeze", "--model.trained", "head", "--model.input_size", "32"),
        *("--privacy.expected_batch_size", "16", "--trainer.max_steps", "1"),
    )
    path = checkpoint_of(tmp_path / "run")
    weights.unlink()
    assert export("--ckpt-path", path, "--out", tmp_path / "out", "--format", "safetensors") == 0
    saved = torch.load(path, weights_only=True)["state_dict"]
    tensors = safetensors_torch.load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(tensors["conv_stem.weight"], saved["model.conv_stem.weight"])


def test_an_export_of_low_rank_additions_is_the_network_itself(tmp_path):
    pytest.importorskip("peft")
    fit(
        tmp_path / "run",
        *("--model", "TimmModule", "--model.name", "test_efficientnet_gn", "--model.trained", "lora"),
        *("--privacy.expected_batch_size", "200", "--optimizer.lr", "1", "--trainer.max_steps", "3"),
    )
    path = checkpoint_of(tmp_path / "run")
    assert export("--ckpt-path", path, "--out", tmp_path / "out", "--format", "safetensors") == 0
    whole = timm.create_model("test_efficientnet_gn", num_classes=10, in_chans=1).eval()
    whole.load_state_dict(safetensors_torch.load_file(tmp_path / "out" / "model.safetensors"))
    trained = TimmModule("test_efficientnet_gn", num_classes=10, in_channels=1, trained="lora")
    trained.load_state_dict(torch.load(path, weights_only=True)["state_dict"])
    images = digits()[:5]
    torch.testing.assert_close(whole(images), trained.eval()(images), rtol=1e-4, atol=1e-4)


def test_what_cannot_be_exported_is_refused_with_the_reason(averaged, edited, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"

    def refusal(path):
        assert export("--out", out, "--ckpt-path", path) == 2
        assert not list(out.iterdir())
        return capsys.readouterr().err

    saved = torch.load(averaged, weights_only=True)
    assert "missing.ckpt cannot be loaded" in refusal(tmp_path / "missing.ckpt")
    assert "has no privacy statement" in refusal(edited(**{PRIVATE_RUN: None}))
    assert "is of the class (not named)" in refusal(edited(hyper_parameters={}))
    sizeless = {key: value for key, value in saved["hyper_parameters"].items() if key != "image_size"}
    assert "Give --image-size" in refusal(edited(hyper_parameters=sizeless))
    saved["state_dict"]["model.classifier.weight"][0] += 1
    assert "do not belong together" in refusal(edited(state_dict=saved["state_dict"]))
    monkeypatch.setattr(export_module, "find_spec", lambda package: None)
    assert "pip install 'dp-lightning[export]'" in refusal(averaged)


def test_a_statement_never_stands_beside_another_network(finished_run, tmp_path, capsys):
    path, out = checkpoint_of(finished_run), tmp_path / "out"
    for code in (0, 2):
        assert export("--ckpt-path", path, "--out", out, "--format", "safetensors") == code
    assert "holds the statement of other weights. Give another folder" in capsys.readouterr().err


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_does_not_choose_which_code_runs(edited, tmp_path, capsys, named):
    trap = tmp_path / "sprung"
    path = edited(hyper_parameters={"_class_path": "subprocess.Popen", "args": ["touch", str(trap)]})
    trust = ["--module-class", "subprocess.Popen"] if named else []
    assert export("--ckpt-path", path, "--out", tmp_path / "out", *trust) == 2
    assert "A file does not choose which code runs" in capsys.readouterr().err
    assert not trap.exists()


def test_a_module_of_ones_own_is_exported_when_it_is_named(averaged, edited, tmp_path):
    settings = torch.load(averaged, weights_only=True)["hyper_parameters"]
    name = f"{OwnModule.__module__}.OwnModule"
    path = edited(hyper_parameters={**settings, "_class_path": name})
    arguments = ["--ckpt-path", path, "--out", tmp_path / "out", "--format", "safetensors"]
    assert export(*arguments) == 2
    assert export(*arguments, "--module-class", name) == 0


class OwnModule(SmallCNNModule):
    """A class that is not the project's."""
