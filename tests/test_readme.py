"""What the README and the pages show works: code runs, commands parse, output is what the command prints.

The README and all pages are read as one text, in which every command, every configuration and every program has to be
one that a test takes. Pages with commands for other machines, or with tests of their own, are named below.
"""

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
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
from dp_lightning.commands import analyze, audit, export, init, report, sweep, verify
from dp_lightning.commands.analysis_run import AnalysisRun
from dp_lightning.commands.audit_runs import AuditRuns
from dp_lightning.commands.known_settings import require_known
from dp_lightning.commands.named_configs import with_paths
from dp_lightning.commands.training import TrainingCLI
from dp_lightning.experiments.grid import Grid
from dp_lightning.models import WideResNet
from dp_lightning.models.pretrained import without_weights
from dp_lightning.privacy import ClipPlan, RunShape, clipped_gradient_sum
from dp_lightning.privacy.parameters import trained_parameters
from dp_lightning.privacy.phases import Phases
from dp_lightning.private_run.trainer_checks import check_settings

pytestmark = pytest.mark.docs

DOCUMENTS = ("README.md", "CHANGELOG.md", "SECURITY.md", "configs/README.md")
DOCUMENTS += tuple(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
AUDIT, CLUSTERS, OWN_DATA = read("docs/audit.md"), read("docs/clusters.md"), read("docs/own_data.md")
PERFORMANCE, METHODS, RECIPES = read("docs/performance.md"), read("docs/methods.md"), read("docs/recipes.md")
OWN_MODULE, TRANSFORMS, ONE_EXAMPLE = (read(f"docs/{name}.md") for name in ("own_module", "transforms", "one_example"))
# Commands of the page about clusters start on machines that are not here.
GUIDES = [read(name) for name in DOCUMENTS if name != "docs/clusters.md"]
COMMANDS = [line for text in GUIDES for line in lines("bash", text)]
# Every `dpl` line, those inside `docker run` included.
DPL = [line for line in COMMANDS if line.startswith("dpl ")]
DPL += ["dpl " + line.split(" dp-lightning ")[1] for line in COMMANDS if "docker run" in line]
TRAINING = sorted({line for line in DPL if line.split()[1] in ("fit", "test")})
# Commands with what they print: in a session each begins with "$ "; elsewhere they are the blocks of a page in order.
SESSIONS = "".join(blocks("text", read("docs/reproduction.md")))
PRICED = [(line, shown) for line, _, shown in (part.partition("\n") for part in SESSIONS.split("$ ")[1:])]
for guide in GUIDES:
    if account := [line for line in lines("bash", guide) if line.startswith("dpl account")]:
        PRICED += zip(account, blocks("text", guide), strict=True)


def file_name(block):
    """The name in the first line of a block that is a file; None for another block."""
    first = block.partition("\n")[0].removeprefix("# ")
    return first if first.endswith((".yaml", ".py")) else None


FILES = {
    name: block
    for text in GUIDES
    for language in ("yaml", "python")
    for block in blocks(language, text)
    if (name := file_name(block))
}


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with everything that the commands of the pages expect to find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), str(tmp_path)])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        (tmp_path / "photos" / folder).mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(tmp_path / "photos" / folder / "0.png")
        (tmp_path / "scans" / folder / "p1").mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(tmp_path / "scans" / folder / "p1" / "0.png")
    np.savez("images.npz", train_images=np.zeros((4, 28, 28, 3), np.uint8), train_labels=np.array([0, 1, 2, 1]))
    for name, block in FILES.items():
        Path(name).write_text(block)
    yield tmp_path
    for name in FILES:  # the modules of this folder, which the next one has too
        sys.modules.pop(Path(name).stem, None)


