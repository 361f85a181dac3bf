"""What the README and docs show works: code runs, commands parse, output is what the command prints."""

import contextlib
import json
import os
import re
import shlex
import subprocess
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from pages import ROOT, blocks, lines, links, read, spans, table, tables
from PIL import Image
from torch.nn import functional as F

from dp_lightning.cli import main
from dp_lightning.commands import analyze, audit, export, report, sweep, verify
from dp_lightning.commands.analysis_run import AnalysisRun
from dp_lightning.commands.audit_runs import AuditRuns
from dp_lightning.commands.training import TrainingCLI
from dp_lightning.experiments.grid import Grid
from dp_lightning.models import WideResNet
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy import ClipPlan, RunShape, clipped_gradient_sum
from dp_lightning.private_run.trainer_checks import check_settings

pytestmark = pytest.mark.docs

DOCUMENTS = ("README.md", "CHANGELOG.md", "SECURITY.md", "configs/README.md")
DOCUMENTS += tuple(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))
README, AUDIT, CLUSTERS = read("README.md"), read("docs/audit.md"), read("docs/clusters.md")
PERFORMANCE, METHODS, RECIPES = read("docs/performance.md"), read("docs/methods.md"), read("docs/recipes.md")
COMMANDS = lines("bash", README)
# Every `dpl` line, those inside `docker run` included.
DPL = [line for line in COMMANDS if line.startswith("dpl ")]
DPL += ["dpl " + line.split(" dp-lightning ")[1] for line in COMMANDS if "docker run" in line]
TRAINING = sorted({line for line in DPL if line.split()[1] in ("fit", "test")})
# Commands with what they print: in a session each begins with "$ "; in the README they are the blocks side by side.
SESSIONS = "".join(blocks("text", read("docs/reproduction.md")))
PRICED = [(line, shown) for line, _, shown in (part.partition("\n") for part in SESSIONS.split("$ ")[1:])]
PRICED += zip([line for line in DPL if line.split()[1] == "account"], blocks("text", README), strict=True)


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with everything that the README's commands expect to find."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(tmp_path / "photos" / folder / "0.png")
        (tmp_path / "scans" / folder / "p1").mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(tmp_path / "scans" / folder / "p1" / "0.png")
    np.savez("images.npz", train_images=np.zeros((4, 28, 28, 3), np.uint8), train_labels=np.array([0, 1, 2, 1]))
    for block in blocks("yaml", README):
        name = block.splitlines()[0].removeprefix("# ")
        assert name.endswith(".yaml"), "a yaml block starts with its file name"
        Path(name).write_text(block)
    return tmp_path


