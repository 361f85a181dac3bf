"""``dpl sweep --release-best``: what is drawn, what is told, and what may be released."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from torch import nn

from dp_lightning.cli import main
from dp_lightning.commands import private_choice
from dp_lightning.commands.run_page import run_page
from dp_lightning.commands.verify import verify
from dp_lightning.experiments.launchers import LAUNCHERS
from dp_lightning.privacy.accounting import compose
from dp_lightning.privacy.choice import epsilon_of_choice
from dp_lightning.privacy.record import RunRecord, note_earlier_training
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.private_run.resume import RunHistory, SavedRun

SETTINGS = {
    "privacy.accountant": "rdp",
    "trainer.accelerator": "cpu",
    "trainer.max_epochs": 2,
    "data.init_args.val_fraction": 0.1,
}


@pytest.fixture(scope="module")
def chosen(tmp_path_factory):
    """The folder of a choice among five runs, one of which fails, and what was printed."""
    folder = tmp_path_factory.mktemp("choice")
    axes = {"epsilon": {"setting": "privacy.target_epsilon", "values": [2.0, 3.0]}}
    grid = {"title": "Small", "base": "digits", "settings": SETTINGS, "axes": axes}
    (folder / "grid.yaml").write_text(yaml.safe_dump(grid))
    begun: list[str] = []

    def launch(folders, options):
        for place in folders:
            begun.append(place)
            if len(begun) == 3:  # the machine goes down
                Path(place, "left_behind").touch()
                raise KeyboardInterrupt
            if len(begun) != 5:
                main(["fit", "--config", f"{place}/run.yaml"])
            yield place, 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(private_choice, "draw_number", lambda expected, number, generator: 5)
        patch.setitem(LAUNCHERS, "local", launch)
        command = ["sweep", str(folder / "grid.yaml"), "--out", str(folder / "out"), "--release-best"]
        with pytest.raises((KeyboardInterrupt, SystemExit)):
            main([*command, "--expected-runs", "4"])
        key = (folder / "out" / "choice.key").read_bytes()
        main([*command, "--expected-runs", "4"])
    return folder / "out", begun, key


def statements(out):
    return {
        path.parents[3]: PrivacyStatement.from_dict(json.loads(path.read_text()))
        for path in out.rglob("privacy_statement.json")
    }


def test_one_run_is_released_with_the_price_of_the_choice(chosen):
    out, begun, _ = chosen
    assert len(set(begun)) == 5, "the runs go on after an interruption, and no others begin"
    assert not list(out.rglob("left_behind")), "what an interrupted run had done is gone"
    told = statements(out)
    released = {path: each for path, each in told.items() if each.release == "ok"}
    ((winner, statement),) = released.items()
    scores = {path: json.loads(next(path.rglob("result.json")).read_text())["val_accuracy_last"] for path in told}
    assert scores[winner] == max(scores.values())
    assert len(told) == 4
    assert all(private_choice.NOT_CHOSEN in each.release for path, each in told.items() if path != winner)
    (one, other) = statement.choice["runs"]
    assert {each.ledger.runs for each in told.values()} <= {tuple(map(tuple, one)), tuple(map(tuple, other))}
    price = epsilon_of_choice([one, other], expected_runs=4.0, delta=statement.plan.delta)
    assert statement.epsilon == {"prv": None, "rdp": price, "pld": None}
    assert price > 3.0
    before = ((1.0, 0.1, 200),)
    later = PrivacyStatement.from_dict({**statement.to_dict(), "earlier_runs": {"0" * 16: before}})
    assert later.epsilon["rdp"] > max(price, compose(before, delta=statement.plan.delta, accountant="rdp"))
    assert "best, by a score on other images, of a secret number" in statement.to_markdown()
    assert [each for each in verify(winner) if each[1] is not None] == []
    saved = torch.load(next(winner.rglob("*.ckpt")), weights_only=True)["private_run"]["statement"]
    assert saved["choice"]["expected_runs"] == 4.0


def test_what_else_is_said_of_the_runs_follows_the_choice(chosen, capsys, tmp_path):
    out, _, _ = chosen
    told = statements(out)
    winner = next(path for path, each in told.items() if each.release == "ok")
    price = f"{told[winner].epsilon['rdp']:.4f}"
    with pytest.raises(SystemExit, match="2"):
        main(["account", str(winner)])
    assert f"chosen among several, which costs epsilon {price}" in capsys.readouterr().err
    for path in told:
        page = run_page(next(path.rglob("privacy_statement.json")).parent)[0].markdown()
        assert ("Epsilon covers the choice" in page) == ("Publish the weights" in page) == (path == winner)
    main(["export", "--ckpt-path", str(next(winner.rglob("*.ckpt"))), "--out", str(tmp_path / "export")])
    record, history = RunRecord(), RunHistory()
    note_earlier_training(nn.Linear(1, 1), record, files=[str(tmp_path / "export" / "model.safetensors")])
    history.load(SavedRun.read(torch.load(next(winner.rglob("*.ckpt")), weights_only=True)), winner)
    for later in (record, history.record):
        assert any("the price of the choice is not counted" in fault for fault in later.faults)
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", str(out.parent / "grid.yaml"), "--out", str(out), "--release-best"])
    assert "spends its epsilon again: give another --out" in capsys.readouterr().err


def test_runs_that_hold_out_other_images_are_refused(chosen, tmp_path, capsys):
    out, _, _ = chosen
    grid = yaml.safe_load((out.parent / "grid.yaml").read_text())
    grid["axes"] = {"split": {"setting": "data.init_args.split_seed", "values": [1, 2]}}
    (tmp_path / "grid.yaml").write_text(yaml.safe_dump(grid))
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", str(tmp_path / "grid.yaml"), "--out", str(tmp_path / "out"), "--release-best"])
    assert "different settings of data" in capsys.readouterr().err


def test_a_dry_run_prints_the_price_and_draws_nothing(chosen, capsys):
    out, _, _ = chosen
    main(["sweep", str(out.parent / "grid.yaml"), "--out", str(out.parent / "dry"), "--release-best", "--dry-run"])
    assert "What is released is (" in capsys.readouterr().out
    assert not (out.parent / "dry").exists()


def test_the_number_of_runs_and_the_key_are_told_nowhere(chosen, capsys):
    out, _, key = chosen
    assert not (out / "choice.key").exists()
    for path in out.rglob("*"):
        if path.is_file():
            assert key not in path.read_bytes()
            assert key.hex().encode() not in path.read_bytes()
    winner = next(path for path, each in statements(out).items() if each.release == "ok")
    text = next(winner.rglob("privacy_statement.md")).read_text()
    for word in ("of 5 runs", "5 runs", "five runs"):
        assert word not in text
    facts = json.loads(next(winner.rglob("privacy_statement.json")).read_text())["choice"]
    assert set(facts) == {"distribution", "expected_runs", "runs"}
