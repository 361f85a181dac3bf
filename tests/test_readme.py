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
from dp_lightning.privacy import ClipPlan, PrivacyPlan, clipped_gradient_sum
from dp_lightning.private_run.trainer_checks import check_settings

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
DOCUMENTS = ("README.md", "configs/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
AUDIT = (ROOT / "docs/audit.md").read_text()
CLUSTERS = (ROOT / "docs/clusters.md").read_text()
PERFORMANCE = (ROOT / "docs/performance.md").read_text()
METHODS = (ROOT / "docs/methods.md").read_text()
RECIPES = (ROOT / "docs/recipes.md").read_text()


def blocks(language: str, text: str = README) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines()]


def dpl_lines() -> list[str]:
    """Every `dpl` line, those inside `docker run` included."""
    lines = [line for line in commands() if line.startswith("dpl ")]
    return lines + ["dpl " + line.split(" dp-lightning ")[1] for line in commands() if "docker run" in line]


TRAINING = sorted({line for line in dpl_lines() if line.split()[1] in ("fit", "test")})
PRICED = re.findall(r"^\$ (dpl account.*)\n((?:[^$`].*\n)+)", (ROOT / "docs/reproduction.md").read_text(), re.M)
PRICED += zip([line for line in commands() if line.startswith("dpl account")], blocks("text"), strict=True)


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
    for block in blocks("yaml"):
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


GRIDS = [line for line in dpl_lines() if line.split()[1] in ("sweep", "report")]


@pytest.mark.parametrize("line", GRIDS)
def test_a_command_for_a_grid_names_one_and_its_options(line, workplace):
    arguments = shlex.split(line)[1:]
    options = {"sweep": sweep, "report": report}[arguments[0]]._parser().parse_args(arguments[1:])
    assert len(list(Grid.load(options.grid).cells())) >= 8


def test_the_grid_shown_is_one(workplace, tmp_path):
    (block,) = blocks("yaml", (ROOT / "configs/README.md").read_text())
    (tmp_path / "own.yaml").write_text(
        block.replace("base: [", "base: [configs/").replace("config: ", "config: configs/")
    )
    assert len(list(Grid.load(tmp_path / "own.yaml").cells())) == 12


ANALYSES = [line for line in dpl_lines() if line.split()[1] == "analyze"]


@pytest.mark.parametrize("line", ANALYSES)
def test_a_command_of_an_analysis_builds_its_run(line, workplace):
    options, of_fit = analyze._parser().parse_known_args(shlex.split(line)[2:])
    run = AnalysisRun(of_fit, options.ckpt_path, num_batches=options.batches)
    assert run.data.num_train == 50_000


AUDITED = [line for line in dpl_lines() if line.split()[1] == "audit"]
AUDITED += [line for line in "".join(blocks("bash", AUDIT)).splitlines() if line.startswith("dpl ")]


@pytest.mark.parametrize("line", AUDITED)
def test_a_command_of_an_audit_builds_its_runs(line, workplace):
    options, of_fit = audit._parser().parse_known_args(shlex.split(line)[2:])
    assert options.canaries >= 500
    runs = AuditRuns([*of_fit, "--trainer.accelerator", "cpu", "--trainer.devices", "1"])
    assert runs.noise_standard_deviation > 0


