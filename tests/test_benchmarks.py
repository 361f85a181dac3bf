"""The benchmarks: their arithmetic, and a small run of each."""

import functools
import json
import math
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
import yaml
from started_ranks import PRELOADED

from dp_lightning.cli import main
from dp_lightning.commands.composition import Composer, prepare_to_train
from dp_lightning.datamodules import NpzImages
from dp_lightning.experiments.document import Document
from dp_lightning.privacy import PrivateStep
from dp_lightning.privacy.plan import RunShape

pytestmark = pytest.mark.benchmarks

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def step(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import step

    return step


def row(way, memory_format, seconds, peak_mib):
    return {
        "model": "m",
        "dtype": "fp32",
        "batch_size": 8,
        "way": way,
        "memory_format": memory_format,
        "seconds": seconds,
        "peak_mib": peak_mib,
    }


def test_ratios_are_to_the_ordinary_steps_faster_format(step):
    rows = [
        row("ordinary", "contiguous", 2.0, 100),
        row("ordinary", "channels_last", 1.0, 200),
        row("ours flat", "contiguous", 1.5, 300),
        row("ours flat", "channels_last", 1.8, 100),
        {**row("Opacus ghost", "contiguous", 0.0, 0), "error": "RuntimeError: no"},
    ]
    del rows[-1]["seconds"]
    summary = {entry["way"]: entry for entry in step.summarize(rows)}
    assert summary["ordinary"]["time_ratio"] == 1.0
    assert summary["ours flat"]["time_ratio"] == 1.5
    assert summary["ours flat"]["memory_ratio"] == 1.5
    text = step.table(list(summary.values()))
    assert "| m | fp32 | 8 | ours flat | contiguous | 1500 | 1.50 | 300 | 1.50 |" in text
    assert "RuntimeError: no" in text


def jobs(step, model, dtype, *ways):
    options = step.parse(["--ways", *ways])
    return [(job.way, job.memory_format) for job in step.jobs_of(options, model, dtype, 4, "cpu")]


def test_a_way_is_measured_in_the_formats_that_it_can_take(step):
    found = jobs(step, "wrn16-4", "fp32", "ours flat", "Opacus hooks", "jax_privacy")
    ours = [(way, memory_format) for way in ("ordinary", "ours flat") for memory_format in step.FORMATS]
    assert found == [*ours, ("Opacus hooks", "contiguous"), ("jax_privacy", "channels_last")]
    for model, dtype in (("wrn16-4", "bf16"), ("vit-s16", "fp32")):  # which have no Flax network
        assert jobs(step, model, dtype, "jax_privacy") == [("ordinary", form) for form in step.FORMATS]


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_opacus_computes_wrong_gradients_of_convolutions_on_channels_last(step, memory_format):
    """Why its ways are measured on contiguous images alone. Should this fail, measure both."""
    from opacus.grad_sample import GradSampleModule

    torch.manual_seed(0)
    layer, x = torch.nn.Conv2d(3, 4, 3, padding=1), torch.randn(5, 3, 8, 8)
    expected = torch.stack([torch.autograd.grad(layer(row).square().sum(), layer.weight)[0] for row in x])
    wrapped = GradSampleModule(layer, loss_reduction="sum")
    wrapped(x.to(memory_format=memory_format)).square().sum().backward()
    error = (wrapped._module.weight.grad_sample - expected).norm() / expected.norm()
    assert error < 1e-5 if memory_format is torch.contiguous_format else error > 0.1


def test_the_network_in_flax_is_the_same_and_so_is_its_clipped_sum(step):
    import flax_steps
    import jax

    from dp_lightning.models import WideResNet
    from dp_lightning.privacy import ClipPlan
    from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
    from dp_lightning.privacy.gradients.recording import Recording

    assert tuple(flax_steps.WAYS) == step.JAX_WAYS
    assert tuple(flax_steps.DEPTH_AND_WIDTH) == step.JAX_MODELS
    torch.manual_seed(0)
    model, network = WideResNet(10, 2, 10), flax_steps.WideResNet(10, 2)
    x, y = torch.randn(4, 3, 32, 32), torch.arange(4)
    images = x.permute(0, 2, 3, 1).numpy()
    numbers = flax_steps.parameters_of({name: p.numpy() for name, p in model.state_dict().items()})
    logits = torch.from_numpy(np.array(jax.jit(network.apply)({"params": numbers}, images)))
    torch.testing.assert_close(logits, model(x).detach(), rtol=1e-5, atol=1e-5)
    parameters = dict(model.named_parameters())
    total = ClippedSum(parameters, ClipPlan.flat())
    total.begin(len(x))
    recording = Recording(parameters, len(x), total.take)
    recording.backward(recording.run(lambda x, y: torch.nn.functional.cross_entropy(model(x[None]), y[None]), x, y))
    assert total.end().min() > 1  # all examples are clipped
    ours = flax_steps.parameters_of({name: part.numpy() for name, part in total.sums.items()})
    for at_once in (None, 2):
        theirs = jax.jit(flax_steps.clipped(at_once)(network))(numbers, images, y.numpy())
        for path, found in jax.tree_util.tree_leaves_with_path(theirs):
            expected = ours
            for key in path:
                expected = expected[key.key]
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("option", ["--rounds", "--threads", "--batch-size"])
def test_numbers_below_one_are_refused(step, option, capsys):
    with pytest.raises(SystemExit):
        step.parse([option, "0"])
    assert f"argument {option}: 0 is below 1" in capsys.readouterr().err


SMALL = ["--models", "small-cnn", "--types", "fp32", "--formats", "contiguous", "--rounds", "2", "--warmup", "1"]


@pytest.fixture
def forked(monkeypatch):
    """Let a benchmark fork its processes from one that has made the imports, in place of starting them anew."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(PRELOADED)
    start = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(multiprocessing, "get_context", lambda method: forkserver)
    monkeypatch.setattr(torch.multiprocessing, "spawn", start)


def test_a_small_run_prints_a_table_and_writes_every_row(tmp_path, step, forked, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["step.py", *SMALL, "--ways", "ours flat", "--json", str(tmp_path / "rows.json")])
    step.main()
    shown = capfd.readouterr().out
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert shown.count("| small-cnn | fp32 |") == 2
    assert [row["way"] for row in rows] == ["ordinary", "ours flat"]
    assert all(len(row["times"]) == 2 and row["seconds"] > 0 and row["peak_mib"] > 0 for row in rows)


def test_a_trainer_takes_no_steps_of_other_libraries(step, capsys):
    with pytest.raises(SystemExit):
        step.parse(["--through", "callback", "--ways", "ours flat", "Opacus hooks"])
    assert "--through callback takes no Opacus hooks" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        step.parse(["--pieces", "2"])
    assert "--pieces is for --through callback" in capsys.readouterr().err


@pytest.mark.parametrize("way", ["ordinary", "ours flat"])
def test_a_logical_step_of_a_trainer_has_as_many_physical_batches_as_asked(step, monkeypatch, way):
    import trainer_steps

    ends, at_steps = [], []
    by_batch = (trainer_steps._AfterEachStep, "on_train_batch_end"), (PrivateStep, "accumulate")
    owner, name = by_batch[way != "ordinary"]
    counted = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: ends.append(args) or counted(*args))

    def goes_on():
        at_steps.append(len(ends))
        return len(at_steps) < 3

    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 10))
    trainer_steps.take_steps(way, model, torch.randn(6, 3, 2, 2), torch.arange(6), goes_on, pieces=3)
    assert at_steps == [3, 6, 9]


def test_linear_cost_is_the_same_time_for_an_image(step, monkeypatch, capsys):
    import scaling

    def measure(jobs, *, warmup, rounds):
        seconds = [job.batch_size * job.pieces * (0.011 if job.pieces == 4 else 0.01) for job in jobs]
        return [{**job._asdict(), "seconds": time} for job, time in zip(jobs, seconds, strict=True)]

    monkeypatch.setattr(scaling, "measure", measure)
    monkeypatch.setattr(sys, "argv", ["scaling.py", "--physical", "8", "16", "--pieces", "1", "2", "4"])
    scaling.main()
    shown = capsys.readouterr().out
    assert "| 8 | 80 | 10.00 | 1.00 |\n| 16 | 160 | 10.00 | 1.00 |" in shown
    assert "| 128 | 1280 | 10.00 | 1.00 |\n| 256 | 2816 | 11.00 | 1.10 |" in shown


def test_a_small_run_through_a_trainer(tmp_path, step, forked, monkeypatch, capfd):
    more = ["--through", "callback", "--pieces", "2", "--ways", "ours per-layer"]
    monkeypatch.setattr(sys, "argv", ["step.py", *SMALL, *more, "--json", str(tmp_path / "rows.json")])
    step.main()
    shown, rows = capfd.readouterr().out, json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert shown.count("| small-cnn | fp32 |") == 2
    assert "rivacy" not in shown
    assert [row["way"] for row in rows] == ["ordinary", "ours per-layer"]
    assert all(len(row["times"]) == 2 and row["seconds"] > 0 for row in rows)


@pytest.fixture
def gpu(monkeypatch, step):
    import gpu

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    return gpu


@pytest.mark.slow  # a process for each part, and for each way of a step
def test_parts_for_a_gpu_run_on_a_cpu_too(gpu, monkeypatch, tmp_path, warm_python):
    """Those that no other test of this file runs."""
    monkeypatch.setattr(sys, "executable", str(warm_python))
    page, only = tmp_path / "page.md", ("tests", "epoch_wrn16-4", "noise")
    gpu.main(["--rehearse", "--out", str(tmp_path / "out"), "--page", str(page), "--only", *only])
    shown = page.read_text()
    assert shown.count("\n## ") - shown.count("This part was not run yet.") == len(only)
    assert shown.count("This part") == shown.count("This part was not run yet.")
    assert "skipped" in shown
    assert "| 16 | 1 |" in shown
    assert "| 0.1 |" in shown


@pytest.mark.parametrize("more", [[], ["--rehearse"]])
def test_the_commands_for_a_gpu_have_settings_that_exist(gpu, step, more):
    import epochs
    import noise
    import postprocess
    import ranks

    parsers = {Path(each.__file__).name: each.parse for each in (step, epochs, noise, postprocess, ranks)}
    for part in gpu.parts(gpu.parse(more)):
        if part.command[0] != "-m":
            parsers[Path(part.command[0]).name](part.command[1:])


def test_a_run_for_a_gpu_goes_on_keeps_to_its_limit_and_says_what_failed(gpu, monkeypatch, tmp_path):
    ran = []

    def output_of(command, limit):
        name = Path(command[1]).stem
        ran.append(name)
        if name == "noise":
            return "| half | a table |", None
        return f"progress\n| {name} |\n| --- |\nwhat went wrong", int(name == "ranks")

    monkeypatch.setattr(gpu, "output_of", output_of)
    page = tmp_path / "page.md"
    arguments = ["--rehearse", "--out", str(tmp_path / "out"), "--page", str(page)]
    with pytest.raises(SystemExit, match="Not all parts ended: noise, ranks"):
        gpu.main(arguments)
    shown = page.read_text()
    assert "This part was stopped after 120 s." in shown
    assert "| half | a table |" in shown
    assert "This part failed with exit status 1." in shown
    assert shown.count("progress") == 1
    assert "```text\nprogress\n| ranks |\n| --- |\nwhat went wrong\n```" in shown
    ran.clear()
    with pytest.raises(SystemExit):
        gpu.main(arguments)
    assert ran == ["noise", "ranks"]
    ran.clear()
    with pytest.raises(SystemExit):
        gpu.main([*arguments, "--again", "--limit", "0"])
    assert ran == []
    assert page.read_text().count("This part was not run: no time was left.") == shown.count("\n## ")
    with pytest.raises(SystemExit, match=r"There is no part nois\. The parts are tests, step_4"):
        gpu.main([*arguments, "--only", "nois"])


def test_what_a_part_has_said_is_of_its_machine_and_its_command(gpu, monkeypatch, tmp_path):
    said = ["| a |"]
    monkeypatch.setattr(gpu, "output_of", lambda command, limit: (said[0], 0))
    page = tmp_path / "page.md"
    arguments = ["--rehearse", "--out", str(tmp_path), "--page", str(page)]
    gpu.main(arguments)
    assert page.read_text().count("| a |") == page.read_text().count("\n## ")
    said[0] = "| b |"
    gpu.main([*arguments, "--again", "--only", "noise"])  # the others stay, in their files and on the page
    assert page.read_text().count("| b |") == 1
    assert page.read_text().count("| a |") == page.read_text().count("\n## ") - 1
    said[0] = "| c |"
    monkeypatch.setattr("step.hardware", lambda device, threads: "another machine, torch 2.14, 2026-01-01")
    gpu.main([*arguments, "--only", "noise"])
    assert page.read_text().count("| c |") == 1
    assert "| a |" not in page.read_text()


@pytest.mark.parametrize("text", ['{"state": "en', "[]", "\xff"])
def test_what_a_part_has_said_may_be_broken_off(gpu, monkeypatch, tmp_path, text):
    monkeypatch.setattr(gpu, "output_of", lambda command, limit: ("| a |", 0))
    (tmp_path / "noise.json").write_bytes(text.encode("latin-1"))
    gpu.main(["--rehearse", "--out", str(tmp_path), "--only", "noise", "ranks"])
    assert json.loads((tmp_path / "noise.json").read_text())["state"] == "ended"
    (tmp_path / "noise").mkdir()  # of its runs
    gpu.main(["--rehearse", "--out", str(tmp_path), "--only", "noise", "--again"])
    assert not (tmp_path / "noise").exists()


def test_a_page_with_figures_stays(gpu, monkeypatch, tmp_path):
    monkeypatch.setattr(gpu, "output_of", lambda command, limit: ("| a |", 0))
    page = tmp_path / "new" / "page.md"
    for _ in range(2):
        gpu.main(["--plan", "--page", str(page)])
    gpu.main(["--rehearse", "--out", str(tmp_path / "out"), "--page", str(page)])
    assert "This is a rehearsal" in (shown := page.read_text())
    with pytest.raises(SystemExit, match="has figures"):
        gpu.main(["--plan", "--page", str(page)])
    assert page.read_text() == shown
    with pytest.raises(SystemExit, match="--out and --page: "):
        gpu.main(["--plan", "--page", str(page / "no folder")])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_part_ends_with_the_process_that_runs_it(tmp_path, number):
    """A scheduler's limit, a closed terminal, Ctrl-C."""
    arguments = ["--rehearse", "--out", str(tmp_path / "out"), "--only", "noise"]
    # A process that was started in the background ignores some signals, and so would this one.
    process = subprocess.Popen(
        [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments],
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )

    def running():
        found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
        return [int(each) for each in found.stdout.split()]

    while not (children := running()):
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(number)
    assert process.wait(60) == 1
    assert b"Interrupted. The same command goes on" in process.stderr.read()
    assert not any(Path(f"/proc/{child}").exists() for child in children)


def test_an_epoch_of_another_machine_is_not_taken(step, monkeypatch, tmp_path):
    import epochs

    def fit(command, **others):
        folder = Path(command[-1]).parent / "lightning_logs" / "version_0"
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"seconds": len(ran) + 1, "num_steps": 1}))
        ran.append(command)
        return SimpleNamespace(returncode=0)

    ran, machine = [], ["one, 2026-01-01"]
    monkeypatch.setattr(epochs.subprocess, "run", fit)
    monkeypatch.setattr(epochs, "this_machine", lambda: machine[0])
    options = epochs.parse(["--rehearse", "--out", str(tmp_path)])
    times = []
    for machine[0] in ("one, 2026-01-01", "one, 2026-01-02", "another, 2026-01-02"):
        times.append(epochs.fit(options, "DP-SGD", tmp_path / "images.npz", 16, 1, 0))
    assert times == [1000, 1000, 2000]


