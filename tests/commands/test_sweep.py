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
import torch
import yaml
from browser import look_at

from dp_lightning.cli import main
from dp_lightning.commands import sweep
from dp_lightning.commands.composition import Composer
from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments import worker
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.tuning import is_first
from dp_lightning.lightning_modules import ImageClassifier
from dp_lightning.privacy.plan import PrivacyPlan, RunShape

ROOT = Path(__file__).parents[2]
SWEEPS = sorted((ROOT / "configs" / "grids").glob("*.yaml"))
DIGITS = ROOT / "configs" / "digits.yaml"
MUON = ROOT / "configs" / "fragments" / "postprocess" / "dp_muon.yaml"
QUICK = {
    "privacy.accountant": "rdp",
    "trainer.accelerator": "cpu",
    "trainer.enable_progress_bar": False,
    "trainer.max_epochs": 2,
}


def grid_file(folder, seeds=(42, 43), sizes=(256, 512), methods=("DP-SGD", "DP-Muon"), **settings):
    path = folder / "small.yaml"
    points = {"DP-SGD": {}, "DP-Muon": {"config": str(MUON)}, "wrong": {"settings": {"optimizer.init_args.lr": -1.0}}}
    axes = {
        "method": {name: points[name] for name in methods},
        "batch_size": {"setting": "privacy.expected_batch_size", "values": list(sizes)},
        "seed": {"setting": "seed_everything", "values": list(seeds)},
    }
    report = {"figures": ["accuracy", "deviation", "curves", "snr"]}
    grid = {"title": "Small", "base": [str(DIGITS)], "settings": {**QUICK, **settings}, "axes": axes, "report": report}
    path.write_text(yaml.safe_dump(grid, sort_keys=False))
    return path


