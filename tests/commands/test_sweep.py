"""``dpl sweep`` and ``dpl report`` on small grids of real runs, and every shipped grid without a run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from dp_lightning.cli import main
from dp_lightning.commands import sweep
from dp_lightning.experiments import runs as runs_module
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.results import is_first
from dp_lightning.privacy.plan import PrivacyPlan, RunShape

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
    report = {"figures": ["accuracy", "deviation", "curves", "snr"]}
    grid = {"title": "Small", "base": "digits", "settings": {**QUICK, **settings}, "axes": axes, "report": report}
    path.write_text(yaml.safe_dump(grid, sort_keys=False))
    return path


def single(folder, **settings):
    """A grid of one run."""
    return grid_file(folder, seeds=[42], sizes=[256], methods=["DP-SGD"], **settings)


@pytest.fixture
def dpl(warm_python, monkeypatch):
    """Starts ``dpl`` in a process of its own, as the runs of the sweeps of this process are started too."""
    command = (str(warm_python), "-m", "dp_lightning")
    monkeypatch.setattr(runs_module, "_DPL", command)
    return lambda *arguments: subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture
def untimed(monkeypatch):
    """Runs are priced without steps that are timed."""
    monkeypatch.setattr("dp_lightning.commands.pricing.seconds_per_example", lambda settings: 1e-3)


def results(out):
    return {path.relative_to(out).parts[0]: path for path in out.rglob("result.json")}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_runs_of_a_grid_in_order(tmp_path, monkeypatch, number, code):
    stopped = []

    def launch(folders, options):
        try:
            os.kill(os.getpid(), number)
            yield folders[0], 0
        finally:
            stopped.append(True)

    monkeypatch.setitem(sweep.LAUNCHERS, "local", launch)
    before = [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)]
    with pytest.raises(SystemExit) as exit_:
        main(["sweep", str(grid_file(tmp_path)), "--out", str(tmp_path / "out")])
    assert (exit_.value.code, stopped) == (code, [True])
    assert [signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)] == before


def tuned_grid(folder):
    path = grid_file(folder, sizes=[256], seeds=[42, 43, 44])
    content = yaml.safe_load(path.read_text())
    content["axes"]["lr"] = {"setting": "optimizer.init_args.lr", "values": [0.1, 0.3, 0.9]}
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
    launched, best = [], {"DP-SGD": "0.3", "DP-Muon": "0.9"}
    # Other seeds would choose another rate.
    launch = finishing(launched, lambda method, rate, seed: rate == (best[method] if seed == "42" else "0.1"))
    monkeypatch.setitem(sweep.LAUNCHERS, "local", launch)
    arguments = [str(tuned_grid(tmp_path)), "--out", str(tmp_path / "out")]
    main(["sweep", *arguments, "--dry-run"])
    said = capsys.readouterr().out
    assert said.count("dpl fit") == 6
    assert "Then the other seeds at the best lr of each place: 4 runs more." in said
    main(["sweep", *arguments])
    first, rest = launched
    assert sorted(first) == sorted((m, r, "42") for m in best for r in ("0.1", "0.3", "0.9"))
    assert sorted(rest) == sorted((m, r, seed) for m, r in best.items() for seed in ("43", "44"))
    assert "All runs are finished" in capsys.readouterr().out
    main(["sweep", *arguments])
    assert len(launched) == 2
    main(["report", *arguments])
    assert "10 of 10 runs are finished" in next((tmp_path / "out").rglob("report.md")).read_text()


def test_a_choice_needs_validation_accuracy(tmp_path, monkeypatch, capsys):
    launched = []
    monkeypatch.setitem(sweep.LAUNCHERS, "local", finishing(launched, lambda *run: None))
    with pytest.raises(SystemExit):
        main(["sweep", str(tuned_grid(tmp_path)), "--out", str(tmp_path / "out")])
    assert len(launched) == 1
    assert "the runs of DP-SGD 256 have none. Keep some training images" in capsys.readouterr().err


@pytest.mark.slow  # four real runs
def test_a_killed_grid_is_completed_without_repeating_a_finished_run_and_reported(tmp_path, capsys, dpl):
    out = tmp_path / "out"
    grid = grid_file(tmp_path, seeds=[42], sizes=[256, 512, 700], methods=["DP-SGD", "wrong"])
    process = dpl("sweep", grid, "--out", out, "--jobs", "2")
    while not results(out):
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {name: path.stat().st_mtime_ns for name, path in results(out).items()}
    with pytest.raises(SystemExit) as exit_:
        main(["sweep", str(grid), "--out", str(out), "--jobs", "2"])
    assert exit_.value.code == 1
    said = capsys.readouterr()
    assert "wrong_256_42 FAILED with status" in said.out
    assert "3 runs failed; their logs say why. The same command resumes them" in said.err
    (log,) = out.glob("wrong_256_42-*/log.txt")
    assert str(log) in said.err
    assert "Invalid learning rate: -1.0" in log.read_text()
    after = results(out)
    assert len(after) == 3
    assert all(after[name].stat().st_mtime_ns == when for name, when in finished.items())
    # Each start has a log folder of its own.
    assert {len(list(path.glob("run/lightning_logs/version_*"))) for path in out.glob("DP-SGD*")} == {1}
    spent = re.search(r"3 runs on the same data together: \((\d+\.\d+), 0.0001\)-DP", said.out)
    assert 3 < float(spent[1]) < 9  # not the sum
    main(["report", str(grid), "--out", str(out)])
    page = (out / "report" / "small" / "report.md").read_text()
    assert "3 of 6 runs are finished" in page
    assert spent[0] in page
    assert page in capsys.readouterr().out


# Jobs of SLURM and actors of Ray are processes of the real Python; only the runs in them are not.
EACH_LAUNCHER = """
import sys
dpl = (sys.executable, "-m", "dp_lightning")
sys.executable = {python!r}
from dp_lightning.cli import main
from dp_lightning.experiments import launchers, runs

