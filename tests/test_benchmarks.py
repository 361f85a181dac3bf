"""The benchmarks: their arithmetic, and a small run of each."""

import contextlib
import csv
import functools
import json
import math
import multiprocessing
import os
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
import yaml
from pages import ROOT, read, tables

from dp_lightning.cli import main
from dp_lightning.commands.configs import path_of
from dp_lightning.commands.fit_settings import SettingsReader
from dp_lightning.datamodules import NpzImages
from dp_lightning.models import SmallCNN
from dp_lightning.privacy import PrivateStep

sys.path.append(str(ROOT / "benchmarks"))
import gpu
import step

pytestmark = pytest.mark.benchmarks


@pytest.fixture
def images(tmp_path):
    """A file of 60 random images of 16 x 16 pixels, for the training and for the test."""
    pixels, labels = np.random.default_rng(0).integers(0, 255, (2, 60, 16, 16, 3), np.uint8), np.arange(60) % 10
    path = tmp_path / "images.npz"
    np.savez(path, train_images=pixels[0], train_labels=labels, test_images=pixels[1], test_labels=labels)
    return path


# A step


def row(way, memory_format, seconds, peak_mib):
    fixed = {"model": "m", "dtype": "fp32", "batch_size": 8}
    return {**fixed, "way": way, "memory_format": memory_format, "seconds": seconds, "peak_mib": peak_mib}


def test_ratios_are_to_the_ordinary_steps_faster_format():
    failed = row("Opacus ghost", "contiguous", 0.0, 0) | {"error": "RuntimeError: no"}
    del failed["seconds"]
    rows = [
        row("ordinary", "contiguous", 2.0, 100),
        row("ordinary", "channels_last", 1.0, 200),
        row("ours flat", "contiguous", 1.5, 300),
        row("ours flat", "channels_last", 1.8, 100),
        failed,
    ]
    shown = step.shown(step.summarize(rows))
    assert "| m | fp32 | 8 | ours flat | contiguous | 1500 | 1.50 | 300 | 1.50 |" in shown
    assert "RuntimeError: no" in shown


def test_a_way_is_measured_in_the_formats_that_it_can_take():
    def jobs(model, dtype, *ways):
        options = step.parse(["--ways", *ways])
        return [(job.way, job.memory_format) for job in step.jobs_of(options, model, dtype, [4], "cpu")]

    found = jobs("wrn16-4", "fp32", "ours flat", "Opacus hooks")
    ours = [(way, memory_format) for way in ("ordinary", "ours flat") for memory_format in step.FORMATS]
    assert found == [*ours, ("Opacus hooks", "contiguous")]


def test_opacus_computes_wrong_gradients_of_convolutions_on_channels_last():
    """Why its ways are measured on contiguous images alone. Should this fail, measure both."""
    from opacus.grad_sample import GradSampleModule

    layer, x = torch.nn.Conv2d(3, 4, 3, padding=1), torch.randn(5, 3, 8, 8)
    expected = torch.stack([torch.autograd.grad(layer(row).square().sum(), layer.weight)[0] for row in x])
    wrapped = GradSampleModule(layer, loss_reduction="sum")
    wrapped(x.to(memory_format=torch.channels_last)).square().sum().backward()
    assert (wrapped._module.weight.grad_sample - expected).norm() > 0.1 * expected.norm()


