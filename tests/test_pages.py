"""Numbers, names and outputs on single pages follow from the code, and pages that have to be short are short."""

import ast
import csv
import math
import re
import shlex
import statistics
from dataclasses import replace

import numpy as np
import pytest
from pages import ROOT, blocks, lines, read, table, tables

from dp_lightning.cli import main
from dp_lightning.commands.starting_configuration import FEW_IMAGES, Model, delta_for, start_of
from dp_lightning.datamodules.file_source import READ_FIRST_BELOW
from dp_lightning.experiments.grid import Grid
from dp_lightning.privacy.accounting import best_guess, compose
from dp_lightning.privacy.choice import epsilon_of_choice
from dp_lightning.privacy.plan import RunShape, best_bands, error_of_noise
from dp_lightning.privacy.statement import LARGEST_EPSILON

pytestmark = pytest.mark.docs

CONTRACT, NOISE, OFFICER, OWN_DATA, PLANNING = (
    read(f"docs/{name}.md") for name in ("contract", "noise", "privacy_officer", "own_data", "planning")
)


def test_the_pages_that_have_to_be_short_are_short():
    assert len(CONTRACT.split()) <= 1500
    assert len(OFFICER.split()) <= 700


@pytest.mark.parametrize(("file", "shown"), [(row[0].text, row[1].text) for row in table(CONTRACT, "file").rows])
def test_a_file_that_has_to_be_believed_is_as_long_as_the_contract_says(file, shown):
    assert abs(int(shown) - len(read(file).splitlines())) <= 10


def test_a_promise_of_the_contract_names_where_it_is_kept():
    for promise, where in table(CONTRACT, "promise").rows:
        for name in where.code:
            places = (ROOT / folder / name for folder in ("", "dp_lightning", "dp_lightning/privacy"))
            assert any(place.is_file() for place in places), f"{promise.text}: {name}"


def test_the_plan_shown_is_what_the_command_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (shown,) = blocks("text", PLANNING)
    _, line, _ = lines("bash", PLANNING)
    main(shlex.split(line)[1:])
    assert capsys.readouterr().out == shown


def test_the_errors_of_correlated_noise_and_the_price_of_a_choice_are_computed_again():
    errors, best = table(NOISE, "N, B, epochs, ε"), []
    for setting, *shown in errors.rows:
        num_train, size, epochs, epsilon = (int(number.replace(",", "")) for number in setting.text.split(", "))
        shape = RunShape.of_length(num_train=num_train, expected_batch_size=size, max_epochs=epochs, delta=1e-5)
        found = {
            bands: f"{error_of_noise(replace(shape, bands=bands), epsilon):.2f}"
            for bands in (int(head.removeprefix("b = ")) for head in errors.head[1:])
        }
        assert [cell.text for cell in shown] == list(found.values())
        best.append(found[best_bands(shape, epsilon)])
    assert re.findall(r"\*\*([\d.]+)\*\*", NOISE) == best
    plan = RunShape.of_length(num_train=45_000, expected_batch_size=512, max_epochs=3, delta=1e-5).calibrate(2.0)
    run = plan.rounds(plan.noise_multiplier)
    price, all_ten = epsilon_of_choice([run], expected_runs=10, delta=1e-5), compose([*run] * 10, delta=1e-5)
    text = f"runs of ε = 2 give {price:.2f} by RDP, and ten of them, all released, {all_ten:.2f}."
    assert text in " ".join(NOISE.split())


def test_the_table_of_starting_points_is_computed_again():
    small, wide = (
        Model.from_scratch(count).num_parameters(num_classes=10, in_channels=3, image_size=32)
        for count in (FEW_IMAGES - 1, FEW_IMAGES)
    )
    assert f"`SmallCNN` has d = {small:,}, and WRN-16-4 {wide:,}" in OWN_DATA
    rows = table(OWN_DATA, "N", "δ").rows
    assert len(rows) == 5
    for row in rows:
        count = int(row[0].text.replace(",", ""))
        probe = start_of(count, 385 * 10, Model.on_features())
        scratch = start_of(count, small, Model.from_scratch(count))
        found = [float(cell.text.replace(",", "")) for cell in row[1:]]
        expected = [probe.plan.delta]
        for start in (probe, scratch):
            plan = start.plan
            expected += [plan.expected_batch_size, plan.noise_multiplier, start.noise_norm, start.learning_rate]
        expected.append(scratch.noise_norm * (wide / small) ** 0.5)
        assert found == pytest.approx(expected, rel=0.05)  # two digits are shown


def test_limits_and_examples_shown_are_those_of_the_code():
    assert f"fewer than {READ_FIRST_BELOW:,} files" in OWN_DATA
    assert f"below {FEW_IMAGES:,} images one layer" in OWN_DATA
    assert f"ε above {LARGEST_EPSILON:g}" in OFFICER
    assert f"{delta_for(330):.0e}".replace("e-0", "e-") == "1e-4"