def instantiate(arguments: list[str]) -> TrainingCLI:
    """Everything that the command builds before it starts to train."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arguments given from Python
        return TrainingCLI(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=arguments,
            run=False,
        )


@pytest.mark.parametrize("line", TRAINING)
def test_a_training_command_builds_its_run_from_allowed_settings(line, workplace):
    arguments = shlex.split(line.replace("$PWD", str(workplace)))[2:]
    if "--ckpt_path" in arguments:
        # The configuration of an earlier run: any complete one serves, and the checkpoint is not opened here.
        position = arguments.index("--ckpt_path")
        assert arguments[position + 1].endswith(".ckpt")
        arguments = ["--config", "configs/wrn16_cifar10.yaml", *arguments[position + 2 :]]
    with without_weights():  # which cannot be downloaded in a test
        cli = instantiate(arguments)
    check_settings(cli.trainer, cli.model)
    data, persons = cli.datamodule, cli.privacy.unit_of_privacy == "group"
    assert cli.privacy.num_train == (data.num_train_groups if persons else data.num_train)


GRIDS = [line for line in DPL if line.split()[1] in ("sweep", "report")]


@pytest.mark.parametrize("line", GRIDS)
def test_a_command_for_a_grid_names_one_and_its_options(line, workplace):
    arguments = shlex.split(line)[1:]
    options = {"sweep": sweep, "report": report}[arguments[0]]._parser().parse_args(arguments[1:])
    grid = options.grid if arguments[0] == "sweep" else options.target
    assert len(list(Grid.load(grid).cells())) >= 8


ANALYSES = [line for line in DPL if line.split()[1] == "analyze"]


@pytest.mark.parametrize("line", ANALYSES)
def test_a_command_of_an_analysis_builds_its_run(line, workplace):
    options, of_fit = analyze._parser().parse_known_args(shlex.split(line)[2:])
    run = AnalysisRun(of_fit, options.ckpt_path, num_batches=options.batches)
    assert run.data.num_train == 50_000


AUDITED = [line for line in [*DPL, *lines("bash", AUDIT)] if line.startswith("dpl audit")]


@pytest.mark.parametrize("line", AUDITED)
def test_a_command_of_an_audit_builds_its_runs(line, workplace):
    options, of_fit = audit._parser().parse_known_args(shlex.split(line)[2:])
    assert options.canaries >= 500
    runs = AuditRuns([*of_fit, "--trainer.accelerator", "cpu", "--trainer.devices", "1"])
    assert runs.noise_standard_deviation > 0


LOOPS = {line for text in (README, CLUSTERS) for line in lines("bash", text) if "until " in line}
# Short, and killed the first time, when it has saved something.
KILLED_ONCE = """#!/bin/sh
set -- "$@" --trainer.accelerator cpu --trainer.max_epochs 6 --privacy.accountant rdp
[ -e killed ] && exec {python} -m dp_lightning "$@"
touch killed
{python} -m dp_lightning "$@" &
while ! ls lightning_logs/*/checkpoints/*.ckpt; do sleep 0.02; done
kill -9 $!
exit 137
"""


def test_the_loop_shown_brings_a_run_that_is_killed_to_its_end(workplace, warm_python):
    (line,) = LOOPS
    (workplace / "dpl").write_text(KILLED_ONCE.format(python=warm_python))
    (workplace / "dpl").chmod(0o755)
    environment = {**os.environ, "PATH": f"{workplace}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-c", line], env=environment, check=True, timeout=200, capture_output=True)
    assert (workplace / "killed").exists()
    assert json.loads(Path("lightning_logs/version_1/result.json").read_text())["completed"] is True
    assert json.loads(Path("lightning_logs/version_1/privacy_statement.json").read_text())["num_steps"] == 16


@pytest.mark.parametrize("line", sorted({*lines("bash", CLUSTERS)} - LOOPS))
def test_a_command_for_a_cluster_builds_its_run(line, workplace):
    """Each has the arguments of ``dpl fit`` at its end; the devices are exchanged for one that is here."""
    start = shlex.split(line)[0]
    assert start in ("dpl", "docker", "torchrun", "sbatch") or (ROOT / start).stat().st_mode & 0o100
    arguments = "--config" + line.replace("$PWD", str(workplace)).split("--config", 1)[1]
    here = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "1"]
    cli = instantiate([*shlex.split(arguments), *here])
    check_settings(cli.trainer, cli.model)


def test_the_timeout_shown_is_the_strategys(workplace):
    (block,) = blocks("yaml", CLUSTERS)
    Path("timeout.yaml").write_text(block)
    cli = instantiate(
        ["--config", "configs/digits.yaml", "--config", "timeout.yaml", *("--trainer.accelerator", "cpu")]
    )
    assert cli.trainer.strategy._timeout.total_seconds() == 300


def test_the_fragment_shown_is_the_method_it_names(workplace):
    shown = [line for line in TRAINING if "postprocess/dp_muon.yaml" in line]
    cli = instantiate(shlex.split(shown[0])[2:])
    assert "Orthogonalize" in [type(transform).__name__ for transform in cli.postprocess.chain.transforms]


@pytest.mark.parametrize(("line", "shown"), PRICED, ids=[line for line, _ in PRICED])
def test_account_prints_what_is_shown(line, shown, capsys):
    with contextlib.suppress(SystemExit):
        main(shlex.split(line)[1:])
    assert capsys.readouterr().out == shown


def test_there_is_something_to_check():
    assert len(TRAINING) >= 7
    assert len(PRICED) == 4
    assert len(GRIDS) == 4
    assert len(ANALYSES) == 2
    assert len(blocks("python", README)) == 2


@pytest.mark.parametrize(
    ("code", "files"), list(zip(blocks("python", README), (1, 0), strict=True)), ids=["own-module", "own-loop"]
)
def test_python_code_runs_as_shown(code, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and logging
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "0.0001)-DP by PRV, add or remove one training example" in capsys.readouterr().out
    assert len(list(tmp_path.glob("lightning_logs/version_0/privacy_statement.md"))) == files


def test_make_commands_are_targets_of_the_makefile():
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    shown = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    assert {"quickstart", "test"} <= shown <= targets


@pytest.mark.benchmarks
def test_benchmark_commands_are_accepted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import methods
    import postprocess
    import ranks
    import spiked
    import step

    shown = [line for text in (PERFORMANCE, METHODS, RECIPES) for line in (*lines("bash", text), *spans(text))]
    for benchmark, least in ((step, 2), (ranks, 3), (spiked, 1), (postprocess, 1), (methods, 1)):
        start = ["python", f"benchmarks/{benchmark.__name__}.py"]
        found = [words[2:] for words in map(shlex.split, shown) if words[:2] == start]
        assert len(found) >= least
        for options in found:
            benchmark.parse(options)
    assert "benchmarks/step.py" in (ROOT / "Makefile").read_text()


def test_the_ways_shown_are_those_of_the_model(capsys):
    model = WideResNet(16, 4, 10).to(memory_format=torch.channels_last)
    images = torch.randn(1, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    clipped_gradient_sum(
        model, F.cross_entropy, images, torch.tensor([3]), clip_plan=ClipPlan.flat(max_grad_norm=1.0), explain=True
    )
    printed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    (shown,) = blocks("text", PERFORMANCE)
    assert [line.split(maxsplit=1) for line in shown.splitlines()] == [
        [name, way] for name, way in printed if "norm" not in name
    ]


def test_the_noise_level_is_what_the_page_of_methods_shows(capsys):
    (code,) = blocks("python", METHODS)
    exec(compile(code, "methods.md", "exec"), {})
    shown = code.splitlines()[-1].rpartition("  # ")[2]
    assert capsys.readouterr().out.strip() == shown


def test_the_configuration_of_the_page_of_methods_trains(workplace):
    (block,) = blocks("yaml", METHODS)
    Path("own.yaml").write_text(block)
    quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--privacy.accountant", "rdp"]
    main(["fit", "--config", "configs/digits.yaml", "--config", "own.yaml", "--trainer.max_steps", "2", *quiet])


def test_the_recipes_noise_is_what_their_steps_need():
    """What is solved for is computed again, and is De et al.'s in all cells but the one that the page explains."""
    steps_and_noise = table(RECIPES, "ε")
    epsilons = [float(cell) for cell in steps_and_noise.head[1:]]
    rows = [[cell.text for cell in row] for row in steps_and_noise.rows]
    for network, batch_size, block in (("WRN-16-4", 4096, rows[:3]), ("WRN-40-4", 16384, rows[3:])):
        steps, theirs, solved = block
        assert [row[0] for row in block] == [
            f"{network}, B = {batch_size:,}: steps",
            "their noise multiplier",
            "solved for here",
        ]
        for epsilon, count, published, shown in zip(epsilons, steps[1:], theirs[1:], solved[1:], strict=True):
            shape = RunShape(
                num_train=50_000,
                expected_batch_size=batch_size,
                num_steps=int(count.replace(",", "")),
                delta=1e-5,
            )
            plan = shape.calibrate(epsilon, accountant="rdp")
            assert float(shown) == pytest.approx(plan.noise_multiplier, abs=0.0051)  # two decimals
            if (network, epsilon) != ("WRN-16-4", 8):
                assert float(published) == pytest.approx(plan.noise_multiplier, rel=0.012)


def test_a_check_is_shown_as_it_is_called():
    (line,) = [line for line in DPL if line.startswith("dpl verify")]
    assert verify._parser().parse_args(line.split()[2:]).run == "lightning_logs/version_0"


def test_an_export_is_shown_as_it_is_called():
    (line,) = [line for line in DPL if line.startswith("dpl export")]
    assert export._parser().parse_args(shlex.split(line)[2:]).out == "model"


def test_every_fragment_is_on_the_page_of_methods():
    listed = [name for row in table(METHODS, "method", "fragment").rows for name in row[1].code]
    folder = "configs/fragments/postprocess"
    assert sorted(listed) == sorted(f"{folder}/{path.name}" for path in (ROOT / folder).iterdir())


FOLDERS = ("dp_lightning", "tests", "tools", "configs", "docker", "benchmarks")
ENDINGS = (".py", ".yaml", ".sh", ".sbatch")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    text = read(document)
    for target in links(text):
        path = target.partition("#")[0]
        if path and ":" not in path:
            assert ((ROOT / document).parent / path).exists(), target
    for path in spans(text):
        if path.split("/")[0] in FOLDERS and path.endswith(ENDINGS) and not set(path) & set("*<{ "):
            assert (ROOT / path).is_file(), path


def test_names_in_the_notation_exist():
    """Every name stands in the source of its file, and a class's attribute in the class's file."""
    (notation,) = tables(read("docs/notation.md"))
    assert len(notation.rows) > 20
    for *_, names, file in notation.rows:
        (path,) = file.code
        words = set(re.findall(r"\w+", (ROOT / path).read_text()))
        assert names.code
        for name in names.code:
            assert set(name.split(".")) <= words, f"{name} in {path}"