@pytest.fixture
def dpl(warm_python, monkeypatch):
    """Starts ``dpl`` in a process of its own, as the runs of the sweeps of this process are started too."""
    command = (str(warm_python), "-m", "dp_lightning")
    monkeypatch.setattr(worker, "_DPL", command)
    return lambda *arguments: subprocess.Popen(
        [*command, *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture
def untimed(monkeypatch):
    """Runs are priced without steps that are timed."""
    monkeypatch.setattr("dp_lightning.commands.pricing.seconds_per_example", lambda settings: 1e-3)


def results(out):
    return {path.relative_to(out).parts[0]: path for path in out.rglob("result.json")}


def starts(out):
    """How often each run has started: each start has a log folder of its own."""
    return {path.name: len(list(path.glob("run/lightning_logs/version_*"))) for path in out.glob("*-*")}


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


@pytest.mark.slow  # six real runs
def test_a_killed_grid_is_completed_without_repeating_a_finished_run_and_reported(tmp_path, capsys, dpl):
    grid, out = grid_file(tmp_path, sizes=[256, 512, 700], methods=["DP-SGD"]), tmp_path / "out"
    process = dpl("sweep", grid, "--out", out, "--jobs", "2")
    while len(results(out)) < 2:
        assert process.poll() is None, process.stdout.read().decode()
        time.sleep(0.1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    finished = {name: path.stat().st_mtime_ns for name, path in results(out).items()}
    main(["sweep", str(grid), "--out", str(out), "--jobs", "2"])
    said = capsys.readouterr().out
    assert "6 runs, " in said
    assert "All runs are finished" in said
    after = results(out)
    assert len(after) == 6
    assert all(after[name].stat().st_mtime_ns == when for name, when in finished.items())
    assert set(starts(out).values()) == {1}
    main(["report", str(grid), "--out", str(out)])
    said = capsys.readouterr().out
    assert "6 of 6 runs are finished" in said
    folder = out / "report" / "small"
    assert len(list(folder.glob("*.png"))) == len(list(folder.glob("*.svg"))) == 4
    assert (folder / "report.md").read_text() in said
    (seen,) = look_at(folder / "report.html")
    assert (seen.title, seen.console, seen.overflow) == ("Small", [], 0)
    assert len(seen.figures) == 4
    assert min(seen.figures) > 100
    assert seen.rows > 12


# Jobs of SLURM and actors of Ray are processes of the real Python; only the runs in them are not.
EACH_LAUNCHER = """
import sys
dpl = (sys.executable, "-m", "dp_lightning")
sys.executable = {python!r}
from dp_lightning.cli import main
from dp_lightning.experiments import worker
from dp_lightning.experiments.launchers import ray_cluster, slurm

class Job(slurm._Job):
    def __call__(self, folder):
        worker._DPL = dpl
        return super().__call__(folder)

class Run(ray_cluster._Run):
    def to_its_end(self, folder):
        worker._DPL = dpl
        return super().to_its_end(folder)

slurm._Job, ray_cluster._Run = Job, Run
for name, options in {launchers!r}.items():
    main(["sweep", {grid!r}, "--out", name, "--launcher", name, *options])
"""


@pytest.mark.slow  # real runs through each launcher, and a Ray of its own
def test_launchers_run_the_same_grid_to_the_same_results(tmp_path, warm_python):
    fixed = {"privacy.reproducible": True}
    grid = grid_file(tmp_path, seeds=[42], sizes=[256, 512], methods=["DP-SGD"], **fixed)
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
        loaded = {run: json.loads(path.read_text()) for run, path in results(tmp_path / name).items()}
        found[name] = {run: {k: v for k, v in result.items() if k != "seconds"} for run, result in loaded.items()}
        assert len(found[name]) == 2
    assert found["local"] == found["slurm"] == found["ray"]


@pytest.mark.slow  # real runs
@pytest.mark.usefixtures("dpl")
def test_a_run_that_fails_is_named_and_the_others_finish(tmp_path, capsys):
    grid, out = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["wrong", "DP-SGD"]), tmp_path / "out"
    with pytest.raises(SystemExit) as exit_:
        main(["sweep", str(grid), "--out", str(out)])
    assert exit_.value.code == 1
    said = capsys.readouterr()
    assert "wrong_256_42 FAILED with status" in said.out
    assert "1 runs failed; their logs say why. The same command resumes them" in said.err
    (log,) = out.glob("wrong_256_42-*/log.txt")
    assert str(log) in said.err
    assert "Invalid learning rate: -1.0" in log.read_text()
    assert [name.split("-")[0] for name in results(out)] == ["DP"]


@pytest.mark.slow  # a real run, stopped and started again
def test_a_sweep_that_is_stopped_leaves_checkpoints_and_goes_on_from_them(tmp_path, dpl):
    grid = grid_file(tmp_path, seeds=[42], sizes=[64], methods=["DP-SGD"], **{"trainer.max_epochs": 6})
    out = tmp_path / "out"
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
    assert max(steps) == 6 * 22 > taken


def test_whatever_interrupts_a_sweep_its_launcher_is_closed_at_once(tmp_path, monkeypatch):
    closed = []

    def launcher(folders, options):
        try:
            yield folders[0], 0
        finally:
            closed.append(folders[0])

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setitem(sweep.LAUNCHERS, "local", launcher)
    monkeypatch.setattr(sweep, "_outcome", interrupted)
    with pytest.raises(SystemExit) as exit_:
        main(["sweep", str(grid_file(tmp_path)), "--out", str(tmp_path / "out")])
    assert exit_.value.code == 130
    assert len(closed) == 1  # while the exception still holds on to the loop


def test_composition_is_that_of_the_command_line(tmp_path):
    compose = Composer()
    arguments = ["--config", str(DIGITS), "--config", str(MUON), "--privacy.expected_batch_size", "256"]
    settings = compose(arguments)
    assert settings["optimizer"]["init_args"]["lr"] == 0.02
    assert settings["privacy"]["expected_batch_size"] == 256
    assert [t["class_path"].split(".")[-1] for t in settings["postprocess"]["transforms"]][:2] == [
        "Momentum",
        "Orthogonalize",
    ]
    # What came before leaves no trace, and the whole configuration composes to itself.
    assert compose(["--config", str(DIGITS)]) == Composer()(["--config", str(DIGITS)])
    (tmp_path / "whole.yaml").write_text(yaml.safe_dump(settings))
    assert compose(["--config", str(tmp_path / "whole.yaml")]) == settings
    assert Composer()(arguments) == settings
    # Options that differ in the seed are read once; a file after it replaces it.
    (tmp_path / "seed.yaml").write_text("seed_everything: 5")
    of_a_file = ["--config", str(tmp_path / "seed.yaml")]
    of_a_line = (("3", [], 3), ("4", [], 4), ("true", [], True))
    for seed, after, found in (*of_a_line, ("3", of_a_file, 5), ("4", of_a_file, 5)):
        composed = compose([*arguments, f"--seed_everything={seed}", *after])
        assert composed.pop("seed_everything") is found
        assert composed == {name: value for name, value in settings.items() if name != "seed_everything"}
    with pytest.raises(ConfigurationError, match="seed_everything"):
        compose([*arguments, "--seed_everything=1.5"])


def test_options_that_differ_in_numbers_are_parsed_once(monkeypatch, tmp_path):
    compose, parsed = Composer(), []
    read = Composer._read
    monkeypatch.setattr(Composer, "_read", lambda self, arguments: parsed.append(1) or read(self, arguments))

    def settings(*options):
        line = ["--config", str(DIGITS), *options]
        parsed.clear()
        composed = compose(line)
        count = len(parsed)
        assert composed == Composer()(line)
        return count, composed

    rate, size = "--optimizer.init_args.lr", "--privacy.expected_batch_size"
    assert settings(f"{rate}=0.5", f"{size}=64")[0] == 1
    assert settings(f"{rate}=0.3", f"{size}=64")[0] == 1  # whether they take any number is tried once
    count, composed = settings(f"{rate}=0.25", f"{size}=128")
    assert count == 0
    assert composed["optimizer"]["init_args"]["lr"] == 0.25
    assert composed["privacy"]["expected_batch_size"] == 128
    # The same options with a whole number, which has the type of its setting in the end.
    assert [settings(f"{rate}={whole}", f"{size}=64")[0] for whole in (2, 4)] == [1, 1]
    count, composed = settings(f"{rate}=3", f"{size}=64")
    assert (count, repr(composed["optimizer"]["init_args"]["lr"])) == (0, "3.0")
    # What replaces a number is not replaced by it, though it is the same one.
    given = composed["privacy"]["expected_batch_size"]
    (tmp_path / "last.yaml").write_text(yaml.safe_dump({"privacy": {"expected_batch_size": given}}))
    for number in (0.5, 0.75):
        _, composed = settings(f"{rate}={number}", '--optimizer={"class_path": "SGD", "init_args": {"lr": 0.5}}')
        assert composed["optimizer"]["init_args"]["lr"] == 0.5
    for number in (given, given + 1):
        for after in ([f"{size}={given}"], [size, str(given)], [f"--config={tmp_path / 'last.yaml'}"]):
            assert settings(f"{size}={number}", *after)[1]["privacy"]["expected_batch_size"] == given
    # A choice of numbers takes no other one.
    precision = "--trainer.precision"
    for number, parses in ((32, 1), (16, 2)):
        count, composed = settings(f"{precision}={number}")
        assert (count, composed["trainer"]["precision"]) == (parses, number)
    with pytest.raises(ConfigurationError, match="precision"):
        compose(["--config", str(DIGITS), f"{precision}=99"])
    # To a setting that is a text, they are no numbers.
    assert settings("--trainer.default_root_dir=1")[1]["trainer"]["default_root_dir"] == "1"
    assert settings("--trainer.default_root_dir=2")[1]["trainer"]["default_root_dir"] == "2"


def test_a_setting_that_does_not_exist_is_named_with_its_run(tmp_path, capsys):
    grid = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"], **{"privacy.target_epsilom": 3})
    with pytest.raises(SystemExit) as exit_:
        main(["sweep", str(grid), "--dry-run"])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert "run DP-SGD_256_42" in said
    assert "Did you mean privacy.target_epsilon?" in said


def test_two_runs_that_are_one_are_refused(tmp_path, capsys):
    grid = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"])
    content = yaml.safe_load(grid.read_text())
    content["axes"]["method"] |= {"the same": {}, "the-same": {}}
    for label in ("the same", "the-same"):
        grid.write_text(yaml.safe_dump(content, sort_keys=False))
        with pytest.raises(SystemExit):
            main(["sweep", str(grid), "--dry-run"])
        said = capsys.readouterr().err
        assert f"and {'the same' if label == 'the same' else 'the-same'}_256_42 have the same settings" in said
        content["axes"]["method"].pop("DP-SGD", None)


def test_the_same_grid_with_other_settings_has_a_page_of_its_own(tmp_path, capsys):
    grid, out = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"]), tmp_path / "out"
    other = ["--override", "trainer.max_epochs=1"]
    for options in ([], other):
        main(["report", str(grid), "--out", str(out), *options])
    plain, overridden = sorted((out / "report").iterdir())
    assert plain.name == "small"
    assert "trainer.max_epochs=1" in (overridden / "report.html").read_text()
    assert "trainer.max_epochs=1" not in (plain / "report.html").read_text()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.max_epochs", "--override trainer.max_epochs: give name=value"),
        ("help=", "help cannot be set for the runs of a grid"),
        ("trainer.default_root_dir=/tmp", "trainer.default_root_dir cannot be set"),
        ("ckpt_path=last", "ckpt_path cannot be set"),
        ("privacy.expected_batch_size=64", "the axis batch_size of "),
        ("config={folder}/shared.yaml", "dirpath of lightning.pytorch.callbacks.ModelCheckpoint is set"),
        ("config={folder}/resumed.yaml", "ckpt_path is set. A run of a grid starts without a checkpoint"),
    ],
)
def test_what_is_no_setting_of_a_run_is_refused(tmp_path, capsys, override, message):
    grid = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"])
    (tmp_path / "resumed.yaml").write_text("ckpt_path: last\n")
    checkpoints = {"class_path": "ModelCheckpoint", "init_args": {"dirpath": "/shared"}}
    (tmp_path / "shared.yaml").write_text(yaml.safe_dump({"trainer": {"callbacks": [checkpoints]}}))
    with pytest.raises(SystemExit) as exit_:
        main(["sweep", str(grid), "--dry-run", "--override", override.format(folder=tmp_path)])
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        "trainer.accumulate_grad_batches=4",
        "trainer.gradient_clip_val=1.0",
        "trainer.overfit_batches=1",
        "privacy.frozen_until={'net.*': 0.5}",
    ],
)
def test_what_fit_refuses_has_no_price(tmp_path, capsys, override):
    grid = grid_file(tmp_path, seeds=[42, 43], methods=["DP-SGD"])
    main(["sweep", str(grid), "--dry-run", "--override", override])
    said = capsys.readouterr().out
    assert said.count(f"no price: {override.partition('=')[0]}") == 4
    assert "epsilon 3" not in said