def most_found(epsilon, delta, false_alarms):
    """The largest true positive rate that (epsilon, delta)-DP leaves a test with these false positive rates."""
    bounded = np.minimum(math.exp(epsilon) * false_alarms + delta, 1 - math.exp(-epsilon) * (1 - delta - false_alarms))
    return np.minimum(bounded, 1.0)


def test_the_officers_table_is_the_worst_case_rounded_up():
    rates, delta = np.linspace(0, 1, 200_001), 1e-5
    for row in table(OFFICER, "ε", "right guesses, where tossing a coin gives 50 %").rows:
        epsilon, right, caught = (float(cell.text.removesuffix(" %")) for cell in row)
        share = best_guess(epsilon, delta)
        # Half of the cases each: true positives and true negatives.
        assert share == pytest.approx(np.max(most_found(epsilon, delta, rates) + 1 - rates) / 2, abs=1e-4)
        for shown, exact in ((right, share), (caught, most_found(epsilon, delta, 1e-3))):
            assert 0 <= shown - 100 * exact < 0.1


GRIDS = ("bands", "bands_filters", "bands_plans", "literal_per_layer")
GRIDS += ("orthogonalization", "orthogonalization_epsilon", "orthogonalization_steps")
RUNS = {name: list(csv.DictReader((ROOT / "docs" / "evidence" / f"{name}.csv").open())) for name in GRIDS}
SECTIONS = re.split(r"^## ", read("docs/evidence.md"), flags=re.MULTILINE)[1:]
# The tables of accuracies under a heading: for each the file with its runs, and what the runs that count have.
SHOWN = {
    "The same number of epochs": [("orthogonalization", {})],
    "The same number of steps": [("orthogonalization_steps", {})],
    "Less and more privacy": [("orthogonalization_epsilon", {"target_epsilon": each}) for each in ("1.0", "8.0")],
    "Noise that cancels over steps": [("bands", {}), ("bands_filters", {}), ("bands_plans", {})],
    "The literal reading of clipping by layer": [("literal_per_layer", {})],
}


@pytest.mark.parametrize("name", GRIDS)
def test_a_file_of_the_evidence_has_all_runs_of_its_grid(name):
    grid = Grid.load(ROOT / "configs" / "grids" / f"{name}.yaml")
    axes = {axis: len(points) for axis, points in grid.axes.items()}
    seeds, tried = axes.pop("seed"), axes.pop(grid.tuned)
    assert len(RUNS[name]) == math.prod(axes.values()) * (tried + seeds - 1)


def mean_and_deviation(runs):
    """Of the only learning rate that has runs with all three seeds, in per cent."""
    by_rate = {run["lr"]: [float(r["test_accuracy"]) for r in runs if r["lr"] == run["lr"]] for run in runs}
    (accuracies,) = [each for each in by_rate.values() if len(each) == 3]
    return statistics.mean(accuracies), statistics.stdev(accuracies)


@pytest.mark.parametrize("title", SHOWN)
def test_a_table_of_accuracies_follows_from_the_runs(title):
    (section,) = [section for section in SECTIONS if section.startswith(title)]
    shown = [each for each in tables(section) if any("±" in cell.text for row in each.rows for cell in row)]
    for each, (name, selected) in zip(shown, SHOWN[title], strict=True):
        rows, _, columns = each.head[0].partition(" by ")
        for row, *cells in each.rows:
            for column, cell in zip(each.head[1:], cells, strict=True):
                wanted = {**selected, **dict(zip(rows.split(", "), row.text.split(", "), strict=True))}
                wanted |= {columns: column} if columns else {}
                runs = [run for run in RUNS[name] if wanted.items() <= run.items()]
                # The runs have one decimal.
                assert [*map(float, cell.text.split(" ± "))] == pytest.approx(mean_and_deviation(runs), abs=0.101)


PLACES, PACKAGES, STEPS = tables(read("docs/architecture.md"))


def test_every_package_is_on_the_page_of_the_architecture():
    root = ROOT / "dp_lightning"
    found = {str(path.parent.relative_to(ROOT)) for path in root.rglob("__init__.py")} - {"dp_lightning"}
    listed = {row[0].text for row in PACKAGES.rows}
    assert found <= listed
    assert all((ROOT / name).exists() for name in listed)


@pytest.mark.parametrize("row", [*PLACES.rows, *STEPS.rows], ids=lambda row: row[0].text)
def test_a_row_of_the_architecture_names_a_function_of_its_file(row):
    _, where, what = row
    (path,) = where.code
    names = set()  # functions, classes, and methods as Class.method
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names |= {node.name, *(f"{node.name}.{getattr(each, 'name', '')}" for each in node.body)}
    assert names & set(what.code), f"{path} has none of {what.code}"
