"""What a run prints: its plan before the first step, and its statement at the end, each once."""

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, loader, privacy, trainer, without_noise

from dp_lightning.callbacks import AveragedWeights, PostProcessCallback
from dp_lightning.postprocess import Momentum


def fit(tmp_path, private, *callbacks, module=None, checkpoint=None, **settings):
    run = trainer(tmp_path, private, *callbacks, **settings)
    run.fit(module or Plain(), loader(), ckpt_path=checkpoint)


def test_the_plan_comes_first_and_the_statement_last(tmp_path, capsys):
    private = privacy(target_epsilon=8.0, noise_multiplier=None)
    fit(tmp_path, private, PostProcessCallback([Momentum(0.9)]), AveragedWeights(0.9))
    rows = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line)
    assert list(rows) == [
        *("method", "plan", "epochs", "device"),
        *("(8,", "Unprotected", "Release:", "Results:"),
    ]
    average = "moving average of the weights (decay 0.9)"
    assert rows["method"] == f"DP-SGD by SGD; Momentum; {average}; flat clipping (abadi)"
    sigma = private.plan.noise_multiplier
    plan = f"epsilon 8 at delta 0.001 by RDP, N 60 examples, B 20, sigma {sigma:.4g}, C 1, T 9 steps"
    assert (rows["plan"], rows["epochs"]) == (plan, "3")
    assert rows["device"] == "1 x cpu, precision 32-true"
    assert rows["Results:"] == str(tmp_path / "privacy_runs" / "version_0")
    assert rows["(8,"] == "0.001)-DP by RDP, add or remove one training example, 9 of 9 steps"
    assert rows["Release:"] == "ok"


@pytest.mark.parametrize(
    ("private", "note"),
    [
        (lambda: privacy(reproducible=True), "This run is NOT FOR RELEASE: it is reproducible."),
        (without_noise, "No noise is added: this run is NOT PRIVATE."),
    ],
)
def test_what_makes_a_run_unfit_for_release_is_said_before_and_after(tmp_path, capsys, private, note):
    fit(tmp_path, private(), max_steps=1)
    before, _, after = capsys.readouterr().out.partition("\n\n")
    assert f"note         {note}" in before.splitlines()
    assert "Release: not for release: " in after
    assert ("epsilon inf" in before) == ("PRIVATE" in note)


def test_steps_that_were_taken_before_are_named(tmp_path, capsys):
    module = Plain()
    fit(tmp_path, privacy(), module=module, max_steps=2)
    first = privacy()
    saved = ModelCheckpoint(tmp_path, filename="saved")
    fit(tmp_path, first, saved, module=module, max_epochs=1, enable_checkpointing=True)
    assert ": 2 private steps, which count here." in capsys.readouterr().out
    fit(tmp_path, privacy(), checkpoint=tmp_path / "saved.ckpt")
    assert "note         3 of the steps are taken, with epsilon " in capsys.readouterr().out
