"""A run on a GPU from its start to its evaluation; the same on the CPU says that the test itself is right."""

import json
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch

from dp_lightning.cli import main

DIGITS = Path(__file__).parents[2] / "configs" / "digits.yaml"
STEPS, CUT = 9, 4  # of 3 in an epoch


class StopsEarly(pl.Callback):
    """In the middle of an epoch."""

    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == CUT


def fit(device, precision, folder, *more):
    settings = {
        "trainer.accelerator": device,
        "trainer.precision": precision,
        "trainer.max_epochs": -1,
        "trainer.max_steps": STEPS,
        "trainer.min_steps": CUT,
        "trainer.enable_progress_bar": "false",
        "trainer.default_root_dir": folder,
        "privacy.max_physical_batch_size": 200,
        "model.init_args.channels": 4,
        "privacy.accountant": "rdp",
        "privacy.target_epsilon": "null",
        "privacy.noise_multiplier": 2.0,
        "privacy.reproducible": "true",
    }
    main(["fit", "--config", str(DIGITS), *(f"--{name}={value}" for name, value in settings.items()), *more])
    run = max(folder.glob("lightning_logs/version_*"), key=lambda path: path.stat().st_mtime)
    return run, max(run.rglob("*.ckpt"), key=lambda path: path.stat().st_mtime)


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        ("cpu", "32-true"),
        pytest.param("gpu", "32-true", marks=pytest.mark.gpu),
        pytest.param("gpu", "bf16-mixed", marks=pytest.mark.gpu),
    ],
)
def test_a_run_is_stopped_resumed_and_evaluated(device, precision, tmp_path, capsys):
    _, whole = fit(device, precision, tmp_path / "whole")
    _, cut = fit(device, precision, tmp_path / "cut", f"--trainer.callbacks+={__name__}.StopsEarly")
    assert torch.load(cut, weights_only=True)["global_step"] == CUT
    run, resumed = fit(device, precision, tmp_path / "cut", f"--ckpt_path={cut}")
    weights, others = (
        torch.load(path, weights_only=True, map_location="cpu")["state_dict"] for path in (whole, resumed)
    )
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, rtol=1e-4, atol=1e-4, msg=name)
    statement = json.loads((run / "privacy_statement.json").read_text())
    assert statement["num_steps"] == statement["num_steps_planned"] == STEPS
    assert statement["epsilon"]["rdp"] > 0
    assert not statement["faults"]
    capsys.readouterr()
    main(["test", "--config", str(run / "config.yaml"), f"--ckpt_path={resumed}"])
    assert "test/accuracy" in capsys.readouterr().out