def test_a_rehearsal_is_kept_apart_from_the_figures(gpu):
    real, rehearsal = gpu.parse([]), gpu.parse(["--rehearse"])
    assert real.page.name == "performance_gpu.md"
    assert rehearsal.out != real.out
    assert rehearsal.page.parent == rehearsal.out


def test_a_part_that_is_stopped_leaves_no_process(gpu, tmp_path):
    starts = "import subprocess, time; subprocess.Popen(['sleep', '321.5']); print('half', flush=True); time.sleep(60)"
    printed, code = gpu.output_of([sys.executable, "-c", starts], 3)
    assert (printed, code) == ("half\n", None)
    assert subprocess.run(["pgrep", "-f", "sleep 321.5"], capture_output=True, check=False).returncode == 1


def test_the_page_of_a_gpu_has_the_commands_of_all_parts(gpu, tmp_path):
    """`docs/performance_gpu.md` is what ``--plan`` writes, until there are figures."""
    page = tmp_path / "page.md"
    gpu.main(["--plan", "--page", str(page)])
    there = (BENCHMARKS.parent / "docs" / "performance_gpu.md").read_text()
    assert [line for line in there.splitlines() if line.startswith("## ")] == [
        line for line in page.read_text().splitlines() if line.startswith("## ")
    ]
    with pytest.raises(SystemExit, match="There is no GPU here"):
        gpu.main(["--out", str(tmp_path)])