@pytest.fixture
def forked(monkeypatch):
    """Let a benchmark fork its processes from one that has made the imports, in place of starting them anew."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["lightning.pytorch", "torchmetrics", "dp_lightning.callbacks"])
    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forkserver)
    monkeypatch.setattr(torch.multiprocessing, "spawn", start)


def test_a_small_step_prints_a_table_and_writes_every_row(tmp_path, forked, monkeypatch, capfd):
    small = ["--models", "small-cnn", "--types", "fp32", "--formats", "contiguous", "--rounds", "2", "--warmup", "1"]
    small += ["--batch-size", "4", "--ways", "ours flat", "--json", str(tmp_path / "rows.json")]
    monkeypatch.setattr(sys, "argv", ["step.py", *small])
    step.main()
    shown, rows = capfd.readouterr().out, json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert shown.count("| small-cnn | fp32 |") == 2
    assert [row["way"] for row in rows] == ["ordinary", "ours flat"]
    assert all(len(row["times"]) == 2 and row["seconds"] > 0 and row["peak_mib"] > 0 for row in rows)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_small_run_of_the_parts_of_a_step_prints_each(ranks, tmp_path, forked, capfd):
    import postprocess

    out = tmp_path / "times.json"
    small = ["--model", "small-cnn", "--batch-size", "4", "--rounds", "2", "--json", str(out)]
    postprocess.main([*small, "--ranks", str(ranks)])
    shown, times = capfd.readouterr().out, json.loads(out.read_text())["times"]
    assert {len(values) for values in times.values()} == {2}
    assert all(f"| {name} | " in shown for name in times if name != "gradient")


# Whole runs


def test_a_small_run_has_all_figures_and_the_parts_of_its_steps(tmp_path, forked, capfd):
    import runs

    out = tmp_path / "rows.json"
    runs.main(["--runs", "digits", "--ways", "ours flat", "--rounds", "1", "--parts", "--json", str(out)])
    shown, (_, private) = capfd.readouterr().out, json.loads(out.read_text())["rows"]
    assert shown.count("| digits | ours flat |") == 2
    assert shown.count("| digits | ordinary |") == 1
    (parts,) = private["parts"]
    assert set(parts) >= set(runs.PARTS) - {"accountant"}  # which some steps ask
    assert sum(parts.values()) < private["seconds"]


@pytest.mark.parametrize("way", ["ordinary", "ours flat", "Opacus ghost"])
def test_a_logical_step_has_as_many_physical_batches_as_asked(monkeypatch, tmp_path, way):
    import runs

    monkeypatch.setitem(runs.RUNS, "small", runs.Run("small-cnn", 64, 64, pieces=4))  # a draw has all examples
    owner, name = (PrivateStep, "accumulate") if way.startswith("ours") else (SmallCNN, "forward")
    method, sizes, at_steps = getattr(owner, name), [], []
    monkeypatch.setattr(owner, name, lambda self, x: sizes.append(len(x)) or method(self, x))

    def goes_on(steps):
        at_steps.append((steps, len(sizes)))
        return steps < 2

    job = runs.Job("small", way, threads=1, timed=False)
    train = runs.by_opacus if way.startswith("Opacus") else runs.through_a_trainer
    train(job, runs.data_of(job, str(tmp_path)), goes_on)
    assert {(0, 0), (1, 4), (2, 8)} <= set(at_steps)
    assert set(sizes) == {16}


# On a GPU


@pytest.fixture
def visited(monkeypatch, tmp_path):
    """A function that makes a visit whose parts do not run, and returns the page and the last word of what ran."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu, "hardware", lambda: "a machine, torch 2.14, 2026-01-01")
    monkeypatch.setattr(gpu, "ROOT", tmp_path)

    def visit(outcome, *options):
        """``outcome`` maps a command, and whether a run has enough steps, to the exit status."""
        ran = []

        def output_of(command, limit, enough):
            ran.append((command[-1], round(limit)))
            return "progress\n| a table |\n| --- |\nwhat went wrong", outcome(" ".join(command), enough)

        monkeypatch.setattr(gpu, "output_of", output_of)
        with contextlib.suppress(SystemExit):
            gpu.main(options)
        return (tmp_path / "docs" / "performance_gpu.md").read_text(), ran

    return visit


def test_the_commands_for_a_gpu_have_settings_that_exist(images, monkeypatch, tmp_path):
    import postprocess

    monkeypatch.setattr(gpu, "ROOT", tmp_path)
    monkeypatch.setattr(gpu.tempfile, "tempdir", str(tmp_path))
    parsers, read = {Path(each.__file__).name: each.parse for each in (step, postprocess)}, SettingsReader()
    for more in ([], ["--rehearse"]):
        for part in gpu.parts(gpu.parse([*more, "--data", str(images)])):
            script, *given = shlex.split(part["command"])
            if part["run"]:
                assert read(given[2:])["privacy"]["target_epsilon"] == 4.0
            elif script != "-m":
                parsers[Path(script).name](given)


def test_a_visit_keeps_to_its_limit_and_the_next_one_runs_what_has_not_ended(visited):
    page, ran = visited(lambda command, _: None if "--ranks" in command else int("vit-s16" in command))
    assert ran[0] == ("tests", 120)
    assert "needs CIFAR-10" in page
    assert "| a table |\n| --- |\n\nStopped after 0 s." in page
    assert (
        "Failed with exit status 1 after 0 s.\n\n```text\nprogress\n| a table |\n| --- |\nwhat went wrong\n```" in page
    )
    assert visited(lambda *_: 0, "--limit", "0") == (page, [])
    again, ran = visited(lambda *_: 0)
    assert [word for word, _ in ran] == ["ours per-layer", "--one-device"]
    assert again.count("\n## ") == page.count("\n## ")
    assert not {"Stopped", "Failed"} & set(again.split())
    assert visited(lambda *_: 0) == (again, [])