class Job(launchers._SlurmJob):
    def to_its_end(self, folder):
        runs._DPL = dpl
        return super().to_its_end(folder)

class Run(launchers._RemoteRun):
    def to_its_end(self, folder):
        runs._DPL = dpl
        return super().to_its_end(folder)

launchers._SlurmJob, launchers._RemoteRun = Job, Run
for name, options in {launchers!r}.items():
    main(["sweep", {grid!r}, "--out", name, "--launcher", name, *options])
"""


@pytest.mark.slow  # real runs through each launcher, and a Ray of its own
def test_launchers_run_the_same_grid_to_the_same_results(tmp_path, warm_python):
    grid = single(tmp_path, **{"privacy.reproducible": True})
    launchers = {
        "local": [],
        "slurm": ["--launcher-option", "cluster=local", "--launcher-option", "timeout_min=10"],
        "ray": ["--launcher-option", "num_cpus=1"],
    }
    # In a process of its own: Ray redirects what it finds open.
    script = tmp_path / "each_launcher.py"
    script.write_text(EACH_LAUNCHER.format(python=sys.executable, launchers=launchers, grid=str(grid)))
    # Ray gives an actor as many threads as cores, and another number of threads sums in another order.
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(
        [warm_python, script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("All runs are finished") == 3
    found = {}
    for name in launchers:
        (result,) = (json.loads(path.read_text()) for path in results(tmp_path / name).values())
        found[name] = {key: value for key, value in result.items() if key != "seconds"}
    assert found["local"] == found["slurm"] == found["ray"]


@pytest.mark.slow  # a real run, stopped and started again
def test_a_sweep_that_is_stopped_leaves_checkpoints_and_resumes_from_them(tmp_path, dpl):
    grid, out = single(tmp_path, **{"trainer.max_epochs": 12}), tmp_path / "out"
    process = dpl("sweep", grid, "--out", out)
    while not list(out.rglob("epoch=*.ckpt")):
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.02)
    process.terminate()
    assert process.wait(60) == 143
    (stopped,) = out.rglob("interrupted-step=*.ckpt")
    taken = int(stopped.stem.split("=")[1])
    again = dpl("sweep", grid, "--out", out)
    said = again.communicate()[0].decode()
    assert again.returncode == 0, said
    (log,) = out.rglob("log.txt")
    assert f"Restored all states from the checkpoint at {stopped}" in log.read_text()
    steps = [json.loads(path.read_text())["num_steps"] for path in out.rglob("result.json")]
    assert max(steps) == 12 * 6 > taken


def test_the_same_grid_with_other_settings_has_a_page_of_its_own(tmp_path):
    grid, out = single(tmp_path), tmp_path / "out"
    other = ["--override", "trainer.max_epochs=1"]
    for options in ([], other):
        main(["report", str(grid), "--out", str(out), *options])
    plain, overridden = sorted((out / "report").iterdir())
    assert plain.name == "small"
    assert "trainer.max_epochs=1" in (overridden / "report.html").read_text()
    assert "trainer.max_epochs=1" not in (plain / "report.html").read_text()


def refusal(capsys, *arguments):
    with pytest.raises(SystemExit, match="2"):
        main(["sweep", *map(str, arguments)])
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_epochs", "--override trainer.max_epochs: give name=value"),
        ("privacy.target_epsilom=3", "run DP-SGD_256_42"),
        ("ckpt_path=last", "ckpt_path is set. Each run of a grid starts without a checkpoint"),
        ("privacy.expected_batch_size=64", "--override privacy.expected_batch_size: an axis of "),
        ("config={folder}/shared.yaml", "dirpath of a callback is set"),
    ],
)
def test_what_is_no_setting_of_a_run_is_refused(tmp_path, capsys, override, message):
    checkpoints = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "/shared"}}
    (tmp_path / "shared.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [checkpoints]}}))
    arguments = ["--dry-run", "--override", override.format(folder=tmp_path)]
    assert message in refusal(capsys, single(tmp_path), *arguments)


def test_two_runs_that_are_one_and_a_name_that_nothing_has_are_refused(tmp_path, capsys):
    grid = single(tmp_path)
    content = yaml.safe_load(grid.read_text())
    for other, message in (
        ({}, "DP-SGD_256_42 and other_256_42 have the same settings"),
        ({"config": "dp_moun"}, "dp_muon"),
    ):
        content["axes"]["method"]["other"] = other
        grid.write_text(yaml.safe_dump(content, sort_keys=False))
        assert message in refusal(capsys, grid, "--dry-run")


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
    main(["sweep", str(grid), "--dry-run", "--override", "privacy.reproducible=true"])
    said = capsys.readouterr().out
    assert "12 steps, time unknown" in said
    assert "not for release: privacy.reproducible is set" in said


def at_the_ends(cells):
    """``Grid.cells`` without the numbers between the first and the last one of an axis."""

    def some(grid):
        kept = {
            axis: {point.label for i, point in enumerate(points) if point.configs or i in (0, len(points) - 1)}
            for axis, points in grid.axes.items()
        }
        return (cell for cell in cells(grid) if all(label in kept[axis] for axis, label in cell.labels.items()))

    return some


@pytest.mark.usefixtures("untimed")
@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_grid_passes_a_dry_run(path, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(Grid, "cells", at_the_ends(Grid.cells))
    # Their noise is solved for in other tests, and their times are not of interest here.
    monkeypatch.setattr(
        "dp_lightning.private_run.settings._calibrated",
        lambda shape, target, **others: shape.with_noise(50.0, target_epsilon=target),
    )
    monkeypatch.setattr(PrivacyPlan, "epsilon", lambda plan, accountant=None: plan.target_epsilon or 168.0)
    grid, folder = Grid.load(path), []
    if "imagenet" in path.stem:
        folder = ["--override", f"data.init_args.root={tmp_path}"]
    if "data.init_args.path" in grid.settings:
        images = np.zeros((20_000, 16, 16, 3), np.uint8)
        np.savez(tmp_path / "images.npz", train_images=images, train_labels=np.arange(len(images)) % 10)
        folder = ["--override", f"data.init_args.path={tmp_path / 'images.npz'}"]
    main(["sweep", str(path), "--dry-run", *folder])
    said = capsys.readouterr().out
    count = sum(is_first(grid, cell.labels) or grid.tuned is None for cell in grid.cells())
    assert said.count("\n  dpl fit --config ") == count
    # Without its files nobody knows how many examples a folder has.
    unpriced = count if "imagenet" in path.stem else 0
    assert said.count("  no price: ") == unpriced
    # The images by which a tuned axis is chosen.
    assert grid.tuned is None or said.count("val_fraction=0.1") == count
    given = said.count("noise_multiplier=")
    assert said.count("sigma 50, ") + given == said.count(" steps, about ") == count - unpriced