@pytest.mark.usefixtures("untimed")
def test_data_sets_of_a_grid_have_plans_of_their_own(tmp_path, capsys):
    grid = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"])
    content = yaml.safe_load(grid.read_text())
    content["axes"]["seed"] = {"setting": "data.init_args.val_fraction", "values": [0.0, 0.5]}
    grid.write_text(yaml.safe_dump(content))
    main(["sweep", str(grid), "--dry-run"])
    assert re.findall(r", (\d+) steps", capsys.readouterr().out) == ["12", "6"]


@pytest.mark.usefixtures("untimed")
def test_shown_epsilons_are_rounded_up_and_say_what_must_not_be_released(tmp_path, capsys, monkeypatch):
    grid = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"], **{"privacy.reproducible": True})
    monkeypatch.setattr(PrivacyPlan, "epsilon", lambda plan, accountant=None: 2.99901)
    main(["sweep", str(grid), "--dry-run"])
    said = capsys.readouterr().out
    assert "epsilon 3.000," in said
    assert "not for release: privacy.reproducible is set" in said
    (run,) = sweep.planned_runs(Grid.load(grid), tmp_path, [])
    result = {
        "completed": True,
        "num_steps": 1,
        "num_steps_planned": 1,
        "epsilon": 2.00001,
        "delta": 1e-5,
        "seconds": 1,
    }
    run.folder.root.mkdir(parents=True)
    (run.folder.root / "result.json").write_text(
        json.dumps({**result, "test_accuracy_last": None, "test_accuracy_best": None})
    )
    assert "epsilon 2.001 (not for release: there is no privacy statement)" in sweep._outcome(run, 0)


