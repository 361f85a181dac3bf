"""`dpl account` solves for the fourth quantity, and the answer holds when it is put back in."""

import json

import pytest

from dp_lightning.cli import main
from dp_lightning.privacy import accounting
from dp_lightning.privacy.accounting import compose
from dp_lightning.privacy.plan import steps_of_epoch

DATA = ["--num-train", "1000", "--delta", "1e-5"]


def answer(capsys: pytest.CaptureFixture, options: str) -> dict:
    main(["account", *DATA, "--json", *options.split()])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    return json.loads(lines[0])


def refusal(capsys: pytest.CaptureFixture, options: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(["account", *DATA, *options.split()])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err


def spent(batch_size: int, steps: int, sigma: float, accountant: str = "prv") -> float:
    return compose([(sigma, batch_size / 1000, steps)], delta=1e-5, accountant=accountant)


def test_epsilon_of_a_run(capsys: pytest.CaptureFixture) -> None:
    result = answer(capsys, "--noise-multiplier 1 --steps 50 --batch-size 20")
    assert result == {
        "noise_multiplier": 1.0,
        "sample_rate": 0.02,
        "num_steps": 50,
        "bands": 1,
        "delta": 1e-5,
        "epsilon": {name: spent(20, 50, 1.0, name) for name in ("prv", "rdp", "pld")},
        "expected_batch_size": 20,
        "num_train": 1000,
    }


def test_noise_for_a_budget_and_epochs(capsys: pytest.CaptureFixture) -> None:
    result = answer(capsys, "--epsilon 2 --epochs 3 --batch-size 70")
    assert result["num_steps"] == 3 * 14  # round(1000 / 70) in each epoch
    assert result["epsilon"]["prv"] <= 2 < spent(70, result["num_steps"], result["noise_multiplier"] * 0.999)


@pytest.mark.parametrize(("epochs", "steps"), [("2.5", 35), ("0.01", 1), ("7/2", 49), ("2.3", 33)])
def test_epochs_may_be_fractions(capsys: pytest.CaptureFixture, epochs: str, steps: int) -> None:
    """Of 14 steps each; a step that is begun counts."""
    assert answer(capsys, f"--noise-multiplier 1 --epochs {epochs} --batch-size 70")["num_steps"] == steps
    answer(capsys, f"--noise-multiplier 1 --epochs {epochs} --epsilon 2 --accountant rdp")  # the batch size is found


def test_most_steps_within_a_budget(capsys: pytest.CaptureFixture) -> None:
    steps = answer(capsys, "--epsilon 2 --noise-multiplier 1 --batch-size 20 --accountant rdp")["num_steps"]
    assert spent(20, steps, 1.0, "rdp") <= 2 < spent(20, steps + 1, 1.0, "rdp")


@pytest.mark.parametrize("length", ["--steps 50", "--epochs 3"])
def test_a_batch_within_a_budget_whose_successor_is_not(capsys: pytest.CaptureFixture, length: str) -> None:
    size = answer(capsys, f"--epsilon 2 --noise-multiplier 1 {length}")["expected_batch_size"]
    now, beyond = (3 * steps_of_epoch(1000, each) if "epochs" in length else 50 for each in (size, size + 1))
    assert spent(size, now, 1.0) <= 2 < spent(size + 1, beyond, 1.0)


def test_without_dp_accounting_pld_is_null(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accounting, "pld_installed", lambda: False)
    run = "--noise-multiplier 1 --steps 5 --batch-size 20"
    assert answer(capsys, run)["epsilon"]["pld"] is None
    assert "pip install 'dp-lightning[pld]'" in refusal(capsys, run + " --accountant pld")


def test_no_noise_is_written_as_inf(capsys: pytest.CaptureFixture) -> None:
    assert answer(capsys, "--noise-multiplier 0 --steps 5 --batch-size 20")["epsilon"]["prv"] == "inf"


def test_without_a_folder_the_numbers_of_a_plan_are_asked_for(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["account", "--epsilon", "3"])
    assert "Give --num-train and --delta, or folders of runs" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ("--epsilon 2", "give exactly three of --epsilon, --noise-multiplier, --steps or --epochs, --batch-size"),
        ("--noise-multiplier 1 --steps 5 --epochs 5 --batch-size 20", "not allowed with"),
        ("--noise-multiplier 1 --steps 0 --batch-size 20", "steps"),
        ("--noise-multiplier 1 --epochs nan --batch-size 20", "invalid Fraction value: 'nan'"),
        ("--noise-multiplier 1 --epochs 0.0 --batch-size 20", "leave no step"),
        ("--noise-multiplier 1 --steps 5 --batch-size 2000", "expected_batch_size"),
        ("--noise-multiplier 1 --steps 5 --batch-size 20 --delta 0.5", "delta must be below 1/num_train"),
        ("--epsilon 0.1 --noise-multiplier 0.1 --batch-size 500", "--steps or --epochs: 1 already spends more"),
        ("--epsilon 0.1 --noise-multiplier 0.1 --steps 500 --accountant rdp", "--batch-size: 1 already spends more"),
    ],
)
def test_errors_go_to_stderr_with_status_2(capsys: pytest.CaptureFixture, options: str, named: str) -> None:
    assert named in refusal(capsys, options)
