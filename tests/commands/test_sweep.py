"""``dpl sweep`` and ``dpl report`` on small grids of real runs, and every shipped grid without a run."""

import json
import re
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from dp_lightning.cli import main
from dp_lightning.commands import sweep
from dp_lightning.commands.fit_settings import SettingsReader
from dp_lightning.experiments import runs
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.results import published
from dp_lightning.privacy.plan import RunShape

SWEEPS = sorted((Path(__file__).parents[2] / "configs" / "grids").glob("*.yaml"))
QUICK = {
    "privacy.accountant": "rdp",
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": False,
    "trainer.max_epochs": 2,
}


def grid_file(folder, seeds=(42, 43), sizes=(256, 512), methods=("DP-SGD", "DP-Muon"), **settings):
    path = folder / "small.yaml"
    points = {"DP-SGD": {}, "DP-Muon": {"config": "dp_muon"}, "wrong": {"settings": {"optimizer.init_args.lr": -1.0}}}
    axes = {
        "method": {name: points[name] for name in methods},
        "batch_size": {"setting": "privacy.expected_batch_size", "values": list(sizes)},
        "seed": {"setting": "seed_everything", "values": list(seeds)},
    }
    grid = {"title": "Small", "base": "digits", "settings": {**QUICK, **settings}, "axes": axes}
    path.write_text(yaml.safe_dump(grid, sort_keys=False))
    return path


@pytest.fixture
def untimed(monkeypatch):
    """Runs are priced without steps that are timed."""
    monkeypatch.setattr("dp_lightning.commands.pricing.seconds_per_example", lambda settings: 1e-3)


def tuned_grid(folder):
    path = grid_file(folder, sizes=[256])
    content = yaml.safe_load(path.read_text())
    content["axes"]["lr"] = {"setting": "optimizer.init_args.lr", "values": [0.1, 0.3]}
    path.write_text(yaml.safe_dump({**content, "tuned": "lr"}, sort_keys=False))
    return path


def finishing(launched, validation):
    """A launcher whose runs are finished at once, with this validation accuracy for a method, a rate and a seed."""

    def launch(folders, options):
        launched.append([])
        for folder in map(Path, folders):
            method, _, seed, rate = folder.name.rpartition("-")[0].split("_")
            launched[-1].append((method, rate, seed))
            accuracy = {"test_accuracy_last": 0.5, "test_accuracy_best": 0.5}
            accuracy["val_accuracy_last"] = validation(method, rate, seed)
            steps = {"completed": True, "num_steps": 5, "num_steps_planned": 5, "seconds": 1}
            (folder / "run").mkdir()
            (folder / "run" / "result.json").write_text(
                json.dumps({**accuracy, **steps, "epsilon": 3.0, "delta": 1e-4})
            )
            yield str(folder), 0

    return launch


@pytest.mark.usefixtures("untimed")
def test_other_seeds_wait_for_the_choice_of_the_tuned_point(tmp_path, monkeypatch, capsys):
    launched, best = [], {"DP-SGD": "0.1", "DP-Muon": "0.3"}
    # The second seed would choose the other rate.
    launch = finishing(launched, lambda method, rate, seed: (rate == best[method]) == (seed == "42"))
    monkeypatch.setitem(sweep.LAUNCHERS, "local", launch)
    arguments = [str(tuned_grid(tmp_path)), "--out", str(tmp_path / "out")]
    main(["sweep", *arguments, "--dry-run"])
    said = capsys.readouterr().out
    assert said.count("dpl fit") == 4
    assert "Then the other seeds run at the best lr of each place, which is not counted here." in said
    main(["sweep", *arguments])
    first, rest = launched
    assert sorted(first) == sorted((m, r, "42") for m in best for r in ("0.1", "0.3"))
    assert sorted(rest) == sorted((m, r, "43") for m, r in best.items())
    assert "All runs are finished" in capsys.readouterr().out
    main(["sweep", *arguments])
    assert len(launched) == 2
    main(["report", *arguments])
    assert "6 of 6 runs are finished" in next((tmp_path / "out").rglob("report.md")).read_text()


def test_a_choice_needs_validation_accuracy(tmp_path, monkeypatch, capsys):
    launched = []
    monkeypatch.setitem(sweep.LAUNCHERS, "local", finishing(launched, lambda *run: None))
    with pytest.raises(SystemExit):
        main(["sweep", str(tuned_grid(tmp_path)), "--out", str(tmp_path / "out")])
    assert len(launched) == 1
    assert "some runs have none. Keep some training images" in capsys.readouterr().err