def test_a_rehearsal_stops_the_runs_of_the_paper_and_resumes_them(images, monkeypatch, tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    asked = []

    def output_of(command, limit, enough):
        """Leaves what `dpl fit` leaves: journal, checkpoints, times of logged losses and, at its end, a result."""
        if "fit" not in command:
            return "", 0
        root = Path(command[command.index("--trainer.default_root_dir") + 1])
        first, pace = not root.exists(), 2.05 if "dp_muon" in str(root) else 2.0
        folder = root / f"version_{int(not first)}"
        with SummaryWriter(str(folder)) as logger:
            for number in range(3):
                logger.add_scalar("unprotected/train_loss", 1.0, 10 * number, walltime=1000 + 10 * pace * number)
        (folder / "privacy_journal_a.jsonl").write_text("{}\n" * (6 if first else 24))
        for number in range(2):
            (folder / f"{number}.ckpt").touch()
            os.utime(folder / f"{number}.ckpt", (number, number))
        if not first:
            result = {"completed": True, "num_steps": 24, "test_accuracy_last": 0.4, "test_accuracy_best": 0.5}
            (folder / "result.json").write_text(json.dumps({**result, "epsilon": 4.0, "seconds": 9.0}))
        asked.append((enough(), [path.name for path in root.rglob("*.ckpt")]))
        return "", None if first else 0

    monkeypatch.setattr(gpu, "output_of", output_of)
    monkeypatch.setattr(gpu.tempfile, "tempdir", str(tmp_path))
    gpu.main(["--rehearse", "--page", str(tmp_path / "page.md"), "--data", str(images)])
    assert [stops for stops, _ in asked] == [True, True, False, False]
    assert [sorted(left) for _, left in asked] == [["0.ckpt", "1.ckpt"]] * 2 + [["0.ckpt", "1.ckpt", "1.ckpt"]] * 2
    page = (tmp_path / "page.md").read_text()
    assert "| dp_sgd | 24 | 0.4 | 0.5 | 4 | 9 | 0.5 |" in page
    assert "A step of DP-Muon takes 2.50 % more than one of DP-SGD" in page


def test_a_part_that_is_stopped_may_save_what_it_has_and_leaves_no_process():
    stopped = gpu.output_of(["sh", "-c", "trap 'echo saved; exit' TERM; sleep 321.5 & echo half; wait"], 1)
    assert stopped == ("half\nsaved\n", None)
    assert subprocess.run(["pgrep", "-f", "sleep 321.5"], capture_output=True, check=False).returncode == 1


# Comparisons


@pytest.fixture
def comparisons(monkeypatch):
    import comparisons

    monkeypatch.setattr(comparisons, "BACKBONE", "efficientnet_lite0")  # which needs no padding of its own
    return comparisons


@pytest.mark.parametrize(
    ("best", "tried", "edge"), [(0.06, 3, False), (0.54, 5, False), (0.001, 5, True), (99.0, 5, True)]
)
def test_the_learning_rate_is_looked_for_where_it_is_better(comparisons, monkeypatch, best, tried, edge):
    def run(row, rate, seed, options):
        return {"val_accuracy_last": 1 / (1 + abs(math.log(rate / best)))}

    monkeypatch.setattr(comparisons, "run", run)
    options = comparisons.parse(["methods", "--data", "x.npz", "--out", "x"])
    row = next(row for row in comparisons.methods(options) if row.name.startswith("dp_muon"))
    found, rates = comparisons.tuned_rate(row, options)
    assert len(rates) == tried
    assert (found in (rates[0], rates[-1])) == edge


@pytest.mark.parametrize("name", ["methods", "recipes", "finetune", "scattering", "persons"])
def test_every_row_of_a_comparison_is_a_configuration(name, comparisons, images, monkeypatch, tmp_path, capsys):
    """Each is parsed as `dpl fit` would; one of each comparison is trained."""
    import timm

    torch.save(timm.create_model(comparisons.BACKBONE).state_dict(), tmp_path / "weights.pth")
    arguments = [name, "--data", str(images), "--out", str(tmp_path), "--epochs", "1", "--epsilons", "8"]
    options = comparisons.parse([*arguments, "--seeds", "1"])
    base, read, rows = comparisons.base, SettingsReader(), list(comparisons.COMPARISONS[name](options))
    monkeypatch.setattr(comparisons, "base", lambda *args, **kw: base(*args, **{**kw, "batch_size": 18}))
    for row in rows:
        (tmp_path / "row.yaml").write_text(yaml.safe_dump(row.settings(0.1)))
        configs = [f"--config={path}" for path in (*map(path_of, row.configs), tmp_path / "row.yaml")]
        read(configs)
    monkeypatch.setattr(comparisons.subprocess, "run", lambda command, **kwargs: _in_this_process(command))
    row = rows[-1]._replace(tuned=False)
    monkeypatch.setitem(comparisons.COMPARISONS, name, lambda options: [row])
    comparisons.main([*arguments, "--seeds", "1"])
    assert f"| {row.name} | {row.rate:.3g} | " in capsys.readouterr().out


def _in_this_process(command):
    main(command[2:])
    return subprocess.CompletedProcess(command, 0)


# Public modules


@pytest.fixture
def public_modules():
    import public_modules

    yield public_modules
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("kind", "expression", "result", "told", "opacus"),
    [
        ("loss of classes", "torch.nn.MultiMarginLoss()", "together", "e-0", ""),
        ("augmentation", "torch.nn.Dropout(0.5)", "together", "random", ""),
        ("augmentation", "torchvision.transforms.v2.GaussianBlur(3)", "one by one", "random", ""),
        ("network", "timm.create_model('test_convnext', num_classes=3)", "together", "e-0", "wrong"),
        ("adapter", "peft.LoraConfig(r=2, target_modules=['q_proj'])", "together", "e-0", "right"),
        ("loss of classes", "torch.nn.MultiMarginLoss(margin=-9.0)", "refused", "", ""),  # is zero
        ("loss of classes", "torch.nn.BCELoss()", "refused", "", ""),  # which takes other labels
    ],
)
def test_a_public_module_is_compared_with_a_loop_and_with_opacus(
    public_modules, kind, expression, result, told, opacus
):
    found, difference, by_opacus, reason = public_modules.judged(kind, expression)
    assert (found, by_opacus) == (result, opacus)
    assert told in difference
    assert bool(reason) == (result != "together")