@pytest.mark.parametrize("path", sorted((ROOT / "configs/grids").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_list_of_grids_has_their_runs_and_costs(path):
    sizes = {"tiny_imagenet": 100_000, "imagenet": 4 * 1_281_167, "svhn": 73_257, "digits": 1437}
    examples = next((count for name, count in sizes.items() if name in path.stem), 50_000)
    runs = len(list(Grid.load(path).cells()))
    epochs = {"imagenet": 120, "digits": 57}.get(path.stem, 50)
    millions = runs * epochs * examples / 1e6
    shown = f"{millions:.0f}" if millions >= 1 else f"{millions:.1f}"
    table = (ROOT / "configs/README.md").read_text()
    assert re.search(rf"^\| `{path.stem}` \| .* \| {runs} \| {shown} \|$", table, re.M)


LOOPS = {line for text in (README, CLUSTERS) for line in "".join(blocks("bash", text)).splitlines() if "until " in line}
# Short, and killed the first time, when it has saved something.
DPL = """#!/bin/sh
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
    (workplace / "dpl").write_text(DPL.format(python=warm_python))
    (workplace / "dpl").chmod(0o755)
    environment = {**os.environ, "PATH": f"{workplace}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-c", line], env=environment, check=True, timeout=200, capture_output=True)
    assert (workplace / "killed").exists()
    assert json.loads(Path("lightning_logs/version_1/result.json").read_text())["completed"] is True
    assert json.loads(Path("lightning_logs/version_1/privacy_statement.json").read_text())["num_steps"] == 16


@pytest.mark.parametrize("line", sorted({*"".join(blocks("bash", CLUSTERS)).splitlines()} - LOOPS))
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
    lines = [line for line in TRAINING if "postprocess/dp_muon.yaml" in line]
    cli = instantiate(shlex.split(lines[0])[2:])
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
    assert len(blocks("python")) == 2


@pytest.mark.parametrize(("code", "files"), zip(blocks("python"), (1, 0), strict=True), ids=["own-module", "own-loop"])
def test_python_code_runs_as_shown(code, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and logging
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    assert "0.0001)-DP by PRV, add or remove one training example" in capsys.readouterr().out
    assert len(list(tmp_path.glob("lightning_logs/version_0/privacy_statement.md"))) == files


def test_make_commands_are_targets_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for line in commands():
        if line.startswith("make "):
            assert re.search(rf"^{line.split()[1]}:", makefile, re.MULTILINE), line


def test_benchmark_commands_are_accepted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import methods
    import postprocess
    import ranks
    import spiked
    import step

    for benchmark, least in ((step, 2), (ranks, 3), (spiked, 1), (postprocess, 1), (methods, 1)):
        lines = re.findall(rf"python benchmarks/{benchmark.__name__}\.py[^`\n]*", PERFORMANCE + METHODS + RECIPES)
        assert len(lines) >= least
        for line in lines:
            benchmark.parse(shlex.split(line)[2:])
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
    (shown,) = re.findall(r"print\(.*\)  # ([\d.]+)", code)
    assert capsys.readouterr().out.strip() == shown


def test_the_configuration_of_the_page_of_methods_trains(workplace):
    (block,) = blocks("yaml", METHODS)
    Path("own.yaml").write_text(block)
    quiet = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--privacy.accountant", "rdp"]
    main(["fit", "--config", "configs/digits.yaml", "--config", "own.yaml", "--trainer.max_steps", "2", *quiet])


def test_the_recipes_noise_is_what_their_steps_need():
    """The table's noise multipliers, which are De et al.'s, follow from its numbers of steps."""
    row = re.compile(r"^\| (.*?) \| (.*) \|$", re.M)
    rows = {name: cells.split(" | ") for name, cells in row.findall(RECIPES)}
    epsilons = [float(cell) for cell in rows["ε"]]
    noises = re.findall(r"^\| their noise multiplier \| (.*) \|$", RECIPES, re.M)
    for (network, batch_size), noise in zip((("WRN-16-4", 4096), ("WRN-40-4", 16384)), noises, strict=True):
        steps = [int(cell.replace(",", "")) for cell in rows[f"{network}, B = {batch_size:,}: steps"]]
        for epsilon, count, theirs in zip(epsilons, steps, noise.split(" | "), strict=True):
            plan = PrivacyPlan.calibrate(
                target_epsilon=epsilon,
                delta=1e-5,
                num_train=50_000,
                expected_batch_size=batch_size,
                num_steps=count,
                accountant="rdp",
            )
            if (network, epsilon) == ("WRN-16-4", 8):
                (said,) = re.findall(r"at ε = 8 a noise multiplier of ([\d.]+) is enough", RECIPES)
                assert plan.noise_multiplier == pytest.approx(float(said), abs=0.005)
            else:
                assert plan.noise_multiplier == pytest.approx(float(theirs), rel=0.012)


def test_a_check_is_shown_as_it_is_called():
    (line,) = [line for line in commands() if line.startswith("dpl verify")]
    assert verify._parser().parse_args(line.split()[2:]).run == "lightning_logs/version_0"


def test_an_export_is_shown_as_it_is_called():
    (line,) = [line for line in commands() if line.startswith("dpl export")]
    assert export._parser().parse_args(shlex.split(line)[2:]).out == "model"


def test_every_fragment_is_on_the_page_of_methods():
    listed = re.findall(r"`(configs/fragments/postprocess/[^`]+)`", METHODS)
    folder = "configs/fragments/postprocess"
    assert sorted(listed) == sorted(f"{folder}/{path.name}" for path in (ROOT / folder).iterdir())


def test_every_configuration_is_in_the_table_and_no_other():
    listed = set(re.findall(r"^\| `(configs/[^`]+)`", README, re.MULTILINE))
    grids = set((ROOT / "configs/grids").iterdir())  # they have a table of their own
    assert listed == {str(path.relative_to(ROOT)) for path in set((ROOT / "configs").rglob("*.yaml")) - grids}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    text = (ROOT / document).read_text()
    for target in re.findall(r"\]\(([^)#:]+)\)", text):
        assert ((ROOT / document).parent / target).exists(), target
    for path in re.findall(r"`((?:dp_lightning|tests|configs|docker|benchmarks)/[\w/]+\.(?:py|yaml|sh|sbatch))`", text):
        assert (ROOT / path).is_file(), path


def test_names_in_the_notation_exist():
    """Every name stands in the source of its file, and a class's attribute in the class's file."""
    rows = re.findall(r"^\|.*\| (`[^|]+`) \| `([^|]+)` \|$", (ROOT / "docs/notation.md").read_text(), re.M)
    assert len(rows) > 20
    for names, path in rows:
        source = (ROOT / path).read_text()
        for name in re.findall(r"`([^`]+)`", names):
            for part in name.split("."):
                assert re.search(rf"\b{part}\b", source), f"{name} in {path}"