@pytest.mark.parametrize("name", ["ours flat", "ours per-layer", "Opacus hooks", "Opacus ghost"])
def test_each_way_takes_a_step(step, name):
    import training_steps

    build, shape, _ = training_steps.MODELS["small-cnn"]
    take = training_steps.WAYS[name](build().train(), training_steps.autocast_to("cpu", "fp32"))
    for _ in range(2):
        take(torch.randn(4, *shape), torch.arange(4))


def test_each_way_of_fine_tuning_trains_its_part(step, monkeypatch):
    import timm
    import training_steps

    norms = []
    end = training_steps.ClippedSum.end
    monkeypatch.setattr(training_steps.ClippedSum, "end", lambda total: norms.append(end(total)))
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([1, 2])
    found = {}
    for name, make in training_steps.FINE_TUNING.items():
        network = "resnet10t" if "BatchNorm" in name else "vit_tiny_patch16_224"
        torch.manual_seed(0)
        model = timm.create_model(network, **({} if "BatchNorm" in name else {"img_size": 32})).train()
        make(model, training_steps.autocast_to("cpu", "fp32"))(images, labels)
        trained = [n for n, p in model.named_parameters() if p.requires_grad]
        found[name] = trained
        assert len(norms.pop()) == 2
        assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    assert found["ours, last layer"] == ["head.weight", "head.bias"]
    assert all(n.endswith("bias") or n == "head.weight" for n in found["ours, biases"])
    assert sum("lora_" in n for n in found["ours, LoRA 8"]) == 12 * 4
    assert not any(n.startswith("bn1") for n in found["ours, frozen BatchNorm"])