def instantiate(arguments: list[str]) -> TrainingCLI:
    """Everything that the command builds before it starts to train."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about arguments given from Python
        return TrainingCLI(
            model_class=LightningModule,
            datamodule_class=LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=with_paths(["fit", *arguments])[1:],
            run=False,
        )


@pytest.mark.parametrize("line", TRAINING)
def test_a_training_command_builds_its_run_from_allowed_settings(line, workplace):
    arguments = shlex.split(line.replace("$PWD", str(workplace)))[2:]
    if "--ckpt_path" in arguments:
        position = arguments.index("--ckpt_path")
        checkpoint = arguments.pop(position + 1)
        del arguments[position]
        if checkpoint != "last":
            # The configuration of an earlier run: any complete one serves, and the checkpoint is not opened here.
            assert checkpoint.endswith(".ckpt")
            arguments[:position] = ["--config", "configs/wrn16_cifar10.yaml"]
    with without_weights():  # which cannot be downloaded in a test
        cli = instantiate(arguments)
    check_settings(cli.trainer, cli.model)
    data, persons = cli.datamodule, cli.privacy.unit_of_privacy == "group"
    assert cli.privacy.num_train == (data.num_train_groups if persons else data.num_train)


# A run's folder is given to `dpl report` too.
RUN_PAGES = [line for line in DPL if line.startswith("dpl report lightning_logs/")]
GRIDS = [line for line in DPL if line.split()[1] in ("sweep", "report") and line not in RUN_PAGES]


@pytest.mark.parametrize("line", sorted(set(RUN_PAGES)))
def test_a_command_for_the_page_of_a_run_names_its_folder_and_options(line):
    assert report._parser().parse_args(shlex.split(line)[2:]).target == Path("lightning_logs/version_0")


@pytest.mark.parametrize("line", GRIDS)
def test_a_command_for_a_grid_names_one_and_its_options(line, workplace):
    arguments = shlex.split(line)[1:]
    options = {"sweep": sweep, "report": report}[arguments[0]]._parser().parse_args(arguments[1:])
    grid = options.grid if arguments[0] == "sweep" else options.target
    own = str(grid) in FILES
    if own:  # beside the files of its base
        for path in (ROOT / "configs").glob("*.yaml"):
            Path(path.name).symlink_to(path)
    assert len(list(Grid.load(grid).cells())) >= (1 if own else 8)


ANALYSES = [line for line in DPL if line.split()[1] == "analyze"]


@pytest.mark.parametrize("line", ANALYSES)
def test_a_command_of_an_analysis_builds_its_run(line, workplace):
    options, of_fit = analyze._parser().parse_known_args(shlex.split(line)[2:])
    run = AnalysisRun(of_fit, options.ckpt_path, num_batches=options.batches)
    assert run.data.num_train == 50_000


AUDITED = sorted({line for line in DPL if line.startswith("dpl audit")})


@pytest.mark.parametrize("line", AUDITED)
def test_a_command_of_an_audit_builds_its_runs(line, workplace):
    options, of_fit = audit._parser().parse_known_args(shlex.split(line)[2:])
    assert options.canaries >= 500
    runs = AuditRuns([*of_fit, "--trainer.accelerator", "cpu", "--trainer.devices", "1"])
    assert runs.noise_standard_deviation > 0


LOOPS = {line for line in (*COMMANDS, *lines("bash", CLUSTERS)) if line.startswith("until ")}
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
    assert json.loads(Path("lightning_logs/version_1/privacy_statement.json").read_text())["num_steps"] == 6 * 3


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
    assert len(TRAINING) >= 18
    assert len(PRICED) == 5
    assert len(GRIDS) == 9
    assert len(ANALYSES) == 2
    assert len(AUDITED) == 3


def test_every_command_shown_is_one_that_a_test_takes():
    taken = {"fit", "test", "predict", "sweep", "report", "analyze", "audit", "account", "verify", "export", "init"}
    taken |= {"pretrain"}
    elsewhere = lines("bash", read("docs/planning.md"))  # each in test_planning_page.py
    assert {line.split()[1] for line in DPL if line not in elsewhere} == taken


def test_weights_from_random_images_start_a_run_as_shown(workplace):
    page = read("docs/fine_tuning.md")
    made = [shlex.split(line)[1:] for line in DPL if line.startswith("dpl pretrain")]
    small = ["--images", "60", "--steps", "1", "--batch-size", "8", "--view-size", "8"]
    for arguments in made:
        main([*arguments, *small])
    (started,) = [shlex.split(line)[2:] for line in TRAINING if ".weights random" in line]
    instantiate(started)  # from one of the files
    assert len(made) == 3
    weights = shlex.split(re.search(r"`(--model\.init_args\.weights .*?)`", page)[1])
    frozen = dict(re.findall(r"'(\{[^']*?\})'` for\s+`(\w+)`", page))
    for patterns, module in frozen.items():
        cli = instantiate(["--config", "configs/digits.yaml", *(weights if module == "SmallCNNModule" else MODEL)])
        Phases(json.loads(patterns), trained_parameters(cli.model), 10)
    assert sorted(frozen.values()) == ["SmallCNNModule", "WideResNetModule"]


MODEL = ["--model", "WideResNetModule", "--data", "CIFAR10"]


def test_every_configuration_shown_is_a_file_that_a_command_takes_or_has_a_test_of_its_own():
    own = {*blocks("yaml", CLUSTERS), *blocks("yaml", METHODS)}
    shown = [block for text in GUIDES for block in blocks("yaml", text) if block not in own]
    words = {word for line in DPL for word in shlex.split(line)}
    grids = {"grid.yaml"}  # of configs/README.md, which test_configs_page.py loads
    assert {file_name(block) for block in shown} <= words | grids
    assert len({file_name(block) for block in shown}) == len(shown)


PROGRAMS = {"README.md": 1, "docs/own_module.md": 1, "docs/plain_torch.md": 1}
OTHER_PROGRAMS = {"docs/persons.md", "docs/methods.md", "docs/one_example.md"}


def programs(document):
    return [block for block in blocks("python", read(document)) if file_name(block) is None]


def test_every_program_shown_is_run():
    found = {document: len(programs(document)) for document in DOCUMENTS}
    shown = {document: count for document, count in found.items() if count}
    assert shown == {**PROGRAMS, **dict.fromkeys(OTHER_PROGRAMS, 1)}
    assert {name for name in FILES if name.endswith(".py")} == {"my_module.py", "sign.py"}


@pytest.mark.parametrize("document", PROGRAMS)
def test_python_code_runs_as_shown(document, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = programs(document)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and logging
        exec(compile(code, document, "exec"), {"__name__": "shown"})
    assert "0.0001)-DP by PRV, add or remove one training example" in capsys.readouterr().out
    statements = list(tmp_path.glob("lightning_logs/version_0/privacy_statement.md"))
    assert len(statements) == (0 if "plain_torch" in document else 1)


QUIET = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]


@pytest.mark.parametrize(
    ("page", "file", "used"), [(TRANSFORMS, "sign.py", "Sign"), (OWN_MODULE, "my_module.py", "TwoLayers")]
)
def test_a_class_in_a_file_beside_the_configuration_takes_part_in_a_run(page, file, used, workplace, monkeypatch):
    # As for the installed command, on whose path the current folder is not.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(workplace)])
    assert file in FILES
    (line,) = [line for line in lines("bash", page) if line.startswith("dpl fit")]
    main([*shlex.split(line)[1:], "--trainer.max_steps", "2", "--privacy.accountant", "rdp", *QUIET])
    assert used in vars(sys.modules[Path(file).stem])
    settings = Path("config.yaml").read_text()
    assert f"class_path: {Path(file).stem}.{used}" in settings
    assert json.loads(Path("privacy_statement.json").read_text())["num_steps"] == 2


def test_the_transform_shown_gives_signs(workplace):
    names = {}
    exec(FILES["sign.py"], names)
    gradient = torch.tensor([[0.5, -2.0], [0.0, 3.0]])
    out, state = names["Sign"]().apply({"weight": gradient, "bias": gradient[0]}, {}, {})
    assert torch.equal(out["weight"], torch.tensor([[1.0, -1.0], [0.0, 1.0]]))
    assert torch.equal(out["bias"], gradient[0])  # not a matrix
    assert state == {}


def test_the_rule_shown_gives_the_gradients_of_single_examples(capsys):
    (code,) = blocks("python", ONE_EXAMPLE)
    names = {"__name__": "shown"}
    exec(compile(code, "one_example.md", "exec"), names)

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

        def forward(self, x):
            return names["scaled"](x, self.scale)

    module, x, y = Scaled(), torch.randn(5, 3), torch.randn(5, 3)
    clip_plan = ClipPlan.flat(max_grad_norm=0.7)
    total, norms = clipped_gradient_sum(module, F.mse_loss, x, y, clip_plan=clip_plan, explain=True)
    assert capsys.readouterr().out.split() == ["scale", "by", "rule"]
    gradients = 2 / 3 * (x * module.scale.detach() - y) * x
    torch.testing.assert_close(norms, gradients.norm(dim=1))
    factors = (0.7 / gradients.norm(dim=1)).clamp(max=1.0)
    torch.testing.assert_close(total["scale"], factors @ gradients)


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
    short = ["--trainer.max_steps", "2", "--privacy.accountant", "rdp", *QUIET]
    main(["fit", "--config", "configs/digits.yaml", "--config", "own.yaml", *short])


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


def test_a_prediction_is_shown_as_it_is_called(workplace):
    (line,) = [line for line in DPL if line.startswith("dpl predict")]
    arguments = shlex.split(line)[1:]
    assert arguments[1:3] == ["--config", "lightning_logs/version_0/config.yaml"]
    require_known(["predict", "--config=configs/wrn16_cifar10.yaml", *arguments[3:]])
    assert arguments[-2:] == ["--data.root", "new_photos"]


def test_a_survey_of_images_is_shown_as_it_is_called(workplace):
    for line in (line for line in DPL if line.startswith("dpl init")):
        assert Path(init._parser().parse_args(shlex.split(line)[2:]).data).exists()


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
