"""The ``dpl`` command: help, wrong settings, and a run from one YAML file to a statement."""

import csv
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import types
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image

from dp_lightning import cli
from dp_lightning.cli import main
from dp_lightning.commands import training
from dp_lightning.commands.fit_settings import Stopped
from dp_lightning.datamodules import Digits
from dp_lightning.privacy.accounting import compose

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "configs" / "digits.yaml")


def python(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, **kwargs
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["--version"], ["configs"], ["configs", "--help"], ["account", "--help"], ["fti"]]
)
def test_light_commands_answer_without_importing_torch(arguments):
    code = f"import sys\nfrom dp_lightning.cli import main\ntry: main({arguments})\nexcept SystemExit: pass\n"
    assert python("-c", code + "assert not {'torch', 'lightning', 'numpy'} & set(sys.modules)").returncode == 0


def test_help_names_every_command_and_each_has_its_own():
    shown = python("cli.py", "--help")
    assert shown.returncode == 0
    for command in cli._COMMANDS:
        assert f"\n  {command} " in shown.stdout
        if command not in cli._TRAINING:
            assert (ROOT / "dp_lightning" / "commands" / f"{command}.py").exists()


def test_the_version_names_python_and_torch(capsys):
    main(["--version"])
    versions = (version("dp-lightning"), platform.python_version(), version("torch"))
    assert capsys.readouterr().out == "dp-lightning {}, Python {}, torch {}\n".format(*versions)


def test_an_unknown_command_is_refused_with_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fti"])
    assert "there is no command 'fti'. Did you mean fit?" in capsys.readouterr().err