def test_a_small_run_of_several_ranks_prints_every_part(tmp_path, step, forked, monkeypatch, capfd):
    import ranks

    out = tmp_path / "times.json"
    arguments = ["--model", "small-cnn", "--batch-size", "4", "--rounds", "2", "--warmup", "0", "--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["ranks.py", *arguments])
    ranks.main()
    shown = capfd.readouterr().out
    times = json.loads(out.read_text())["times"]
    assert {len(values) for values in times.values()} == {2}
    for name in times:
        assert f"| {name} | " in shown
    assert "operations in the time of a gathered byte" in shown


def test_a_small_run_of_post_processing_prints_every_chain(tmp_path, warm_python):
    out = tmp_path / "times.json"
    arguments = ["--model", "small-cnn", "--batch-size", "4", "--rounds", "2", "--json", str(out)]
    shown = subprocess.run(
        [warm_python, BENCHMARKS / "postprocess.py", *arguments], capture_output=True, text=True, check=True
    ).stdout
    times = json.loads(out.read_text())["times"]
    assert {len(values) for values in times.values()} == {2}
    for name in times.keys() - {"gradient"}:
        (line,) = [line for line in shown.splitlines() if line.startswith(f"| {name} | ")]
        # One buffer for each momentum or filter; in so small a network a few numbers more show.
        assert 0.8 < float(line.split("|")[-2]) < 1.2


@pytest.fixture
def comparisons(monkeypatch):
    """The modules ``methods``, ``recipes`` and ``tuned_runs``."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import methods
    import recipes
    import tuned_runs

    return methods, recipes, tuned_runs


@pytest.mark.parametrize(
    ("best", "tried", "edge"), [(0.06, 3, False), (0.54, 5, False), (0.18, 4, False), (0.001, 5, True), (99.0, 5, True)]
)
def test_the_learning_rate_is_looked_for_where_it_is_better(comparisons, monkeypatch, tmp_path, best, tried, edge):
    methods, _, tuned_runs = comparisons
    runs = []

    def run(cell, rate, seed, options):
        runs.append((rate, seed))
        return {"val_accuracy_last": 1 / (1 + abs(math.log(rate / best))), "test_accuracy_last": seed / 10}

    monkeypatch.setattr(tuned_runs, "run", run)
    options = methods.parse(["--data", "x.npz", "--out", str(tmp_path), "--seeds", "1", "2", "3"])
    row = tuned_runs.tune(methods.cell("dp_muon", 256, options), options)
    assert len(row["tried"]) == tried
    assert row["at_the_edge"] == edge
    assert row["test"] == [0.1, 0.2, 0.3]
    # The other seeds at the chosen rate alone.
    assert {rate for rate, seed in runs if seed > 1} == {row["rate"]}


def test_an_interrupted_run_is_made_again_and_a_finished_one_is_kept(comparisons, monkeypatch, tmp_path):
    methods, _, tuned_runs = comparisons
    folder = tmp_path / "batch_256" / "dp_sgd" / "lr_1_seed_1"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("left by a run that was killed")  # dpl refuses to write over it
    found = []

    def fit(command, **kwargs):
        found.extend(sorted(path.name for path in folder.iterdir()))
        result = {"val_accuracy_last": 0.5, "test_accuracy_last": 0.4, "seconds": 1.0}
        (folder / "result.json").write_text(json.dumps(result))

    monkeypatch.setattr(tuned_runs.subprocess, "run", fit)
    options = methods.parse(["--data", "x.npz", "--out", str(tmp_path)])
    for _ in range(2):
        cell = methods.cell("dp_sgd", 256, options)
        assert tuned_runs.run(cell, 1.0, 1, options)["test_accuracy_last"] == 0.4
    assert found == ["log.txt", "run.yaml"]


def test_the_cells_of_a_comparison_are_tuned_at_once(comparisons, monkeypatch, tmp_path, capsys):
    _, recipes, tuned_runs = comparisons
    made = []

    def fit(command, **kwargs):
        folder = Path(command[-1]).parent
        made.append(folder)
        averages = "averaging" in yaml.safe_load((folder / "run.yaml").read_text())
        result = {"val_accuracy_last": 0.5, "test_accuracy_last": 0.5 if averages else 0.25, "seconds": 1.0}
        (folder / "result.json").write_text(json.dumps(result))

    monkeypatch.setattr(tuned_runs.subprocess, "run", fit)
    options = recipes.parse(["--data", "x.npz", "--out", str(tmp_path), "--jobs", "2"])
    tuned_runs.compare([recipes.cell(rung, 64, options) for rung in ("plain", "augmult", "average")], options)
    assert len(made) == len(set(made))
    assert {path.parent.name for path in made} == {"plain", "augmult", "average"}
    rows = {row["name"]: row["test"] for row in json.loads((tmp_path / "table.json").read_text())}
    assert rows == {"plain": [0.25, 0.25], "augmult": [0.25, 0.25], "average": [0.5, 0.5]}
    assert "| 64 | average | " in capsys.readouterr().out


def test_every_cell_of_a_comparison_is_a_configuration(comparisons, tmp_path):
    """Each is accepted as `dpl fit` would; one of each comparison is trained."""
    methods, recipes, _ = comparisons
    compose = Composer()
    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), np.uint8)
    np.savez(tmp_path / "images.npz", train_images=images, train_labels=np.arange(40) % 10)
    for module, names in ((methods, methods.METHODS), (recipes, recipes.LADDER)):
        options = module.parse(["--data", str(tmp_path / "images.npz"), "--out", str(tmp_path), "--epochs", "1"])
        for name in names:
            folder = tmp_path / module.__name__ / name
            folder.mkdir(parents=True)
            cell = module.cell(name, 18, options)
            config = cell.configuration(0.1, 1, folder)
            config["privacy"]["delta"] = 1e-3
            (folder / "run.yaml").write_text(yaml.safe_dump(config))
            prepare_to_train(compose(["--config", str(folder / "run.yaml")]))
            if name != list(names)[-1]:
                continue
            main(["fit", "--config", str(folder / "run.yaml")])
            result = json.loads((folder / "result.json").read_text())
            assert result["num_steps"] == 2
            assert result["val_accuracy_last"] is not None


@pytest.fixture
def finetune(monkeypatch):
    """The module ``finetune`` for a network that is small."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import finetune

    monkeypatch.setattr(finetune, "BACKBONE", "efficientnet_lite0")
    return finetune


def test_weights_are_matched_by_their_order_and_kind(finetune, tmp_path):
    import timm

    network = timm.create_model("efficientnet_lite0").state_dict()
    names = [name for name in network if not name.endswith("num_batches_tracked")]
    package = {f"layer_{k}.{name.rpartition('.')[2]}": network[name] + k for k, name in enumerate(names)}
    torch.save(package, tmp_path / "package.pth")
    finetune.converted(tmp_path / "package.pth", tmp_path / "weights.pth")
    saved = torch.load(tmp_path / "weights.pth", weights_only=True)
    assert all(torch.equal(saved[name], network[name] + k) for k, name in enumerate(names))
    package.popitem()
    torch.save(package, tmp_path / "package.pth")
    with pytest.raises(ValueError, match="has 246 tensors, efficientnet_lite0 has 247"):
        finetune.converted(tmp_path / "package.pth", tmp_path / "weights.pth")


def test_what_is_trained_is_a_configuration(finetune, monkeypatch, tmp_path, capsys):
    import timm

    images = np.random.default_rng(0).integers(0, 255, (40, 8, 8, 3), np.uint8)
    arrays = {"train_images": images, "test_images": images[:10]}
    arrays |= {"train_labels": np.arange(40) % 10, "test_labels": np.arange(10)}
    np.savez(tmp_path / "images.npz", **arrays)
    torch.save(timm.create_model("efficientnet_lite0").state_dict(), tmp_path / "weights.pth")
    # The delta of 1e-5 stands: 36 images are far fewer than it is meant for, and the noise is large.
    arguments = ["--data", str(tmp_path / "images.npz"), "--out", str(tmp_path), "--size", "32", "--probe-size", "32"]
    arguments += ["--batch-size", "18", "--probe-batch-size", "18", "--epochs", "1", "--probe-epochs", "1"]
    options = finetune.parse([*arguments, "--seeds", "1", "--epsilons", "4", "--only", "probe", "last_block"])
    monkeypatch.setattr(finetune, "parse", lambda: options)
    monkeypatch.setattr(finetune.tuned_runs, "tune", lambda cell, options: {"rate": 1.0})
    monkeypatch.setattr(subprocess, "run", lambda command, **kwargs: main(command[2:]))  # without a process for each
    finetune.main()
    said = capsys.readouterr().out
    assert "features: " in said
    for way in ("probe", "last_block"):
        (row,) = (line for line in said.splitlines() if line.startswith(f"| {way} | 4 |"))
        assert row.split(" | ")[5] == "2"


def test_planted_signals_are_found_as_theory_says(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import spiked

    found = spiked.measure(64, 576, 1, 3.0, draws=3)
    assert found["error"] == pytest.approx(spiked.closed_form(64, 576, 3.0), abs=0.05)
    assert found["gated"] > 0.8 > 0.3 > found["Newton-Schulz"]


@pytest.fixture
def scattering(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import scattering

    return scattering


def test_the_rate_on_scattering_lets_noise_add_up_to_what_it_says(scattering):
    steps, batch_size = 400, 64
    plan = RunShape(num_train=640, expected_batch_size=batch_size, num_steps=steps, delta=1e-3).with_noise(2.0)
    assert scattering.rate(plan, 1.5, 0.01) == 0.01
    lr = scattering.rate(plan, 1.5, math.inf)
    weights = torch.zeros(4000, requires_grad=True)
    optimizer = torch.optim.SGD([weights], lr=lr, momentum=scattering.MOMENTUM)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        weights.grad = torch.randn(4000) * plan.noise_multiplier / batch_size
        optimizer.step()
        schedule.step()
    assert float(weights.detach().std()) == pytest.approx(1.5, rel=0.07)


def test_cifar_is_written_as_one_file_of_half_the_size(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import cifar_npz

    monkeypatch.setattr(torchvision.datasets.cifar, "check_integrity", lambda path, md5=None: Path(path).is_file())
    folder, labels = tmp_path / "cifar-10-batches-py", [3, 0, 9]
    folder.mkdir()
    for name in [*(f"data_batch_{index}" for index in range(1, 6)), "test_batch"]:
        pixels = np.random.default_rng(len(name)).integers(0, 255, (3, 3072), dtype=np.uint8)
        (folder / name).write_bytes(pickle.dumps({"data": pixels, "labels": labels}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    whole, half, again = (tmp_path / f"{name}.npz" for name in ("whole", "half", "again"))
    cifar_npz.main(["--root", str(tmp_path), "--out", str(whole)])
    cifar_npz.main(["--root", str(tmp_path), "--half", "--out", str(half)])
    cifar_npz.main(["--npz", str(whole), "--half", "--out", str(again)])
    assert "train_images (15, 16, 16, 3)" in capsys.readouterr().out
    found, small = np.load(whole), np.load(half)
    assert all((small[name] == np.load(again)[name]).all() for name in small)
    four = found["test_images"][2, 4:6, 10:12].astype(float).mean((0, 1))
    assert np.abs(small["test_images"][2, 2, 5] - four).max() <= 0.5
    data = NpzImages(half, num_classes=10)
    assert (data.num_train, data.image_size, data.in_channels) == (15, 16, 3)
    assert small["test_labels"].tolist() == labels


def test_a_run_on_scattering_is_a_configuration(scattering, monkeypatch, tmp_path, capsys):
    images = np.random.default_rng(0).integers(0, 255, (60, 16, 16, 3), np.uint8)
    labels = np.arange(60) % 10
    np.savez(tmp_path / "d.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)

    def run(cell, rate, seed, options):
        folder = tmp_path / cell.name
        folder.mkdir()
        config = cell.configuration(rate, seed, folder)
        config["trainer"] |= {"max_steps": 1, "max_epochs": -1, "limit_val_batches": 0}
        (folder / "run.yaml").write_text(yaml.safe_dump(config))
        main(["fit", "--config", str(folder / "run.yaml")])
        assert config["privacy"]["accountant"] == "prv"  # as the plan from which the rate follows
        return json.loads((folder / "result.json").read_text()) | {"test_accuracy_last": 0.5}

    monkeypatch.setattr(scattering.tuned_runs, "run", run)
    small = {name: trained._replace(batch_size=20) for name, trained in scattering.TRAINED.items()}
    monkeypatch.setattr(scattering, "TRAINED", small)
    sizes = ["--num-train", "54", "--seeds", "1", "--epsilons", "8"]
    scattering.main(["--data", str(tmp_path / "d.npz"), "--out", str(tmp_path / "out"), *sizes])
    shown = capsys.readouterr().out
    assert "| linear | 8 |" in shown
    assert "| network | 8 |" in shown


def test_moves_along_the_directions_of_the_gradient_are_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import weak_directions

    torch.manual_seed(0)
    model, features, labels = torch.nn.Linear(6, 4, bias=False), torch.randn(600, 6), torch.randint(4, (600,))
    torch.nn.functional.cross_entropy(model(features), labels).backward()
    gradient = model.weight.grad
    values = torch.linalg.svdvals(gradient)
    # A step along the gradient moves in each pair by its singular value, and the polar factor by one. The gradients of
    # the classes add up to zero, so that the last of the four pairs is any.
    u, _, v = torch.linalg.svd(gradient, full_matrices=False)
    for move, expected in ((gradient, values), (u @ v, torch.ones(4)), (-u[:, 2:3] @ v[2:3], -torch.eye(4)[2])):
        found = weak_directions.downhill(model, features, labels, {"weight": move})["weight"]
        assert torch.allclose(found[:3], expected[:3], atol=1e-4)

    images = np.random.default_rng(0).integers(0, 255, (80, 16, 16, 3), np.uint8)
    labels = np.arange(80) % 10
    np.savez(tmp_path / "d.npz", train_images=images, train_labels=labels, test_images=images, test_labels=labels)
    steps = []
    monkeypatch.setattr(
        weak_directions,
        "PrivateStep",
        lambda *args, plan, **given: steps.append(plan.num_steps) or PrivateStep(*args, plan=plan, **given),
    )
    data = ["--data", str(tmp_path / "d.npz")]
    weak_directions.main([*data, "--epochs", "1", "--runs", "dp_sgd,36,1"])
    weak_directions.main([*data, "--steps", "3", "--runs", "selective,36,1"])
    assert steps == [72 // 36, 3]
    shown = capsys.readouterr().out
    # Six 3 x 3 convolutions after the first, two of the shortcuts, the last layer, and the mean.
    assert shown.count("| 36 | dp_sgd, 1 |") == shown.count("| 36 | selective, 1 |") == 1 + 6 + 2 + 1 + 1


def test_the_pipeline_is_measured_on_as_many_files_as_asked(monkeypatch, tmp_path, capsys):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pipeline

    monkeypatch.setattr(pipeline, "CLASSES", 3)
    monkeypatch.setattr(pipeline, "_DIFFERENT", 4)
    arguments = [
        "--root",
        str(tmp_path),
        "--files",
        "50",
        "--batch-size",
        "10",
        "--physical",
        "8",
        "--image-size",
        "32",
    ]
    for _ in range(2):  # the files are made once
        monkeypatch.setattr(sys, "argv", ["pipeline.py", *arguments, "--workers", "1", "--augmult", "1", "2"])
        pipeline.main()
        monkeypatch.setattr(pipeline.Image, "fromarray", lambda *args: pytest.fail("made again"))
    assert len(list((tmp_path / "train").rglob("*.JPEG"))) == 50
    printed = capsys.readouterr().out
    assert printed.count("50 files listed") == 2
    assert printed.count("augmult 2:") == 2


def test_processor_time_of_workers_counts(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pipeline

    used = {
        resource.RUSAGE_SELF: SimpleNamespace(ru_utime=1.0, ru_stime=2.0),
        resource.RUSAGE_CHILDREN: SimpleNamespace(ru_utime=4.0, ru_stime=8.0),
    }
    monkeypatch.setattr(resource, "getrusage", used.__getitem__)
    assert pipeline.processor_seconds() == 15.0


def test_a_soak_passes_where_memory_and_time_stay_and_names_what_grew(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak

    lines = soak.run(20, 10, tmp_path / "soak.jsonl")
    assert [line["step"] for line in lines] == [10, 20]
    assert lines[1]["journal_bytes"] > lines[0]["journal_bytes"] > 0
    assert [json.loads(line) for line in (tmp_path / "soak.jsonl").read_text().splitlines()] == lines
    even = [{**lines[0], "step": step} for step in range(1000, 5001, 500)]
    assert soak.verdict(even)["passed"]
    for name, factor in (("resident_mib", 1.06), ("median_ms", 1.2), ("files", 2), ("threads", 2)):
        grown = [*even[:-2], *({**line, name: line[name] * factor} for line in even[-2:])]
        assert not soak.verdict(grown)["passed"], name


def test_the_audit_campaign_counts_what_was_found(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import audit

    line = {"fault": "2 C", "found_by": ["Canaries, all together"], "canaries_above": True}
    missed = {**line, "found_by": [], "canaries_above": False}
    assert audit.table([line, line, missed]).endswith("| 2 C | 2 of 3 | Canaries, all together | 2 of 3 |")


def test_runs_that_are_killed_are_finished(tmp_path, warm_python):
    command = [warm_python, BENCHMARKS / "kills.py", tmp_path, "--kills", "2", "--ranks", "1"]
    for kills in (2, 2):  # the second one finds all of them done
        shown = subprocess.run(
            [*command[:-3], str(kills), *command[-2:]],
            capture_output=True,
            text=True,
            timeout=250,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert shown.returncode == 0, shown.stdout + shown.stderr[-3000:]
        assert shown.stdout.startswith("2 kills")
    trials = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert all(trial["num_steps"] > 0 and trial["recorded"] > 0 for trial in trials)


def test_the_page_of_evidence_is_the_report_without_what_leads_to_the_runs(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import evidence

    report = Document("A grid", tmp_path)
    report.say("2 of 2 runs are finished.")
    report.table([["method", "B = 256"], ["DP-SGD", "40.1 ± 0.2"]])
    report.table([["run", "statement"], ["DP-SGD 40.1", "not for release"]])
    report.picture("a_grid_accuracy", "Test accuracy", svg="<svg/>")
    report.table([["method", "last"], ["DP-SGD", "40.1"]])
    report.say("The folder of a run begins with its labels; dpl report with its log folder writes its page.")
    assert evidence.page(report.markdown(), "`dpl sweep a_grid`: 2.0 hours.") == (
        "# A grid\n\n`dpl sweep a_grid`: 2.0 hours.\n\n2 of 2 runs are finished.\n\n"
        "| method | B = 256 |\n| --- | --- |\n| DP-SGD | 40.1 ± 0.2 |\n\n"
        "| run | statement |\n| --- | --- |\n| DP-SGD 40.1 | not for release |\n\n"
        "![Test accuracy](a_grid_accuracy.svg)\n\n"
        "| method | last |\n| --- | --- |\n| DP-SGD | 40.1 |\n"
    )
