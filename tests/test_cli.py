"""The ``dpl`` command: help, wrong settings, and a run from one YAML file to a statement."""

import csv
import gc
import json
import os
import platform
import re
import signal
import subprocess
import sys
import types
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule
from PIL import Image

from dp_lightning import cli
from dp_lightning.cli import main
from dp_lightning.commands import parser, training
from dp_lightning.commands.foreign_modules import ForeignModules
from dp_lightning.datamodules import Digits
from dp_lightning.privacy.accounting import compose
from dp_lightning.private_run.settings import PrivacySettings

ROOT = Path(__file__).parents[1]
DIGITS = str(ROOT / "configs" / "digits.yaml")
MUON = str(ROOT / "configs" / "fragments" / "postprocess" / "dp_muon.yaml")
COMMANDS = ("fit", "validate", "test", "predict", "plan", "account", "doctor")


def python(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False, **kwargs
    )


@pytest.mark.parametrize("start", [["-m", "dp_lightning.cli"], ["cli.py"]], ids=["module", "checkout"])
def test_help_names_all_commands(start):
    code = ["-c", "from dp_lightning.cli import main; main(['--help'])"] if start[0] == "-m" else [*start, "--help"]
    shown = python(*code)
    assert shown.returncode == 0
    assert all(f"\n  {command} " in shown.stdout for command in COMMANDS)


def test_help_imports_neither_torch_nor_lightning():
    code = (
        "import sys; from dp_lightning.cli import main; main(['--help']);"
        "assert not {'torch', 'lightning', 'opacus', 'numpy'} & set(sys.modules)"
    )
    assert python("-c", code).returncode == 0


def test_the_number_of_examples_counts_where_the_data_module_does_not_state_it():
    settings = PrivacySettings(expected_batch_size=2, noise_multiplier=1.0, num_train=100)
    assert training._num_train(settings, LightningDataModule()) == 100
    settings.num_train = None
    assert training._num_train(settings, LightningDataModule()) is None
    assert training._num_train(settings, Digits()) == 1437


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_the_version_names_python_and_torch_without_importing_it(option):
    code = f"import sys; from dp_lightning.cli import main; main(['{option}']); assert 'torch' not in sys.modules"
    shown = python("-c", code)
    assert shown.returncode == 0
    versions = (version("dp-lightning"), platform.python_version(), version("torch"))
    assert shown.stdout == "dp-lightning {}, Python {}, torch {}\n".format(*versions)


