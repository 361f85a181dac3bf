"""Tables and figures of a grid from the files that its runs leave."""

import dataclasses
import json
import re
from contextlib import contextmanager

import pytest
import yaml
from matplotlib.figure import Figure

from dp_lightning.experiments import report
from dp_lightning.experiments.grid import Grid
from dp_lightning.experiments.report import grid_report
from dp_lightning.experiments.results import Run, published, shown_epsilon
from dp_lightning.experiments.runs import RunFolder

AXES = {
    "method": {"DP-SGD": {}, "DP-Muon": {}},
    "batch_size": {"setting": "b", "values": [256, 512, 4096]},
    "seed": {"setting": "s", "values": [42, 43]},
}
EPSILONS = {**AXES, "epsilon": {"setting": "e", "values": [2, 8]}}
TUNED = {"method": AXES["method"], "lr": {"setting": "l", "values": [1, 3, 9]}, "seed": AXES["seed"]}


FIGURES = ("accuracy", "curves")


def grid_of(tmp_path, axes=AXES, **more):
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({"title": "Small <grid>", "axes": axes, **more}, sort_keys=False))
    return Grid.load(path)


def outcomes(tmp_path, grid, skip=(), release="ok", **more):
    """Accuracy rises with the batch size for DP-Muon alone, and the second seed is two points above the first."""
    found = []
    for number, cell in enumerate(grid.cells()):
        folder = RunFolder.of(tmp_path, cell.name, {"number": number, "trainer": {}})
        size = int(cell.labels.get("batch_size", 256))
        last = 0.40 + (0.05 * (size // 256 > 1) + 0.05 * (size // 256 > 2)) * (cell.labels.get("method") == "DP-Muon")
        last += 0.02 * (cell.labels["seed"] == "43")
        result = {
            "test_accuracy_last": last,
            "test_accuracy_best": last + 0.1,
            "test_accuracy_curve": [0.1, last + 0.1, last],
            "evaluated_after_steps": [1, 2, 100 * 256 // size],
            "completed": number not in skip,
            "num_steps": 100 * 256 // size if number not in skip else 1,
            "num_steps_planned": 100 * 256 // size,
            "epsilon": 3.9996,
            "delta": 1e-5,
            "seconds": 12.3,
            "snr_first_epoch": size / 1000,
            **more,
        }
        (folder.root / "version_0").mkdir(parents=True)
        (folder.root / "version_0" / "result.json").write_text(json.dumps(result))
        (folder.root / "version_0" / "privacy_statement.json").write_text(json.dumps({"release": release}))
        found.append(Run(cell, {}, folder, folder.result))
    return found


def text_of(tmp_path, grid, **kwargs):
    return grid_report(grid, outcomes(tmp_path, grid, **kwargs), tmp_path).markdown()


def row(text, *cells):
    return f"| {' | '.join(cells)} |" in text


def test_tables_have_mean_and_deviation_over_seeds(tmp_path):
    text = text_of(tmp_path, grid_of(tmp_path))
    assert "12 of 12 runs are finished" in text
    assert "mean ± standard deviation over 2 seeds" in text
    assert row(text, "method", "batch_size", "last", "best")
    for size, last, best in (("256", "41.0", "51.0"), ("512", "46.0", "56.0"), ("4096", "51.0", "61.0")):
        assert row(text, "DP-Muon", size, f"{last} ± 1.4", f"{best} ± 1.4")
    assert row(text, "DP-SGD", "256", "42", "40.0", "50.0", "4.000", "1e-05", "100", "12", "-")


def tuned(tmp_path, validation, unfinished=()):
    """One batch size; test accuracy rises with the rate, and validation accuracy is what is given for each run."""
    grid = grid_of(tmp_path, TUNED, tuned="lr")
    found = []
    for outcome in outcomes(tmp_path, grid):
        method, lr, seed = outcome.labels.values()
        result = dict(outcome.result)
        result["test_accuracy_last"] += 0.01 * float(lr)
        result["val_accuracy_last"] = validation(method, lr, seed)
        found.append(dataclasses.replace(outcome, result=None if (method, lr, seed) in unfinished else result))
    return grid_report(grid, found, tmp_path).markdown()


def by_seed(method, lr, seed):
    """The first seed is best at 3 for DP-SGD, and at 1 for DP-Muon; the second seed and test images at 9."""
    best = {"DP-SGD": "3", "DP-Muon": "1"}[method] if seed == "42" else "9"
    return 0.5 if lr == best else 0.3


def test_a_tuned_axis_is_chosen_by_the_validation_accuracy_of_the_first_seed(tmp_path):
    # The grid needs no other seed at the other rates.
    text = tuned(tmp_path, by_seed, [("DP-SGD", "1", "43"), ("DP-SGD", "9", "43"), ("DP-Muon", "9", "43")])
    assert "8 of 8 runs are finished" in text
    assert "of 1, 3, 9 with the first seed" in text
    assert row(text, "DP-SGD", "3", "44.0 ± 1.4", "51.0 ± 1.4")
    assert row(text, "DP-Muon", "1", "42.0 ± 1.4", "51.0 ± 1.4")


def test_nothing_is_chosen_before_the_first_seed_is_finished_everywhere(tmp_path):
    text = tuned(tmp_path, by_seed, [("DP-SGD", "1", "42")])
    assert "6 of 7 runs are finished" in text  # the second seed of DP-SGD is not known yet
    assert row(text, "DP-SGD", "-", "-", "-")
    assert row(text, "DP-Muon", "1", "42.0 ± 1.4", "51.0 ± 1.4")
    assert "| DP-SGD | 1 | 42 | - | - | - | - | - | - | not started |" in text


@pytest.mark.parametrize(("epsilon", "shown"), [(4.00049, "4.001"), (3.0, "3.000"), (2.9996, "3.000"), ("inf", "inf")])
def test_epsilon_is_never_shown_below_its_value(epsilon, shown):
    assert shown_epsilon(epsilon) == shown


def test_what_is_missing_or_of_note_is_said(tmp_path):
    grid = grid_of(tmp_path)
    text = text_of(tmp_path, grid, skip=(0, 6, 7))
    assert "9 of 12 runs are finished" in text
    assert row(text, "DP-SGD", "256", "42.0 (1 of 2)", "52.0 (1 of 2)")
    assert row(text, "DP-Muon", "256", "-", "-")
    assert "| DP-SGD | 256 | 42 | 40.0 | 50.0 | 4.000 | 1e-05 | 1 of 100 | 12 | not started |" in text
    of_note = {"release": "not for release: fixed seed", "evaluated_after_steps": [1, 2, 5], "num_steps_planned": 1000}
    found = outcomes(tmp_path / "more", grid, **of_note)
    (found[4].folder.path / "abandoned_0").mkdir()
    page = grid_report(
        grid, found, tmp_path, override=["trainer.max_epochs=1"], spent="12 runs together: 9."
    ).markdown()
    assert "12 of 12 runs are finished" in page
    assert page.count("not for release: fixed seed") == 12
    assert page.count("last evaluated after step 5;") == 12
    assert "| 1e-05 | 100 of 1000 | 12 |" in page
    assert "1 attempts set aside, whose steps are in no epsilon here" in page
    assert "With these settings instead of the grid's: trainer.max_epochs=1." in page
    assert "12 runs together: 9." in page


def test_a_grid_of_which_nothing_has_run_has_a_page_too(tmp_path):
    grid = grid_of(tmp_path, published="cifar10_batch")
    empty = [Run(cell, {}, RunFolder(tmp_path / cell.name), None) for cell in grid.cells()]
    text = grid_report(grid, empty, tmp_path).markdown()
    assert "0 of 12 runs are finished" in text
    assert "No run is finished." in text
    assert "![" not in text
    assert row(text, "DP-SGD", "256", "42", *["-"] * 6, "not started")


def test_other_axes_have_panels_of_their_own(tmp_path):
    grid = grid_of(tmp_path, EPSILONS)
    page = grid_report(grid, outcomes(tmp_path, grid), tmp_path)
    assert row(page.markdown(), "DP-Muon", "512", "8", "46.0 ± 1.4", "56.0 ± 1.4")
    page.publish("report")
    for kind, count in (("accuracy", 6), ("curves", 6)):
        assert len(re.findall(">epsilon [28]", (tmp_path / f"small_{kind}.svg").read_text())) == count


def test_the_papers_numbers_stand_beside_under_their_own_label(tmp_path):
    grid = grid_of(tmp_path, published="cifar10_batch")
    found = outcomes(tmp_path, grid)
    text = grid_report(grid, found, tmp_path).markdown()
    assert "The paper's numbers are best accuracies over epochs." in text
    assert row(text, "DP-Muon", "4096", "51.0 ± 1.4", "61.0 ± 1.4", "48.7 ± 0.6")
    # They belong to the grid's own settings.
    text = grid_report(grid, found, tmp_path, override=["trainer.max_epochs=1"]).markdown()
    assert "The paper's numbers are left out" in text
    assert "48.7 ± 0.6" not in text


@pytest.mark.parametrize(
    ("missing", "cells"),
    [
        (["batch_size"], ("DP-Muon", "41.0 ± 1.4", "51.0 ± 1.4")),
        (["method", "batch_size"], ("41.0 ± 1.4", "51.0 ± 1.4")),
    ],
)
def test_a_grid_without_rows_or_columns_has_a_single_one(tmp_path, missing, cells):
    axes = {name: axis for name, axis in AXES.items() if name not in missing}
    assert row(text_of(tmp_path, grid_of(tmp_path, axes)), *cells)


def test_figures_draw_means_and_deviations_over_seeds_beside_the_papers(tmp_path, monkeypatch):
    made = {}

    @contextmanager
    def drawn(page, name, caption, *, panels=1):
        made[name] = Figure().subplots(1, panels, squeeze=False).flatten()
        yield made[name]

    monkeypatch.setattr(report, "figure", drawn)
    grid = grid_of(tmp_path, published="cifar10_batch")
    grid_report(grid, outcomes(tmp_path, grid), tmp_path)
    for ax, xs in zip(made["small_accuracy"], ([0, 1, 2], [100, 50, 6], [0.256, 0.512, 4.096]), strict=True):
        ((points, _, (bars,)),) = (drawn for drawn in ax.containers if drawn.get_label() == "DP-Muon")
        assert list(points.get_xdata()) == pytest.approx(xs)
        assert list(points.get_ydata()) == pytest.approx([41.0, 46.0, 51.0])
        assert [top - bottom for (_, bottom), (_, top) in bars.get_segments()] == pytest.approx([2 * 2**0.5] * 3)
    table = published()["accuracy"]["cifar10_batch"]["values"]["DP-Muon"]
    dashed = [list(line.get_ydata()) for line in made["small_accuracy"][0].get_lines() if line.get_linestyle() == "--"]
    assert [table[size][0] for size in (256, 512, 4096)] in dashed
    for ax, rise in zip(made["small_curves"], (0, 5, 10), strict=True):
        (curve,) = (line.get_ydata() for line in ax.get_lines() if line.get_label() == "DP-Muon")
        assert list(curve) == pytest.approx([10.0, 51.0 + rise, 41.0 + rise])


def test_the_page_needs_no_other_file_and_shows_labels_as_they_are(tmp_path):
    """Neither Markdown nor matplotlib takes them for something else."""
    axes = {"method": {"a*b|c_": {}, "$x$ <i>": {}}, "batch_size": {"nan": {}, "in\nf $5$": {}}, "seed": AXES["seed"]}
    grid = grid_of(tmp_path, axes)
    found = []
    for number, cell in enumerate(grid.cells()):
        folder = RunFolder.of(tmp_path, cell.name, {"number": number, "trainer": {}})
        folder.root.mkdir(parents=True)
        result = dict.fromkeys(["num_steps", "num_steps_planned", "epsilon", "delta", "seconds"], 1.0)
        result |= {"completed": True, "test_accuracy_last": 0.5, "test_accuracy_best": 0.5}
        result |= {"test_accuracy_curve": [0.1, 0.5], "evaluated_after_steps": [1, 2]}
        (folder.root / "result.json").write_text(json.dumps(result))
        found.append(Run(cell, {}, folder, folder.result))
    page = grid_report(grid, found, tmp_path)
    page.publish("report")
    text = page.markdown()
    assert "| a\\*b\\|c\\_ | nan | 50.0 ± 0.0 | 50.0 ± 0.0 |" in text
    assert "| $x$ &lt;i&gt; | in f $5$ |" in text
    html = (tmp_path / "report.html").read_text()
    assert "<title>Small &lt;grid&gt;</title>" in html
    assert "<td>a*b|c_</td>" in html
    sources = re.findall(r'(?:src|href)="([^"]{0,20})', html)
    assert sum(source.startswith("data:image/svg") for source in sources) == 2
    for kind in FIGURES:
        drawn = (tmp_path / f"small_{kind}.svg").read_text()
        assert "a*b|c_" in drawn
        assert "$x$ &lt;i&gt;" in drawn
        assert f"](small_{kind}.svg)" in text