def test_a_launcher_option_that_is_not_yaml_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["sweep", str(grid_file(tmp_path)), "--out", str(tmp_path / "out"), "--launcher-option", "a=["])
    assert "--launcher-option a=[: [ is not YAML" in capsys.readouterr().err


@pytest.mark.usefixtures("dpl")
def test_a_run_that_ends_by_a_setting_of_its_own_is_finished(tmp_path, capsys):
    limited = {"trainer.max_epochs": 500, "trainer.max_time": "00:00:00:02"}
    grid, out = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"], **limited), tmp_path / "out"
    main(["sweep", str(grid), "--out", str(out)])
    assert "All runs are finished" in capsys.readouterr().out
    (path,) = results(out).values()
    result = json.loads(path.read_text())
    assert result["completed"]
    assert result["num_steps"] < result["num_steps_planned"]
    main(["sweep", str(grid), "--out", str(out)])
    assert "1 runs, 1 finished" in capsys.readouterr().out


class OfMasks(ImageClassifier):
    """Trains on images, labels and masks."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int, mean: list[float], std: list[float]):
        super().__init__(torch.nn.Identity(), num_classes)
        self.layer = torch.nn.Linear(in_channels * image_size**2, num_classes)

    def training_step(self, batch, batch_idx):
        images, labels, masks = batch
        return torch.nn.functional.cross_entropy(self.layer((images * masks).flatten(1)), labels)


def test_a_module_whose_step_cannot_be_timed_still_has_an_epsilon(tmp_path, capsys):
    module = {"model": f"{__name__}.OfMasks"}
    grid = grid_file(tmp_path, seeds=[42], sizes=[256], methods=["DP-SGD"], **module)
    main(["sweep", str(grid), "--dry-run"])
    said = capsys.readouterr().out
    assert "epsilon 3.000, delta 0.0001" in said
    assert "12 steps, time unknown" in said
    assert "The time of no run is known." in said


def test_a_dry_run_prints_commands_and_prices_and_writes_nothing(tmp_path, capsys, monkeypatch):
    grid, out = grid_file(tmp_path, seeds=[42], methods=["DP-SGD"]), tmp_path / "out"
    main(["sweep", str(grid), "--out", str(out), "--dry-run", "--override", "trainer.max_epochs=4"])
    said = capsys.readouterr().out
    assert not out.exists()
    assert f"dpl fit --config {DIGITS} --privacy.accountant=rdp" in said
    plan = RunShape(delta=1e-4, num_train=1437, expected_batch_size=256, num_steps=4 * 6).calibrate(
        3.0, accountant="rdp"
    )
    assert said.count("--trainer.max_epochs=4") == 2
    assert f"epsilon 3.000, delta 0.0001, sigma {plan.noise_multiplier:.4g}, 24 steps, about " in said
    assert said.count("dpl fit") == 2

    def seconds(settings):
        return 0.01 * settings["privacy"]["augmult"]

    monkeypatch.setattr("dp_lightning.commands.pricing.seconds_per_example", seconds)
    main(["sweep", str(grid), "--dry-run", "--override", "privacy.augmult=4", "--override", "trainer.max_steps=10"])
    assert f"10 steps, about {10 * 256 * 4 * 0.01 / 60:.0f} min here" in capsys.readouterr().out
    assert "Each epsilon covers one run alone." in said


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
    assert f"{grid.title}: {count} runs" in said
    assert said.count("\n  dpl fit --config ") == count
    # Without its files nobody knows how many examples a folder has.
    unpriced = count if "imagenet" in path.stem else 0
    assert said.count("  no price: ") == unpriced
    # The images by which a tuned axis is chosen.
    assert grid.tuned is None or said.count("val_fraction=0.1") == count
    given = said.count("noise_multiplier=")
    assert said.count("sigma 50, ") + given == said.count(" steps, about ") == count - unpriced