def test_the_version_is_shown_without_torch_too(capsys, monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(cli, "version", missing)
    main(["--version"])
    assert capsys.readouterr().out.endswith(", torch is not installed\n")


@pytest.mark.parametrize("given", [{}, {"GOMP_SPINCOUNT": "7"}, {"OMP_WAIT_POLICY": "ACTIVE"}])
def test_waiting_threads_give_way_unless_something_else_is_set(given, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cli, "import_module", lambda name: types.SimpleNamespace(main=lambda arguments: None))
    main(["account"])
    spins = os.environ.pop("GOMP_SPINCOUNT", None)
    assert spins == {(): "10000", ("GOMP_SPINCOUNT",): "7", ("OMP_WAIT_POLICY",): None}[tuple(given)]


@pytest.mark.parametrize("fails", [False, True])
def test_garbage_is_collected_again_after_the_imports_of_a_command(fails, monkeypatch):
    """And nothing is left out: a tensor that was made by an import is found by what looks for references to it."""
    during, made = [], []

    def import_module(name):
        during.append(gc.isenabled())
        made.append([torch.zeros(1)])
        if fails:
            raise KeyboardInterrupt
        return types.SimpleNamespace(main=lambda arguments: during.append(gc.isenabled()))

    monkeypatch.setattr(cli, "import_module", import_module)
    monkeypatch.delitem(sys.modules, "dp_lightning.commands.account", raising=False)
    with pytest.raises(KeyboardInterrupt) if fails else nullcontext():
        main(["account"])
    assert during == ([False] if fails else [False, True])
    assert gc.isenabled()
    assert any(holder is made[0] for holder in gc.get_referrers(made[0][0]))


def test_an_unknown_command_is_refused(capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["fitt"])
    assert exit_.value.code == 2
    assert "'fitt'" in capsys.readouterr().err


# A command that does what `code` says, so that none waits for torch.
STAND_IN = """
import sys, types
module = types.ModuleType("dp_lightning.commands." + {module!r})
exec({code!r}, module.__dict__)
sys.modules[module.__name__] = module
from dp_lightning.cli import main
main()
"""


def stand_in(command, code):
    module = "training" if command in ("fit", "validate", "test", "predict") else command
    return ["-c", STAND_IN.format(module=module, code=code), command]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", [*COMMANDS, "init", "export", "verify", "audit", "sweep", "report", "analyze"])
def test_a_signal_ends_every_command_with_its_exit_code_and_no_traceback(command, number, code):
    # A signal just before a sleep does not end it.
    waits = "import time\ndef main(arguments):\n    print('begun', flush=True)\n    while True: time.sleep(0.01)"
    process = subprocess.Popen(
        [sys.executable, *stand_in(command, waits)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
    )
    assert process.stdout.readline() == "begun\n"
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (code, f"\ndpl: stopped by {number.name}.\n")


def test_a_signal_to_a_process_group_is_told_once_and_output_is_written_once():
    # As Ctrl-C on a terminal, which reaches the processes that load images as well.
    waits = """
import os, time
def main(arguments):
    print('begun')
    reading, writing = os.pipe()
    if os.fork():
        os.read(reading, 1)
        os.write(2, b'.')
    else:
        os.write(writing, b'.')
    while True: time.sleep(0.01)
"""
    process = subprocess.Popen(
        [sys.executable, *stand_in("verify", waits)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
    )
    assert process.stderr.read(1) == "."
    os.killpg(process.pid, signal.SIGINT)
    output, error = process.communicate(timeout=60)
    assert (process.returncode, output, error) == (130, "begun\n", "\ndpl: stopped by SIGINT.\n")


@pytest.mark.parametrize("unbuffered", [[], ["-u"]])
@pytest.mark.parametrize("failed", [False, True])
def test_output_that_cannot_be_written_has_an_exit_code_of_its_own(unbuffered, failed):
    prints = f"import sys\ndef main(arguments):\n    print('text' * 9999)\n    sys.exit({failed:d})"
    command = [*unbuffered, *stand_in("verify", prints)]
    unread, pipe = os.pipe()
    os.close(unread)
    for output, why in ((os.open("/dev/full", os.O_WRONLY), "No space left"), (pipe, "Broken pipe")):
        shown = subprocess.run(
            [sys.executable, *command], stdout=output, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=60
        )
        os.close(output)
        assert shown.returncode == 74
        (said,) = shown.stderr.strip().splitlines()
        assert said.startswith("dpl: error: ")
        assert why in said
    closed = [sys.executable, "-c", "import os, sys; os.close(1); os.execv(sys.executable, sys.argv[1:])"]
    assert subprocess.run([*closed, sys.executable, *command], cwd=ROOT, timeout=60).returncode == failed


def test_an_error_of_another_file_is_not_that_of_the_output():
    shown = python(*stand_in("verify", "def main(arguments):\n    open('/nowhere/x')"))
    assert shown.returncode == 1
    assert "FileNotFoundError" in shown.stderr


def transform(name, **settings):
    return ["--postprocess.transforms", json.dumps([{"class_path": name, "init_args": settings}])]


WRONG = {
    "misspelt": (["--privacy.target_epsilonn", "3"], r"target_epsilonn.*Did you mean privacy.target_epsilon\?"),
    "abbreviated": (["--privacy.target_eps", "3"], r"no setting privacy.target_eps\. Did you mean"),
    "unknown": (["--wandb", "1"], r"no setting wandb\."),
    "clip": (["--trainer.gradient_clip_val", "1.0"], "trainer.gradient_clip_val.*privacy.max_grad_norm"),
    "accumulate": (["--trainer.accumulate_grad_batches", "2"], "accumulate_grad_batches.*privacy.expected_batch_size"),
    "precision": (["--trainer.precision", "16-true"], "trainer.precision is 16-true.*bf16-mixed"),
    "delta": (["--privacy.delta", "0.001"], "delta must be below 1/num_train"),
    "batch": (["--privacy.expected_batch_size", "2000"], "expected_batch_size must be at most num_train = 1437"),
    "number": (
        ["--privacy.num_train", "100"],
        r"privacy\.num_train is 100, but Digits has 1437 training examples\. Remove privacy\.num_train",
    ),
    "classes": (
        ["--model.init_args.num_classes", "7"],
        r"^error: model\.init_args\.num_classes is 7, and the data has 10; leave it out: it comes from the data\.\n",
    ),
    "channels": (["--model.in_channels=3"], r"model\.init_args\.in_channels is 3, and the data has 1; leave it out"),
    "size": (["--config={model: {init_args: {image_size: 4}}}"], r"image_size is 4, and the data has 8; leave"),
    "mean": (
        ["--model=TimmModule", "--model.name=resnet18", "--model.mean=[0.5]"],
        r"mean is \[0\.5\], and the data has \[0\.305\]; leave it out",
    ),
    "folder": (
        ["--data", "ImageFolder", "--data.init_args.root", "/nowhere"],
        "/nowhere/train is missing; set data.init_args.root",
    ),
    "download": (
        ["--data", "CIFAR10", "--data.init_args.root", "/nowhere", "--privacy.delta", "1e-5"],
        "/nowhere.*missing.*download: true",
    ),
    "both": (["--privacy.noise_multiplier", "1"], "exactly one of privacy.target_epsilon"),
    "no_noise": (
        ["--privacy.noise_multiplier", "0", "--privacy.target_epsilon", "null"],
        "noise_multiplier: 0 and not_private: true for a run that is not private",
    ),
    "endless": (["--trainer.max_epochs=-1"], "trainer.max_epochs or trainer.max_steps"),
    "class": (["--model", "SmalCNNModule"], r"no class 'SmalCNNModule'.*Did you mean SmallCNNModule\?"),
    "checkpoint": (["--ckpt_path", "nothere.ckpt"], "ckpt_path nothere.ckpt is not a file"),
    "best": (["--ckpt_path", "best"], "ckpt_path best is not a file.*'last'"),
    "devices": (["--trainer.devices", "0"], r"Lightning refuses.*trainer \(.*devices: 0.*not a valid input"),
    "strategy": (["--trainer.strategy", "all"], "Lightning refuses.*strategy: all"),
    "barebones": (["--trainer.barebones", "true"], "^error: trainer.barebones is true.*Remove it"),
    "url": (["--trainer.default_root_dir", "file:///tmp/x"], "write to file:.*, a URL.*default_root_dir"),
    "check_interval": (
        ["--trainer.val_check_interval", "2.5"],
        r"Lightning refuses.*trainer \(val_check_interval: 2.5\)",
    ),
    "max_time": (["--trainer.max_time", "soon"], "Lightning refuses.*DD:HH:MM:SS"),
    "no_epochs": (["--trainer.max_epochs", "0"], "max_epochs.*at least one"),
    "unwritable": (["--trainer.default_root_dir", "/dev/null/runs"], "trainer.default_root_dir is /dev/null/runs"),
    "choice": (["--privacy.clipping", "layerwise"], "privacy.clipping"),
    "gain": (transform("Kalman", gain=1.5), "^error: Kalman: gain must lie in .*process_to_measurement_ratio"),
    "beta": (transform("Momentum", beta=1.0), "^error: Momentum: beta must lie in"),
    "inner": (
        transform("GatedOrthogonalize", fallback={"class_path": "Momentum"}),
        "^error: GatedOrthogonalize: fallback must be a transform of matrices without memory",
    ),
    "disk": (["--privacy.disk.gain", "1.5"], r"^error: privacy\.disk\.gain must lie between 0 and 1"),
    "endless_rate": (
        ["--optimizer.init_args.lr", ".inf"],
        r"^error: optimizer\.init_args\.lr is inf; settings are finite",
    ),
    "no_momentum": (
        ["--optimizer.init_args.momentum=.nan"],
        r"optimizer\.init_args\.momentum is nan; settings are finite",
    ),
    "no_beta": (transform("Momentum", beta=".nan"), r"postprocess\.transforms\[0\]\.init_args\.beta is nan"),
    "beyond": (["--privacy.max_grad_norm=1e300"], r"privacy\.max_grad_norm is 1e\+300, outside the range of float32"),
    "digits": (["--seed_everything", str(2**64)], "seed_everything has 20 digits; integers must be below"),
    "seed": (["--seed_everything", str(2**33)], "^error: seed_everything: "),
    "rate": (
        ["--optimizer.init_args.momentum=-1.0"],
        r"^error: optimizer\.init_args: Invalid momentum value: -1\.0\n",
    ),
    "schedule": (
        ["--lr_scheduler=CosineAnnealingWarmRestarts", "--lr_scheduler.T_0=-1"],
        r"^error: lr_scheduler\.init_args: Expected positive integer T_0, but got -1\n",
    ),
    "no_delta": (["--privacy.delta=1.0"], r"^error: delta must be a number between 0 and 1; got 1\.0"),
    "no_epsilon": (["--privacy.target_epsilon=-3"], r"^error: target_epsilon must be a finite number above 0"),
    "no_norm": (["--privacy.max_grad_norm=0"], r"^error: max_grad_norm is 0; it must be a number from"),
    "no_batch": (["--privacy.expected_batch_size=0"], r"^error: expected_batch_size must be an integer of at"),
    "too_much_noise": (
        ["--privacy.noise_multiplier=-1", "--privacy.target_epsilon=null"],
        r"^error: noise_multiplier",
    ),
    "model_channels": (
        ["--model.channels=3"],
        r"^error: model\.init_args\.channels must be a multiple of 4, not 3",
    ),
    "class_of_torch": (["--optimizer=torch.optim.SDG"], r"no attribute 'SDG'\. Did you mean torch\.optim\.SGD\?"),
    "class_of_ours": (["--model=dp_lightning.models.SmalCNN"], r"Did you mean dp_lightning\.models\.SmallCNN\?"),
    "accelerator": (
        ["--trainer.accelerator=cuda"] if not torch.cuda.is_available() else ["--trainer.accelerator=mps"],
        r"Lightning refuses.*accelerator is not available.*Give --trainer\.accelerator cpu, or auto",
    ),
    "tpu": (["--trainer.accelerator=tpu"], r"trainer \(accelerator: tpu.*Give --trainer\.accelerator cpu, or auto"),
    "fraction": (["--data.init_args.val_fraction=null"], "data"),
    "processes": (["--trainer.devices", "5000"], "trainer.devices is 5000; the maximum is 1,024"),
    "nodes": (
        ["--trainer.num_nodes", "2", "--trainer.accelerator=cpu"],
        "num_nodes is 2, but the other nodes were not started",
    ),
    "no_fraction": (
        ["--data.init_args.val_fraction", "null"],
        r"^error: data\.init_args\.val_fraction must lie in \[0, 1\), not None",
    ),
    "deep": (["--model", "[" * 90 + "]" * 90], "model|There is no class"),
    "list": (["--postprocess", "[{class_path: Momentum}]"], "postprocess"),
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


@pytest.mark.parametrize("side", [1, 3])
def test_images_that_the_network_cannot_take_are_named_as_the_data_names_them(side, tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / "train" / name).mkdir(parents=True)
        Image.new("RGB", (9, 9)).save(tmp_path / "train" / name / "1.png")
    data = ["--data=ImageFolder", f"--data.root={tmp_path}", f"--data.image_size={side}"]
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", DIGITS, "--trainer.default_root_dir", str(tmp_path), *data])
    message = f"error: data.init_args.image_size must be at least 4 pixels for this network, not {side}\n"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_a_command_without_a_configuration_says_how_to_get_one(command, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([command])
    assert capsys.readouterr().err == (
        f"\ndpl {command}: error: There is no configuration. Give one: `dpl {command} --config FILE`; `dpl configs` "
        "lists some, and `dpl init FOLDER` writes one for your images.\n"
    )


def test_what_a_configuration_does_not_set_is_named_without_the_command(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--model=SmallCNNModule", "--data=Digits"])
    assert "error: The configuration does not set privacy.expected_batch_size; add it" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"[" * 100_000, b"a: &a [*a]", b"\xff\xfe", bytes(2**21), b"x: " + b"9" * 9_999])
def test_a_configuration_beyond_all_bounds_is_refused(content, tmp_path, capsys, monkeypatch):
    (tmp_path / "run.yaml").write_bytes(content)
    built = []  # to build the text of brackets takes 25 s
    monkeypatch.setattr(parser, "_load", lambda text, load=parser._load: built.append(text) or load(text))
    monkeypatch.setattr(yaml, "load", lambda text, kind, load=yaml.load: built.append(text) or load(text, kind))
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", str(tmp_path / "run.yaml")])
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert len(message) < 3_000
    assert str(tmp_path / "run.yaml") in message
    # The number of many digits is within the bounds: it is the loader that refuses it.
    assert (content in [text.encode() for text in built]) == content.endswith(b"9")


OWN = """
print("imported")
from dp_lightning.lightning_modules import SmallCNNModule
class Own(SmallCNNModule):
    pass
"""


def test_modules_from_outside_are_named_before_they_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "a_module_of_mine.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["--config", DIGITS, "--model", "a_module_of_mine.Own", "--privacy.delta", "0.9"]
    monkeypatch.setattr("builtins.print", lambda *text, file=None, **kwargs: said.append(text[0]))
    said: list[str] = []
    with pytest.raises(SystemExit):
        main(["fit", *arguments, "--trainer.default_root_dir", str(tmp_path)])
    about = [text for text in said if "a_module_of_mine" in text or text == "imported"]
    assert about[0] == (
        f"dpl: the configuration imports a_module_of_mine from {tmp_path}/a_module_of_mine.py. A configuration is "
        "code: run only those you trust."
    )
    assert about[1:] == ["imported"]


def test_packages_that_a_class_is_taken_from_are_named_and_ours_are_not(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["fit", "--config", DIGITS, "--privacy.delta", "0.9", "--trainer.default_root_dir", str(tmp_path)])
    assert "A configuration is code" not in capsys.readouterr().err
    logger = {"class_path": "collections.OrderedDict"}
    named = ForeignModules()
    named.name_those_of_classes(
        Namespace(trainer=Namespace(logger=[logger, logger]), model=Namespace(class_path="torch.x"))
    )
    shown = capsys.readouterr().err
    assert shown.count("dpl: ") == 1
    assert "uses the class collections.OrderedDict, which is not part of dp_lightning" in shown


def test_what_the_first_step_refuses_ends_with_one_message_and_releases_nothing(capsys, tmp_path):
    model = ["--model", "TimmModule", "--model.init_args.name", "test_efficientnet"]
    with pytest.raises(SystemExit) as exit_:
        main(["fit", "--config", DIGITS, "--trainer.default_root_dir", str(tmp_path), *model])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    assert "BatchNorm" in error
    assert {"one_by_one", "batch_norm"} & set(re.findall(r"\w+", error))
    assert not list(tmp_path.rglob("privacy_statement*"))


def test_a_misspelt_key_in_the_file_is_refused(tmp_path, capsys):
    config = yaml.safe_load(Path(DIGITS).read_text())
    config["privacy"]["target_epsilonn"] = config["privacy"].pop("target_epsilon")
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(path)])
    assert "Did you mean privacy.target_epsilon?" in capsys.readouterr().err


def test_data_without_a_class_is_refused_by_name(tmp_path, capsys):
    config = {**yaml.safe_load(Path(DIGITS).read_text()), "data": {}}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "--config", str(path), "--trainer.default_root_dir", str(tmp_path)])
    assert "error: data names no data module. Set data.class_path" in capsys.readouterr().err


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A short run of the quick start with DP-Muon composed, and its log directory."""
    root = tmp_path_factory.mktemp("run")
    main(
        [
            *("fit", "--config", DIGITS, "--config", MUON),
            *("--privacy.expected_batch_size", "100", "--privacy.max_physical_batch_size", "40"),
            *("--privacy.accountant", "rdp", "--trainer.max_epochs", "2", "--trainer.log_every_n_steps", "1"),
            *("--data.init_args.val_fraction", "0.1", "--trainer.default_root_dir", str(root)),
            *("--trainer.accelerator", "cpu", "--trainer.enable_model_summary", "false"),
        ]
    )
    (folder,) = (root / "lightning_logs").iterdir()
    return folder


def test_the_configuration_of_a_resumed_run_names_no_earlier_checkpoint(finished, tmp_path):
    """With it, another command with this configuration would take the earlier weights, and a new fit would resume."""
    (checkpoint,) = (finished / "checkpoints").glob("*.ckpt")
    settings = ["--trainer.default_root_dir", str(tmp_path), "--trainer.max_epochs", "3"]
    settings += ["--privacy.target_epsilon", "4"]
    main(["fit", "--config", str(finished / "config.yaml"), "--ckpt_path", str(checkpoint), *settings])
    (run,) = (tmp_path / "lightning_logs").iterdir()
    assert json.loads((run / "result.json").read_text())["num_steps"] == 3 * 13
    assert yaml.safe_load((run / "config.yaml").read_text())["ckpt_path"] is None


def test_a_run_leaves_everything_behind(finished):
    result = json.loads((finished / "result.json").read_text())
    statement = json.loads((finished / "privacy_statement.json").read_text())
    assert result["num_steps"] == statement["num_steps"] == 2 * 13
    assert statement["num_train"] == 1437 - 144
    assert 0 < result["epsilon"] == statement["epsilon"]["rdp"] <= 3.0
    assert {"test_accuracy_last", "test_accuracy_best", "seconds", "val_accuracy_last"} <= set(result)
    assert statement["postprocessing"] == "Momentum, then Orthogonalize, then Momentum, then Scale"
    assert statement["unprotected"] == ["unprotected/train_loss"]
    assert "epsilon" in (finished / "privacy_statement.md").read_text().lower()
    assert list(finished.glob("events.out.tfevents.*"))
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config["privacy"]["expected_batch_size"] == 100
    (checkpoint,) = (finished / "checkpoints").glob("*.ckpt")
    saved = torch.load(checkpoint, weights_only=True)
    assert saved["global_step"] == result["num_steps"]


def test_the_curves_are_in_tensorboard(finished):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(finished))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"test/accuracy", "test/loss", "val/accuracy", "unprotected/train_loss", "privacy/epsilon"} <= tags
    assert "hp_metric" not in tags
    statement = json.loads((finished / "privacy_statement.json").read_text())
    spent = {event.step: event.value for event in events.Scalars("privacy/epsilon")}
    # From nothing to all of it, at every step where there are few.
    assert list(spent) == list(range(statement["num_steps"] + 1))
    (sigma, q, _), *_ = statement["ledger"]
    epsilons = [compose([(sigma, q, step)] if step else [], delta=1e-4, accountant="rdp") for step in spent]
    assert list(spent.values()) == pytest.approx(epsilons, rel=1e-6)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_an_evaluation_leaves_no_run_folder(finished, tmp_path, monkeypatch, command, capsys):
    monkeypatch.chdir(tmp_path)
    (checkpoint,) = (finished / "checkpoints").glob("*.ckpt")
    config = yaml.safe_load((finished / "config.yaml").read_text())
    config["trainer"]["default_root_dir"] = None
    Path("run.yaml").write_text(yaml.safe_dump(config))
    main([command, "--config", "run.yaml", "--ckpt_path", str(checkpoint)])
    left = {path.name for path in tmp_path.rglob("*")}
    assert left == {"run.yaml"} | ({"predictions.csv"} if command == "predict" else set())
    assert command != "predict" or f"Predictions are in {tmp_path / 'predictions.csv'}." in capsys.readouterr().out


def test_an_evaluation_logs_where_it_is_told_to(finished, tmp_path):
    (checkpoint,) = (finished / "checkpoints").glob("*.ckpt")
    settings = ["--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path)]
    main(["test", "--config", str(finished / "config.yaml"), "--ckpt_path", str(checkpoint), *settings])
    (metrics,) = tmp_path.rglob("metrics.csv")
    assert "test/accuracy" in metrics.read_text()


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
    assert f"{tmp_path} has the configuration of an earlier run" in " ".join(capsys.readouterr().err.split())
    accuracy = json.loads((tmp_path / "result.json").read_text())["test_accuracy_last"]
    checkpoint = next(tmp_path.rglob("*.ckpt"))
    settings = ["--config", str(tmp_path / "config.yaml"), "--trainer.default_root_dir", str(tmp_path / "test")]
    other = ["--model.init_args.scale_norm", "true"]
    with pytest.warns(UserWarning, match="scale_norm is True, and False in the checkpoint: .* which is taken") as told:
        main(["test", *settings, "--ckpt_path", str(checkpoint), *other])
    # Of the settings that come from the data nothing is said.
    assert sum("in the checkpoint" in str(warning.message) for warning in told) == 1
    shown = re.search(r"test/accuracy[^\d]+([\d.]+)", capsys.readouterr().out)
    assert float(shown[1]) == pytest.approx(accuracy)


def test_a_folder_of_images_is_predicted_from_a_checkpoint(finished, tmp_path, capsys):
    (checkpoint,) = (finished / "checkpoints").glob("*.ckpt")
    data = Digits()
    data.setup("test")
    pixels = data.test_dataset.source.images
    for index in range(12):
        path = tmp_path / "photos" / ("inner" if index % 2 else ".") / f"{index:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[index, 0].numpy()).save(path)
    settings = [
        *("predict", "--config", str(finished / "config.yaml"), "--ckpt_path", str(checkpoint)),
        *("--trainer.logger", "false", "--data", "ImageFiles"),
    ]
    main([*settings, "--data.root", str(tmp_path / "photos"), "--trainer.default_root_dir", str(tmp_path / "out")])
    rows = {Path(row["file"]).name: row for row in csv.DictReader((tmp_path / "out" / "predictions.csv").open())}
    assert len(rows) == 12
    main([*settings[:-2], "--trainer.default_root_dir", str(tmp_path / "own")])
    own = list(csv.DictReader((tmp_path / "own" / "predictions.csv").open()))
    for index in range(12):
        found = rows[f"{index:02d}.png"]
        assert [float(found[f"p{k}"]) for k in range(10)] == pytest.approx(
            [float(own[index][f"p{k}"]) for k in range(10)], abs=1e-5
        )
    capsys.readouterr()
    (tmp_path / "empty").mkdir()
    for name, message in (("nothing", "does not exist or holds"), ("empty", "does not exist or holds")):
        with pytest.raises(SystemExit):
            main([*settings, "--data.root", str(tmp_path / name), "--trainer.default_root_dir", str(tmp_path / "x")])
        assert f"{name} {message} no image files; set data.init_args.root" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_a_finished_run_is_evaluated_from_its_own_configuration(finished, command, tmp_path, capsys):
    (checkpoint,) = (finished / "checkpoints").glob("*.ckpt")
    main(
        [
            *(command, "--config", str(finished / "config.yaml"), "--ckpt_path", str(checkpoint)),
            *("--trainer.default_root_dir", str(tmp_path), "--trainer.logger", "false"),
        ]
    )
    if command == "test":
        result = json.loads((finished / "result.json").read_text())
        shown = re.search(r"test/accuracy[^\d]+([\d.]+)", capsys.readouterr().out)
        assert float(shown[1]) == pytest.approx(result["test_accuracy_last"])
    if command == "predict":
        rows = list(csv.DictReader((tmp_path / "predictions.csv").open()))
        assert len(rows) == 360
        assert sum(float(rows[0][f"p{k}"]) for k in range(10)) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("command", ["validate", "test", "predict"])
def test_evaluation_without_a_checkpoint_says_so(command, tmp_path):
    with pytest.warns(UserWarning, match=f"dpl {command}` without --ckpt_path.*never trained"):
        main([command, "--config", DIGITS, "--trainer.default_root_dir", str(tmp_path)])


def test_files_are_not_predicted_without_a_checkpoint(tmp_path, capsys, recwarn):
    with pytest.raises(SystemExit, match="2"):
        main(["predict", "--config", DIGITS, "--data=ImageFiles", f"--data.root={tmp_path}"])
    assert capsys.readouterr().err.endswith(
        "dpl predict: error: `dpl predict` has no checkpoint: give --ckpt_path CHECKPOINT, from which the network and "
        "the settings of its images come.\n"
    )
    assert not [warning for warning in recwarn if "never trained" in str(warning.message)]


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_a_checkpoint_of_other_classes_is_refused_in_one_line(finished, command, tmp_path, capsys):
    for split in ("train", "test"):
        for name in ("a", "b"):
            (tmp_path / split / name).mkdir(parents=True)
            Image.new("RGB", (9, 9)).save(tmp_path / split / name / "1.png")
    (checkpoint,) = (finished / "checkpoints").glob("*.ckpt")
    data = ["--data=ImageFolder", f"--data.root={tmp_path}", "--data.image_size=8", "--privacy.expected_batch_size=1"]
    steps = [f"--trainer.default_root_dir={tmp_path}", "--trainer.max_epochs=90", "--trainer.accelerator=cpu"]
    with pytest.raises(SystemExit, match="2"):
        main([command, "--config", DIGITS, *data, *steps, "--data.mean=[0.3]", f"--ckpt_path={checkpoint}"])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "error:" in line]
    assert "model.classifier.bias has shape (10) in the checkpoint and (2) here" in line
    assert line.endswith(
        "The checkpoint has 10 classes, and the data has 2. Take the configuration that the checkpoint's run saved."
    )


@pytest.mark.parametrize("name", ["best", "last", "hpc"])
def test_evaluation_never_guesses_a_checkpoint(name, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["test", "--config", DIGITS, "--ckpt_path", name, "--trainer.default_root_dir", str(tmp_path)])
    assert f"ckpt_path {name} is not a file" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["fit", "test"])
def test_weights_alone_are_no_checkpoint(command, tmp_path, capsys):
    torch.save({"layer.weight": torch.zeros(2)}, tmp_path / "weights.pth")
    with pytest.raises(SystemExit):
        main([command, "--config", DIGITS, "--ckpt_path", str(tmp_path / "weights.pth")])
    assert "weights.pth is not a checkpoint of a run" in capsys.readouterr().err
