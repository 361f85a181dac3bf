"""What the README and the pages show works: code runs, commands parse, output is what the command prints.

The README and all pages are read as one text, in which every command, every configuration and every program has to be
one that a test takes.
"""

import contextlib
import importlib
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
from clipped_sums import clipped_gradient_sum
from pages import ROOT, blocks, lines, links, read, spans, table, tables
from PIL import Image
from torch.nn import functional as F

from dp_lightning.cli import main
from dp_lightning.commands.configs import path_of, with_paths
from dp_lightning.commands.fit_settings import SettingsReader, prepare_to_train
from dp_lightning.experiments.grid import Grid
from dp_lightning.privacy import ClipPlan, RunShape

pytestmark = pytest.mark.docs

DOCUMENTS = ("README.md", "CHANGELOG.md", "SECURITY.md", "configs/README.md")
DOCUMENTS += tuple(path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "docs").rglob("*.md")))
PAGES = {name: read(name) for name in DOCUMENTS}
CLUSTERS, METHODS, RECIPES = (PAGES[f"docs/{name}.md"] for name in ("clusters", "methods", "recipes"))
COMMANDS = [line for text in PAGES.values() for line in lines("bash", text)]
# Every `dpl` line; other programs that train have the arguments of `dpl fit` behind their own.
DPL = [line for line in COMMANDS if line.startswith("dpl ")]
DPL += ["dpl " + line.split(" dp-lightning ")[1] for line in COMMANDS if "docker run" in line]
LAUNCHED = [line for line in COMMANDS if line.split()[0] in ("torchrun", "sbatch", "docker/node.sh")]
LAUNCHED = ["dpl fit --config" + line.split("--config", 1)[1] for line in LAUNCHED]
TRAINING = sorted({line for line in DPL if line.split()[1] in ("fit", "test")} | {*LAUNCHED})
# Commands with what they print: in a session each begins with "$ "; elsewhere they are the blocks of a page in order.
SESSIONS = "".join(blocks("text", PAGES["docs/reproduction.md"]))
PRICED = [(line, shown) for line, _, shown in (part.partition("\n") for part in SESSIONS.split("$ ")[1:])]
for guide in PAGES.values():
    if account := [line for line in lines("bash", guide) if line.startswith("dpl account --")]:
        PRICED += zip(account, blocks("text", guide), strict=True)


def file_name(block):
    """The name in the first line of a block that is a file; None for another block."""
    first = block.partition("\n")[0].removeprefix("# ")
    return first if first.endswith((".yaml", ".py")) else None


FILES = {
    name: block
    for text in PAGES.values()
    for language in ("yaml", "python")
    for block in blocks(language, text)
    if (name := file_name(block))
}
PROGRAMS = {
    name: found
    for name, text in PAGES.items()
    if (found := [block for block in blocks("python", text) if file_name(block) is None])
}

READ = SettingsReader()