@pytest.mark.parametrize(("given", "taken"), [({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7")])
def test_waiting_threads_give_way_unless_something_else_is_set(given, taken, monkeypatch):
    monkeypatch.setattr(os, "environ", given)
    monkeypatch.setattr(cli, "import_module", lambda name: types.SimpleNamespace(main=lambda arguments: None))
    main(["account"])
    assert given["GOMP_SPINCOUNT"] == taken


# A command that does what `code` says, so that none waits for torch.
STAND_IN = """
import sys, types
module = types.ModuleType("dp_lightning.commands." + {module!r})
exec({code!r}, module.__dict__)
sys.modules[module.__name__] = module
from dp_lightning.cli import main
main()
"""


@pytest.mark.parametrize(
    ("command", "module", "number", "code"),
    [("fit", "training", signal.SIGINT, 130), ("verify", "verify", signal.SIGTERM, 143)],
)
def test_a_signal_ends_a_command_with_its_exit_code_and_no_traceback(command, module, number, code):
    # A signal just before a sleep does not end it.
    waits = "import time\ndef main(arguments):\n    print('begun', flush=True)\n    while True: time.sleep(0.01)"
    process = subprocess.Popen(
        [sys.executable, "-c", STAND_IN.format(module=module, code=waits), command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, "")


def transform(name, **settings):
    return ["--postprocess.transforms", json.dumps([{"class_path": name, "init_args": settings}])]


WRONG = {
    # Names.
    "misspelt": (["--privacy.target_epsilonn", "3"], r"target_epsilonn.*Did you mean privacy.target_epsilon\?"),
    "abbreviated": (["--privacy.target_eps=3"], r"unrecognized.*target_eps.*Did you mean privacy.target_epsilon\?"),
    "in_a_file": (["--config={privcy: {target_epsilon: 3}}"], r"privcy.*Did you mean privacy.target_epsilon\?"),
    "of_a_class": (["--model.init_args.chanels", "4"], r"chanels.*Did you mean channels\?"),
    "class": (["--model", "SmalCNNModule"], r"SmalCNNModule.*Did you mean SmallCNNModule\?"),
    "module": (["--model", "my.module.Class"], "No module named 'my'"),
    # Values.
    "twice": (["--config={trainer: {max_steps: 1}, trainer: {}}"], "'trainer' twice"),
    "gain": (transform("Kalman", gain=1.5), "^error: Kalman: gain must lie in .*process_to_measurement_ratio"),
    "rate": (["--optimizer.init_args.momentum=-1.0"], r"Invalid momentum value: -1\.0 \(ValueError in torch/optim/sgd"),
    # What the trainer and the privacy plan refuse.
    "clip": (["--trainer.gradient_clip_val", "1.0"], "trainer.gradient_clip_val.*privacy.max_grad_norm"),
    "devices": (["--trainer.devices", "0"], r"devices='0'.*not a valid input"),
    "unwritable": (["--trainer.default_root_dir", "/dev/null/runs"], "trainer.default_root_dir is /dev/null/runs"),
    "num_train": (
        ["--privacy.num_train", "100"],
        r"privacy\.num_train is 100, but Digits has 1437 training examples\. Remove privacy\.num_train",
    ),
    # Packages.
    "wandb": (
        ["--trainer.logger", "WandbLogger"],
        r"^error: [\w.]+WandbLogger needs a package that .*wandb[^\n]*$",
    ),
    "mlflow": (["--trainer.logger=MLFlowLogger"], r"^error: [\w.]+MLFlowLogger needs a package that .*mlflow[^\n]*$"),
    "comet": (["--trainer.logger+=CometLogger"], r"^error: [\w.]+CometLogger needs a package that .*comet[^\n]*$"),
    # Files.
    "folder": (
        ["--data", "ImageFolder", "--data.init_args.root", "/nowhere"],
        "/nowhere.*(does not exist|is missing); set data.init_args.root",
    ),
    "weights": (
        ["--data=ImageFolder", "--data.root=/nowhere", "--model.init_args.weights=/nowhere.pth"],
        "weights /nowhere.pth is not a file",
    ),
    "timm": (
        [
            "--data=ImageFolder",
            "--data.root=/nowhere",
            "--model=TimmModule",
            "--model.name=x",
            "--model.weights=/no.pth",
        ],
        "weights /no.pth is not a file",
    ),
    "backbone": (
        ["--data=CachedFeatures", "--data.images=Digits", "--data.backbone=x", "--data.weights=/no.pth"],
        "weights /no.pth is not a file",
    ),
    "checkpoint": (["--ckpt_path", "nothere.ckpt"], "ckpt_path nothere.ckpt is not a file.*'last'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_setting_ends_with_one_message_before_data_is_touched(name, capsys, monkeypatch, tmp_path):
    arguments, message = WRONG[name]
    touched = []
    monkeypatch.setattr(Digits, "read_split", lambda self, split: touched.append(split))
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", DIGITS, "--trainer.default_root_dir", str(tmp_path), *arguments])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert error.count("error:") == 1
    text = error[error.index("error:") :]
    assert "Traceback" not in text
    assert re.search(message, text, flags=re.DOTALL), text
    assert not touched
    assert not list(tmp_path.rglob("*.json"))


def test_a_command_without_a_configuration_says_how_to_get_one(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fit"])
    assert re.search("required: .*model.*`dpl configs` lists.*`dpl init FOLDER`", capsys.readouterr().err)


OTHER = "pytorch_lightning"


@pytest.mark.parametrize(
    ("setting", "kind"),
    [
        ("--model", f"{OTHER}.LightningModule"),
        ("--data", f"{OTHER}.LightningDataModule"),
        ("--trainer.callbacks+", f"{OTHER}.callbacks.LearningRateMonitor"),
        ("--trainer.logger", f"{OTHER}.loggers.CSVLogger"),
    ],
)
def test_classes_of_the_other_package_of_lightning_are_named(setting, kind, capsys):
    pytest.importorskip(OTHER)
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", DIGITS, setting, kind])
    assert f"{kind.rpartition('.')[2]} is of the package pytorch_lightning" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["analyze", "snr"]])
def test_commands_with_the_options_of_a_fit_find_misspelt_names_too(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*command, DIGITS, "--privacy.target_epsilom", "8"])
    assert "Did you mean privacy.target_epsilon?" in capsys.readouterr().err


def test_what_the_first_step_refuses_ends_with_one_message_and_releases_nothing(capsys, tmp_path):
    model = ["--model", "TimmModule", "--model.init_args.name", "test_efficientnet"]
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", DIGITS, "--trainer.default_root_dir", str(tmp_path), *model])
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "BatchNorm" in error
    assert not list(tmp_path.rglob("privacy_statement*"))


def test_the_number_of_classes_reaches_the_model_whatever_is_set_for_it(tmp_path):
    read = training.command_line(
        ["fit", "digits", "--model.num_classes=7", f"--trainer.default_root_dir={tmp_path}"], Stopped
    )
    assert read.model.hparams.num_classes == 10


@pytest.fixture
def checkpoint(finished_run):
    (path,) = (finished_run / "checkpoints").glob("*.ckpt")
    return path


def test_the_configuration_of_a_resumed_run_names_no_earlier_checkpoint(finished_run, tmp_path):
    """With it, another command with this configuration would take the earlier weights, and a new fit would resume."""
    run = shutil.copytree(finished_run, tmp_path / "earlier")  # its journal gets the further steps
    (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
    settings = ["--trainer.default_root_dir", str(tmp_path), "--trainer.max_epochs", "5"]
    settings += ["--privacy.target_epsilon", "4"]
    main(["fit", "--config", str(finished_run / "config.yaml"), "--ckpt_path", str(checkpoint), *settings])
    (run,) = (tmp_path / "lightning_logs").iterdir()
    assert json.loads((run / "result.json").read_text())["num_steps"] == 5 * 3
    assert yaml.safe_load((run / "config.yaml").read_text())["ckpt_path"] is None


def test_a_run_leaves_everything_behind(finished_run, checkpoint):
    result = json.loads((finished_run / "result.json").read_text())
    statement = json.loads((finished_run / "privacy_statement.json").read_text())
    assert result["num_steps"] == statement["num_steps"] == 12
    assert statement["num_train"] == 1437
    assert 0 < result["epsilon"] == statement["epsilon"]["rdp"] <= 3.0
    assert {"test_accuracy_last", "test_accuracy_best", "seconds", "val_accuracy_last"} <= set(result)
    assert statement["unprotected"] == ["unprotected/train_loss"]
    assert "epsilon" in (finished_run / "privacy_statement.md").read_text().lower()
    config = yaml.safe_load((finished_run / "config.yaml").read_text())
    assert config["privacy"]["expected_batch_size"] == 512
    assert torch.load(checkpoint, weights_only=True)["global_step"] == result["num_steps"]


def test_the_curves_are_in_tensorboard(finished_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished_run))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"test/accuracy", "test/loss", "unprotected/train_loss", "privacy/epsilon"} <= tags
    assert "hp_metric" not in tags
    statement = json.loads((finished_run / "privacy_statement.json").read_text())
    spent = {event.step: event.value for event in events.Scalars("privacy/epsilon")}
    # From nothing to all of it, at every step where there are few.
    assert list(spent) == list(range(statement["num_steps"] + 1))
    (sigma, q, _), *_ = statement["ledger"]
    epsilons = [compose([(sigma, q, step)] if step else [], delta=1e-4, accountant="rdp") for step in spent]
    assert list(spent.values()) == pytest.approx(epsilons, rel=1e-6)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_finished_run_is_evaluated_from_its_own_configuration(
    finished_run, checkpoint, tmp_path, monkeypatch, command, capsys
):
    monkeypatch.chdir(tmp_path)
    config = yaml.safe_load((finished_run / "config.yaml").read_text())
    config["trainer"]["default_root_dir"] = None
    Path("run.yaml").write_text(yaml.safe_dump(config))
    main([command, "--config", "run.yaml", "--ckpt_path", str(checkpoint)])
    # An evaluation leaves no folder of a run.
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"run.yaml"} | ({"predictions.csv"} if command == "predict" else set())
    shown = capsys.readouterr().out
    if command == "test":
        accuracy = re.search(r"test/accuracy[^\d]+([\d.]+)", shown)
        result = json.loads((finished_run / "result.json").read_text())
        assert float(accuracy[1]) == pytest.approx(result["test_accuracy_last"])
    if command == "predict":
        assert f"Predictions are in {tmp_path / 'predictions.csv'}." in shown
        rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
        assert len(rows) == 360
        assert sum(float(rows[0][f"p{k}"]) for k in range(10)) == pytest.approx(1.0, abs=1e-4)


def test_a_module_without_every_linked_setting_is_evaluated_from_its_checkpoint(tmp_path, capsys):
    """A wide residual network has no argument image_size, which the data offers."""
    quiet = ["--trainer.accelerator", "cpu", "--trainer.logger", "false", "--trainer.enable_progress_bar", "false"]
    line = [
        *("fit", "--model", "WideResNetModule", "--model.depth", "10", "--model.width", "1", *quiet),
        *("--data", "Digits"),
        *("--privacy.expected_batch_size", "8", "--privacy.noise_multiplier", "1", "--privacy.delta", "1e-4"),
        *("--privacy.accountant", "rdp", "--trainer.max_steps", "1", "--trainer.default_root_dir", str(tmp_path)),
    ]
    main(line)
    with pytest.raises(SystemExit):  # without a logger, each run writes to the same folder
        main(line)
    assert "resume that run with --ckpt_path" in capsys.readouterr().err
    accuracy = json.loads((tmp_path / "result.json").read_text())["test_accuracy_last"]
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    settings = ["--config", str(tmp_path / "config.yaml"), "--trainer.default_root_dir", str(tmp_path / "test")]
    # The checkpoint's own settings are taken: its weights need them.
    main(["test", *settings, "--ckpt_path", str(checkpoint), "--model.init_args.scale_norm", "true"])
    shown = re.search(r"test/accuracy[^\d]+([\d.]+)", capsys.readouterr().out)
    assert float(shown[1]) == pytest.approx(accuracy)


def test_evaluation_without_a_checkpoint_says_so(tmp_path):
    with pytest.warns(UserWarning, match="dpl test` without --ckpt_path.*never trained"):
        main(["test", "--config", DIGITS, "--trainer.default_root_dir", str(tmp_path)])


def test_evaluation_never_guesses_a_checkpoint(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["test", "--config", DIGITS, "--ckpt_path", "last", "--trainer.default_root_dir", str(tmp_path)])
    assert f"ckpt_path is 'last', but there is no checkpoint of a run in {tmp_path}." in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_last_is_the_newest_checkpoint_for_an_evaluation_too(finished_run, checkpoint, tmp_path, command):
    run = shutil.copytree(finished_run, tmp_path / "lightning_logs" / "version_3")
    options = ["--ckpt_path=last", f"--trainer.default_root_dir={tmp_path}"]
    read = training.command_line([command, "--config", str(finished_run / "config.yaml"), *options], Stopped)
    assert read.config_init[command].ckpt_path == str(run / "checkpoints" / checkpoint.name)


def test_a_checkpoint_of_another_network_says_what_does_not_fit(checkpoint, tmp_path, capsys):
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (9, 9)).save(tmp_path / split / name / "1.png")
    data = ["--data=ImageFolder", f"--data.root={tmp_path}", "--data.image_size=8", "--data.mean=[0.3]"]
    with pytest.raises(SystemExit, match="2"):
        main(["validate", "--config", DIGITS, *data, f"--ckpt_path={checkpoint}"])
    error = capsys.readouterr().err
    assert "does not fit this configuration" in error
    assert "size mismatch for model.classifier.bias" in error
    assert "Traceback" not in error


def test_weights_alone_are_no_checkpoint(tmp_path, capsys):
    torch.save({"layer.weight": torch.zeros(2)}, tmp_path / "weights.pth")
    with pytest.raises(SystemExit):
        main(["fit", "--config", DIGITS, "--ckpt_path", str(tmp_path / "weights.pth")])
    assert "weights.pth is not a checkpoint of a run" in capsys.readouterr().err