def test_a_wrong_sum_is_noticed(public_modules, monkeypatch):
    by_step = public_modules.by_step
    monkeypatch.setattr(public_modules, "by_step", lambda *given: 1.001 * by_step(*given))
    assert public_modules.judged("loss of classes", "torch.nn.MultiMarginLoss()")[0] == "WRONG"


def test_the_evidence_has_every_row_of_public_modules(public_modules):
    with (ROOT / "docs" / "evidence" / "public_modules.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert sorted((row["kind"], row["module"]) for row in found) == sorted(public_modules.rows())
    shown = {row[0].text: row[1].text for each in tables(read("docs/own_module.md")) for row in each.rows}
    assert shown.items() >= dict(public_modules.summary(found)).items()


# The others


def test_cifar_is_written_as_one_file_of_half_the_size(monkeypatch, tmp_path):
    import cifar_npz

    class Stored:
        def __init__(self, root, train, download):
            self.data = np.random.default_rng(train).integers(0, 255, (15 if train else 3, 32, 32, 3), dtype=np.uint8)
            self.targets = list(range(len(self.data)))

    monkeypatch.setattr(torchvision.datasets, "CIFAR10", Stored)
    half = tmp_path / "half.npz"
    cifar_npz.main(["--root", str(tmp_path), "--half", "--out", str(half)])
    small, whole = np.load(half), Stored(tmp_path, False, False).data
    assert np.abs(small["test_images"][2, 2, 5] - whole[2, 4:6, 10:12].astype(float).mean((0, 1))).max() <= 0.5
    data = NpzImages(half, num_classes=15)
    assert (data.num_train, data.image_size, data.in_channels) == (15, 16, 3)


def test_made_up_images_are_written_for_npz_images(monkeypatch, tmp_path):
    import made_up_images

    few = {name: (*given[:2], 12, 3, given[4]) for name, given in made_up_images.SETS.items()}
    monkeypatch.setattr(made_up_images, "SETS", few)
    made_up_images.main(["--out", str(tmp_path)])
    for name, kinds, side in (("digits", 10, 16), ("cells", 8, 28)):
        data = NpzImages(tmp_path / f"{name}.npz", num_classes=kinds)
        assert (data.num_train, data.image_size, data.in_channels) == (12, side, 3)
        found = np.load(tmp_path / f"{name}.npz")
        assert len(np.unique(found["test_images"], axis=0)) == 3
        assert found["train_labels"].max() < kinds


def test_runs_that_are_killed_are_finished(tmp_path, warm_python):
    command = [warm_python, ROOT / "benchmarks" / "kills.py", tmp_path, "--kills", "1", "--ranks", "1"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert shown.returncode == 0, shown.stdout + shown.stderr[-3000:]
    assert shown.stdout.startswith("1 kills")
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert all(trial["num_steps"] > 0 and trial["recorded"] > 0 for trial in trials)