@pytest.mark.slow  # three real runs
def test_a_sweep_that_is_stopped_resumes_and_is_reported_with_a_run_that_fails(
    tmp_path, capsys, warm_python, monkeypatch
):
    out = tmp_path / "out"
    settings = {"trainer.max_epochs": 10}
    grid = grid_file(tmp_path, seeds=[42], sizes=[512], methods=["DP-SGD", "wrong"], **settings)
    command = (str(warm_python), "-m", "dp_lightning")
    process = subprocess.Popen(
        [*command, "sweep", str(grid), "--out", str(out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    while not list(out.rglob("epoch=*.ckpt")):
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.02)
    process.terminate()
    assert process.wait(60) == 143
    (stopped,) = out.rglob("interrupted-step=*.ckpt")
    monkeypatch.setattr(runs, "_DPL", command)
    with pytest.raises(SystemExit, match="1"):
        main(["sweep", str(grid), "--out", str(out)])
    (log,) = out.glob("DP-SGD_512_42-*/log.txt")
    assert f"Restored all states from the checkpoint at {stopped}" in log.read_text()
    taken = [json.loads(path.read_text())["num_steps"] for path in out.rglob("result.json")]
    assert max(taken) == 10 * 3 > int(stopped.stem.split("=")[1])
    said = capsys.readouterr()
    (log,) = out.glob("wrong_512_42-*/log.txt")
    assert "Invalid learning rate: -1.0" in log.read_text()
    assert "wrong_512_42 FAILED with status" in said.out
    assert f"1 runs failed; their logs say why. The same command resumes them:\n  wrong_512_42: {log}" in said.err
    (spent,) = re.findall(r"1 run on the same data together: \(.*, 0.0001\)-DP .* 30 steps", said.out)
    main(["report", str(grid), "--out", str(out)])
    page = (out / "report" / "small" / "report.md").read_text()
    assert "1 of 2 runs are finished" in page
    assert spent in page
    assert page in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "other", "message"),
    [
        ("privacy.target_epsilom=3", {"config": "dp_muon"}, "run DP-SGD_256_42"),
        ("trainer.max_epochs=3", {}, "DP-SGD_256_42 and other_256_42 have the same settings"),
        ("trainer.max_epochs=3", {"config": "dp_moun"}, "dp_muon"),
    ],
)
def test_what_is_no_run_of_a_grid_is_refused(tmp_path, capsys, override, other, message):
    grid = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"])
    content = yaml.safe_load(grid.read_text())
    content["axes"]["method"]["other"] = other
    grid.write_text(yaml.safe_dump(content, sort_keys=False))
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", str(grid), "--dry-run", "--override", override])
    assert message in capsys.readouterr().err


def test_a_dry_run_prints_commands_and_prices_and_writes_nothing(tmp_path, capsys, monkeypatch):
    grid, out = grid_file(tmp_path, seeds=[42], methods=["DP-Muon"]), tmp_path / "out"
    monkeypatch.setattr("dp_lightning.commands.pricing.seconds_per_example", lambda settings: 0.04)
    main(["sweep", str(grid), "--out", str(out), "--dry-run", "--override", "trainer.max_epochs=4"])
    said = capsys.readouterr().out
    assert not out.exists()
    assert said.count("dpl fit --config digits --config dp_muon --privacy.accountant=rdp") == 2
    assert said.count("--trainer.max_epochs=4") == 2
    shape = RunShape(delta=1e-4, num_train=1437, expected_batch_size=256, num_steps=4 * 6)
    sigma = shape.calibrate(3.0, accountant="rdp").noise_multiplier
    seconds = f"about {24 * 256 * 0.04 / 60:.0f} min here"
    assert f"epsilon 3.000, delta 0.0001, sigma {sigma:.4g}, 24 steps, {seconds}" in said
    assert "Each epsilon covers one run alone." in said
    # What fit refuses has no price, and a step that cannot be timed has an epsilon.
    main(["sweep", str(grid), "--dry-run", "--override", "trainer.gradient_clip_val=1.0"])
    assert capsys.readouterr().out.count("no price: trainer.gradient_clip_val") == 2
    monkeypatch.setattr("dp_lightning.commands.pricing.seconds_per_example", lambda settings: None)
    main(["sweep", str(grid), "--dry-run"])
    assert "12 steps, time unknown" in capsys.readouterr().out


def test_the_settings_of_every_grid_parse():
    """Those of all points of the first axis, and of all that bring files; the others differ in numbers alone."""
    read = SettingsReader()
    for path in SWEEPS:
        grid, seen = Grid.load(path), set()
        assert grid.published is None or grid.published in published()["accuracy"]
        for cell in grid.cells():
            settings = [each for each in cell.arguments if each.startswith("--") and "=" in each]
            kind = (*(each.partition("=")[0] for each in settings), *set(cell.arguments) - set(settings))
            if kind not in seen:
                seen.add(kind)
                composed = read(cell.arguments)
                # The images by which a tuned axis is chosen.
                assert grid.tuned is None or "'val_fraction': 0.1" in str(composed["data"])