@pytest.fixture
def workplace(tmp_path, monkeypatch):
    """A folder with everything that the commands of the pages expect to find."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*filter(None, sys.path), str(tmp_path)])
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    for folder in ("train/cat", "train/dog", "test/cat", "test/dog"):
        for kind in ("photos", "scans"):
            place = tmp_path / kind / folder / ("p1" if kind == "scans" else "")
            place.mkdir(parents=True)
            Image.new("RGB", (40, 50)).save(place / "0.png")
    np.savez("images.npz", train_images=np.zeros((4, 28, 28, 3), np.uint8), train_labels=np.array([0, 1, 2, 1]))
    for name, block in FILES.items():
        Path(name).write_text(block)
    Path("photos.yaml").symlink_to("own_photos.yaml")  # what `dpl init` writes needs weights
    yield tmp_path
    for name in FILES:  # the modules of this folder, which the next one has too
        sys.modules.pop(Path(name).stem, None)


def prepared(*arguments):
    """Everything that `dpl fit` builds from these options before it starts to train, on one CPU, and N."""
    here = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "1"]
    return prepare_to_train(READ([*arguments, *here]))


@pytest.mark.parametrize("line", TRAINING)
def test_a_training_command_builds_its_run_from_allowed_settings(line, workplace):
    arguments = shlex.split(line.replace("$PWD", str(workplace)))[2:]
    if "scattering.yaml" in line:
        main(["init", "photos", "--backbone", "scattering", "--out", "scattering.yaml"])
    if "--ckpt_path" in arguments:
        position = arguments.index("--ckpt_path")
        del arguments[position : position + 2]
        if "lightning_logs" in line:  # the configuration of an earlier run: any complete one serves
            arguments[:position] = ["--config", "configs/wrn16_cifar10.yaml"]
    cli, num_train = prepared(*arguments)
    data, persons = cli.datamodule, cli.privacy.unit_of_privacy == "group"
    assert num_train == (data.num_train_groups if persons else data.num_train)


# With a test below, or in tests of their command.
ELSEWHERE = {"fit", "test", "predict", "account", "doctor"}
OTHERS = sorted({line for line in DPL if line.split()[1] not in ELSEWHERE})


@pytest.mark.parametrize("line", OTHERS)
def test_another_command_takes_its_options(line, workplace):
    command, *arguments = shlex.split(line)[1:]
    parser = importlib.import_module(f"dp_lightning.commands.{command}")._parser()
    if command in ("analyze", "audit", "plan", "pretrain"):
        # The first argument of `dpl analyze` names what is computed, as that of the others does in `dpl`.
        given = with_paths(arguments) if command == "analyze" else with_paths([command, *arguments])[1:]
        _, of_fit = parser.parse_known_args(given)
        assert not of_fit or prepared(*of_fit)[1] > 1000
        return
    options = parser.parse_args(arguments)
    if command == "sweep" or (command == "report" and "lightning_logs" not in line):
        given = getattr(options, "grid", None) or options.target
        assert list(Grid.load(path_of(given, grid=True)).cells())


def test_every_command_and_configuration_shown_is_one_that_a_test_takes():
    assert len(TRAINING) >= 18
    assert len(PRICED) == 4
    assert {line.split()[1] for line in OTHERS} == {
        *("analyze", "audit", "export", "init", "plan", "pretrain", "report", "sweep", "verify")
    }
    own = {*blocks("yaml", CLUSTERS), *blocks("yaml", METHODS)}
    shown = [block for text in PAGES.values() for block in blocks("yaml", text) if block not in own]
    words = {word for line in DPL for word in shlex.split(line)}
    assert {file_name(block) for block in shown} <= words | {"grid.yaml"}  # which test_configs_page.py loads
    assert {name for name in FILES if name.endswith(".py")} == {"my_module.py", "sign.py"}


(LOOP,) = {line for line in COMMANDS if line.startswith("until ")}
# Short, and killed the first time, when it has saved something.
KILLED_ONCE = """#!/bin/sh
set -- "$@" --trainer.accelerator cpu --trainer.max_epochs 6 --privacy.accountant rdp
[ -e killed ] && exec {python} -m dp_lightning "$@"
touch killed
{python} -m dp_lightning "$@" &
while ! ls runs/digits/lightning_logs/*/checkpoints/*.ckpt; do sleep 0.02; done
kill -9 $!
exit 137
"""


def test_the_loop_shown_brings_a_run_that_is_killed_to_its_end(workplace, warm_python):
    (workplace / "dpl").write_text(KILLED_ONCE.format(python=warm_python))
    (workplace / "dpl").chmod(0o755)
    environment = {**os.environ, "PATH": f"{workplace}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    subprocess.run(["bash", "-c", LOOP], env=environment, check=True, timeout=200, capture_output=True)
    assert (workplace / "killed").exists()
    second = workplace / "runs/digits/lightning_logs/version_1"
    assert json.loads((second / "result.json").read_text())["completed"] is True
    assert json.loads((second / "privacy_statement.json").read_text())["num_steps"] == 6 * 3


def test_the_timeout_shown_is_the_strategys(workplace):
    (block,) = blocks("yaml", CLUSTERS)
    Path("timeout.yaml").write_text(block)
    cli, _ = prepared("digits", "--config", "timeout.yaml")
    assert cli.trainer.strategy._timeout.total_seconds() == 300


@pytest.mark.parametrize(("line", "shown"), PRICED, ids=[line for line, _ in PRICED])
def test_account_prints_what_is_shown(line, shown, capsys):
    with contextlib.suppress(SystemExit):
        main(shlex.split(line)[1:])
    assert capsys.readouterr().out == shown


def test_a_prediction_is_shown_as_it_is_called(workplace):
    (line,) = [line for line in DPL if line.startswith("dpl predict")]
    arguments = shlex.split(line)[1:]
    assert arguments[1:3] == ["--config", "lightning_logs/version_0/config.yaml"]
    READ(["--config=configs/wrn16_cifar10.yaml", *arguments[3:]])


def test_weights_from_random_images_start_a_run_as_shown(workplace):
    (line,) = [line for line in DPL if line.endswith("--out random16.safetensors")]
    small = ["--images", "4", "--steps", "1", "--batch-size", "4", "--view-size", "8"]
    main([*shlex.split(line)[1:], *small])
    (started,) = [shlex.split(line)[2:] for line in TRAINING if ".weights random" in line]
    prepared(*started)  # from that file
    frozen = dict(re.findall(r"'(\{[^']*?\})'` for\s+`(\w+)`", PAGES["docs/fine_tuning.md"]))
    assert sorted(frozen.values()) == ["SmallCNNModule", "WideResNetModule"]
    for patterns, module in frozen.items():
        prepared("digits" if module == "SmallCNNModule" else "wrn16_cifar10", "--privacy.frozen_until", patterns)


# What a program prints.
STATEMENT = "0.0001)-DP by PRV, add or remove one training example"
PRINTED = {
    "README.md": [STATEMENT],
    "docs/own_module.md": [STATEMENT, ""],
    "docs/plain_torch.md": [STATEMENT],
    "docs/persons.md": ["add or remove one person (all images with the same group)"],
    "docs/methods.md": ["0.00165"],
}
CASES = [(name, number, shown) for name, shown_by in PRINTED.items() for number, shown in enumerate(shown_by)]


def test_every_program_shown_is_run():
    assert {name: len(found) for name, found in PROGRAMS.items()} == {name: len(each) for name, each in PRINTED.items()}


@pytest.mark.parametrize(("document", "number", "printed"), CASES, ids=[f"{name}:{n}" for name, n, _ in CASES])
def test_a_program_runs_as_shown(document, number, printed, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and logging
        exec(compile(PROGRAMS[document][number], document, "exec"), {"__name__": "shown"})
    assert printed in capsys.readouterr().out


QUIET = ["--trainer.logger", "false", "--trainer.enable_progress_bar", "false", "--trainer.accelerator", "cpu"]
QUIET += ["--trainer.max_steps", "2", "--privacy.accountant", "rdp"]


@pytest.mark.parametrize(("page", "used"), [("transforms", "sign.Sign"), ("own_module", "my_module.TwoLayers")])
def test_a_class_in_a_file_beside_the_configuration_takes_part_in_a_run(page, used, workplace, monkeypatch):
    # As for the installed command, on whose path the current folder is not.
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(workplace)])
    (line,) = [line for line in lines("bash", PAGES[f"docs/{page}.md"]) if line.startswith("dpl fit")]
    main([*shlex.split(line)[1:], *QUIET])
    (settings,) = workplace.rglob("config.yaml")
    assert f"class_path: {used}" in settings.read_text()
    (statement,) = workplace.rglob("privacy_statement.json")
    assert json.loads(statement.read_text())["num_steps"] == 2


def write_scans(root):
    """24 patients with 1 to 20 images each; every third one has images of both classes."""
    noise = np.random.default_rng(0)
    for patient in range(24):
        for number in range(noise.integers(1, 21)):
            kind = "cat" if patient % 2 or (patient % 3 == 0 and number % 2) else "dog"
            folder = root / "train" / kind / f"p{patient:03d}"
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(noise.integers(0, 255, (20, 24, 3), np.uint8)).save(folder / f"{number}.png")


def test_the_run_shown_trains_on_a_folder_by_person(workplace):
    write_scans(workplace / "scans")
    (fit,) = [line for line in lines("bash", PAGES["docs/persons.md"]) if line.startswith("dpl fit")]
    small = ["--model.init_args.depth", "10", "--model.init_args.width", "1", "--data.init_args.val_fraction", "0.2"]
    main([*shlex.split(fit)[1:], *small, *QUIET, "--privacy.expected_batch_size", "5"])
    (statement,) = workplace.rglob("privacy_statement.json")
    facts = json.loads(statement.read_text())
    assert (facts["release"], facts["num_steps"], facts["num_train"]) == ("ok", 2, 25 - 5)  # with that of workplace
    assert facts["unit_of_privacy"] == "one person (all images with the same group)"
    assert facts["sample_rate"] == pytest.approx(5 / 20)


def test_the_rule_shown_gives_the_gradients_of_single_examples():
    names = {"__name__": "shown"}
    exec(compile(PROGRAMS["docs/own_module.md"][1], "own_module.md", "exec"), names)

    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([1.0, -2.0, 0.5]))

        def forward(self, x):
            return names["scaled"](x, self.scale)

    module, x, y = Scaled(), torch.randn(5, 3), torch.randn(5, 3)
    clip_plan = ClipPlan.flat(max_grad_norm=0.7)
    total, norms = clipped_gradient_sum(module, F.mse_loss, x, y, clip_plan=clip_plan)
    gradients = 2 / 3 * (x * module.scale.detach() - y) * x
    torch.testing.assert_close(norms, gradients.norm(dim=1))
    factors = (0.7 / gradients.norm(dim=1)).clamp(max=1.0)
    torch.testing.assert_close(total["scale"], factors @ gradients)


def test_the_configuration_of_the_page_of_methods_trains(workplace):
    (block,) = blocks("yaml", METHODS)
    Path("own.yaml").write_text(block)
    main(["fit", "--config", "configs/digits.yaml", "--config", "own.yaml", *QUIET])


def test_make_commands_are_targets_of_the_makefile():
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines()}
    shown = {line.split()[1] for line in COMMANDS if line.startswith("make ")}
    assert {"quickstart", "test"} <= shown <= targets


@pytest.mark.benchmarks
def test_benchmark_commands_are_accepted(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    found = [line for text in PAGES.values() for line in (*lines("bash", text), *spans(text))]
    found = [shlex.split(line) for line in found if line.startswith("python benchmarks/") and "…" not in line]
    assert len(found) > 15
    for _, path, *options in found:
        benchmark = importlib.import_module(Path(path).stem)
        if hasattr(benchmark, "parse"):
            benchmark.parse(options)


def test_the_recipes_noise_is_what_their_steps_need():
    """What is solved for is computed again, and is De et al.'s in all cells but the one that the page explains."""
    steps_and_noise = table(RECIPES, "ε")
    epsilons = [float(cell) for cell in steps_and_noise.head[1:]]
    rows = [[cell.text for cell in row] for row in steps_and_noise.rows]
    for network, batch_size, (steps, theirs, solved) in (("WRN-16-4", 4096, rows[:3]), ("WRN-40-4", 16384, rows[3:])):
        assert steps[0] == f"{network}, B = {batch_size:,}: steps"
        for epsilon, count, published, shown in zip(epsilons, steps[1:], theirs[1:], solved[1:], strict=True):
            num_steps = int(count.replace(",", ""))
            shape = RunShape(num_train=50_000, expected_batch_size=batch_size, num_steps=num_steps, delta=1e-5)
            noise_multiplier = shape.calibrate(epsilon, accountant="rdp").noise_multiplier
            assert float(shown) == pytest.approx(noise_multiplier, abs=0.0051)  # two decimals
            if (network, epsilon) != ("WRN-16-4", 8):
                assert float(published) == pytest.approx(noise_multiplier, rel=0.012)


def test_every_fragment_is_on_the_page_of_methods():
    listed = [name for row in table(METHODS, "method", "fragment").rows for name in row[1].code]
    folder = "configs/fragments/postprocess"
    assert sorted(listed) == sorted(f"{folder}/{path.name}" for path in (ROOT / folder).iterdir())


FOLDERS = ("dp_lightning", "tests", "tools", "configs", "docker", "benchmarks")
ENDINGS = (".py", ".yaml", ".sh", ".sbatch")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    for target in links(PAGES[document]):
        path = target.partition("#")[0]
        if path and ":" not in path:
            assert ((ROOT / document).parent / path).exists(), target
    for path in spans(PAGES[document]):
        if path.split("/")[0] in FOLDERS and path.endswith(ENDINGS) and not set(path) & set("*<{ "):
            assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_empty_line_stands_within_a_table(document):
    assert not re.findall(r"^\|.*\n\n(\|.*)\n(?!\| ?-)", PAGES[document], flags=re.MULTILINE)


def test_names_in_the_notation_exist():
    source = "\n".join(path.read_text() for path in (ROOT / "dp_lightning").rglob("*.py"))
    words = set(re.findall(r"\w+", source))
    (notation,) = tables(PAGES["docs/notation.md"])
    named = [name for *_, names in notation.rows for name in names.code]
    assert len(named) > 30
    assert not [name for name in named if not set(name.split(".")) <= words]


def test_the_changelog_shows_each_capability_by_a_file_or_a_command_that_exists():
    (capabilities, _) = tables(PAGES["CHANGELOG.md"])
    for _, shown in capabilities.rows:
        assert shown.code
        for name in shown.code:
            assert name.split()[0] in ("dpl", "make") or (ROOT / name).is_file(), name
