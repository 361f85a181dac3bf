"""The page about configurations lists all of them, with the numbers that are in their files."""

import functools
from pathlib import Path

import pytest
import yaml
from pages import ROOT, blocks, read, table

from dp_lightning.experiments.grid import Grid

pytestmark = pytest.mark.docs

CONFIGS = ROOT / "configs"
PAGE = read("configs/README.md")
RUNS, FRAGMENTS, GRIDS = (table(PAGE, "file", head) for head in ("what", "what it adds to a run", "what of the paper"))
# Images of the training set, by the class of the data.
IMAGES = {
    "Digits": 1437,
    "CIFAR10": 50_000,
    "NpzImages": 50_000,  # of CIFAR-10
    "CIFAR100": 50_000,
    "SVHN": 73_257,
    "TinyImageNet": 100_000,
    "ImageNet": 1_281_167,
}


@functools.cache
def settings(path):
    return yaml.safe_load(path.read_text())


def millions_of_images(path, overrides=()):
    """Through the network in a run with this configuration, views counted.

    Args:
        overrides: options of ``dpl fit`` as ``--name=value``.
    """
    run = settings(path)
    privacy, trainer = dict(run["privacy"]), dict(run["trainer"])
    features = dict(run["data"].get("init_args", {}).get("backbone_kwargs", {}))
    for option in overrides:
        group, _, name = option.partition("=")[0].removeprefix("--").rpartition(".")
        groups = {"privacy": privacy, "trainer": trainer, "data.init_args.backbone_kwargs": features}
        groups.get(group, {})[name] = yaml.safe_load(option.partition("=")[2])
    data = run["data"].get("init_args", {}).get("images", run["data"])
    size, steps = privacy["expected_batch_size"], trainer.get("max_steps", -1)
    if steps == -1:
        steps = trainer["max_epochs"] * round(IMAGES[data["class_path"]] / size)
    views = 1 if features.get("average") else (1 + features.get("mirror", 0)) * (1 + features.get("shift", 0))
    return steps * size * views * privacy.get("augmult", 1) / 1e6


def test_every_yaml_file_is_in_one_of_the_three_tables():
    listed = [row[0].text for each in (RUNS, FRAGMENTS, GRIDS) for row in each.rows]
    assert sorted(listed) == sorted(str(path.relative_to(CONFIGS)) for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("row", RUNS.rows, ids=lambda row: row[0].text)
def test_a_run_is_listed_with_its_own_privacy_and_cost(row):
    cells = dict(zip(RUNS.head, row, strict=True))
    path = CONFIGS / cells["file"].text
    privacy = settings(path)["privacy"]
    epsilon, delta = cells["ε, δ"].text.split(", ")
    assert (float(epsilon), float(delta)) == (privacy["target_epsilon"], privacy["delta"])
    assert cells["images"].text == f"{millions_of_images(path):.3g}"
    assert all(cell.text for cell in row)


@pytest.mark.parametrize("row", GRIDS.rows, ids=lambda row: row[0].text)
def test_a_grid_is_listed_with_its_runs_and_cost(row):
    grid = Grid.load(CONFIGS / row[0].text)
    cells = list(grid.cells())
    settings_of = [[each for each in cell.arguments if each.startswith("--") and "=" in each] for cell in cells]
    millions = sum(millions_of_images(Path(grid.base[0]), overrides) for overrides in settings_of)
    runs = len(cells)
    if grid.tuned is not None:  # each of its points with one seed, and one of them with the others
        points, seeds = len(grid.axes[grid.tuned]), len(grid.axes["seed"])
        share = (points + seeds - 1) / (points * seeds)
        runs, millions = round(runs * share), millions * share
    assert row[2].text == str(runs)
    assert row[3].text == (f"{millions:.0f}" if millions >= 1 else f"{millions:.1f}")


def test_the_grids_shown_are_grids(tmp_path):
    found = []
    for block in blocks("yaml", PAGE):
        (tmp_path / "own.yaml").write_text(block)
        found.append(len(list(Grid.load(tmp_path / "own.yaml").cells())))
    assert found == [1, 12]
