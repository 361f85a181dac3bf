"""Tables and figures of a grid from the files that its runs leave."""

import dataclasses
import json
import re
import statistics
import xml.etree.ElementTree as ElementTree
from contextlib import contextmanager
from urllib.parse import unquote

import numpy as np
import pytest
import yaml
from matplotlib.figure import Figure

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments import drawings
from dp_lightning.experiments.grid import FIGURES, Grid
from dp_lightning.experiments.published import published
from dp_lightning.experiments.report import grid_report
from dp_lightning.experiments.results import Outcome, shown_epsilon
from dp_lightning.experiments.runs import RunFolder

AXES = {
    "method": {"DP-SGD": {}, "DP-Muon": {}},
    "batch_size": {"setting": "b", "values": [256, 512, 4096]},
    "seed": {"setting": "s", "values": [42, 43]},
}


def grid_of(tmp_path, axes=AXES, tuned=None, **report):
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "small.yaml"
    content = {"title": "Small <grid>", "axes": axes, "report": report} | ({} if tuned is None else {"tuned": tuned})
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return Grid.load(path)


def outcomes(tmp_path, grid, skip=(), release="ok", **more):
    """Accuracy rises with the batch size for DP-Muon alone, and the second seed is two points above the first."""
    found = []
    for number, cell in enumerate(grid.cells()):
        folder = RunFolder.of(tmp_path, cell.name, {"number": number, "trainer": {}})
        size = int(cell.labels.get("batch_size", 256))
        last = 0.40 + (0.05 * (size // 256 > 1) + 0.05 * (size // 256 > 2)) * (cell.labels["method"] == "DP-Muon")
        last += 0.02 * (cell.labels["seed"] == "43")
        steps = 100 if number not in skip else 40
        result = {
            "test_accuracy_last": last,
            "test_accuracy_best": last + 0.1,
            "test_accuracy_curve": [0.1, last + 0.1, last],
            "evaluated_after_steps": [1, 2, 100 * 256 // size],
            "completed": number not in skip,
            "num_steps": steps * 256 // size if number not in skip else 1,
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
        found.append(Outcome.read(cell.labels, folder))
    return found


def row(text, *cells):
    return f"| {' | '.join(cells)} |" in text


def test_tables_have_mean_and_deviation_over_seeds(tmp_path):
    grid = grid_of(tmp_path)
    text = grid_report(grid, outcomes(tmp_path, grid), tmp_path).markdown()
    assert "12 of 12 runs are finished" in text
    assert "mean ± standard deviation over 2 seeds" in text
    assert row(text, "method by batch_size", "256", "512", "4096")
    assert row(text, "DP-Muon", "41.0 ± 1.4", "46.0 ± 1.4", "51.0 ± 1.4")
    last, best = text.index("Accuracy after the last step"), text.index("It is chosen on the test set")
    assert last < text.index("| DP-Muon | 41.0") < best < text.index("| DP-Muon | 51.0 ± 1.4 | 56.0")
    assert "| DP-SGD | 256 | 42 | 40.0 | 50.0 | 4.000 | 1e-05 | 100 | 12 | DP-SGD_256_42-" in text


TUNED = {"method": {"DP-SGD": {}, "DP-Muon": {}}, "lr": {"setting": "l", "values": [1, 3, 9]}, "seed": AXES["seed"]}


def tuned(tmp_path, validation, unfinished=()):
    """One batch size; test accuracy rises with the rate, and validation accuracy is what is given for each run."""
    grid = grid_of(tmp_path, TUNED, tuned="lr", rows="method", figures=["accuracy"])
    found = []
    for outcome in outcomes(tmp_path, grid):
        method, lr, seed = outcome.labels.values()
        result = dict(outcome.result)
        result["test_accuracy_last"] += 0.01 * float(lr)
        result["val_accuracy_last"] = validation(method, lr, seed)
        found.append(dataclasses.replace(outcome, result=None if (method, lr, seed) in unfinished else result))
    return grid, found


def by_seed(method, lr, seed):
    """The first seed is best at 3 for DP-SGD, and at 1 for DP-Muon; the second seed and test images at 9."""
    best = {"DP-SGD": "3", "DP-Muon": "1"}[method] if seed == "42" else "9"
    return 0.5 if lr == best else 0.3


def test_a_tuned_axis_is_chosen_by_the_validation_accuracy_of_the_first_seed(tmp_path):
    # The grid needs no other seed at the other rates.
    left_out = [("DP-SGD", "1", "43"), ("DP-SGD", "9", "43"), ("DP-Muon", "3", "43"), ("DP-Muon", "9", "43")]
    for number, unfinished in enumerate(([], left_out)):
        grid, found = tuned(tmp_path / str(number), by_seed, unfinished)
        text = grid_report(grid, found, tmp_path).markdown()
        assert "8 of 8 runs are finished" in text
        assert "## Missing" not in text
        assert "of 1, 3, 9 with the first seed" in text
        assert row(text, "DP-SGD", "3")
        assert row(text, "DP-Muon", "1 (edge)")
        assert row(text, "DP-SGD", "44.0 ± 1.4")
        assert row(text, "DP-Muon", "42.0 ± 1.4")
        assert "50.0 ± 1.4" not in text


def test_nothing_is_chosen_before_the_first_seed_is_finished_everywhere(tmp_path):
    grid, found = tuned(tmp_path, by_seed, [("DP-SGD", "1", "42")])
    text = grid_report(grid, found, tmp_path).markdown()
    assert "6 of 7 runs are finished" in text  # the second seed of DP-SGD is not known yet
    assert text.count("\n| DP-SGD | - |\n") == 3  # no rate, and no accuracy
    assert row(text, "DP-Muon", "42.0 ± 1.4")
    assert row(text, "DP-SGD 1 42", "-", "not started")


def test_nothing_is_chosen_without_validation_accuracy(tmp_path):
    grid, found = tuned(tmp_path, lambda method, lr, seed: None)
    assert "No run is finished, or no lr is chosen yet." in grid_report(grid, found, tmp_path).markdown()


@pytest.mark.parametrize("axis", ["seed", "rate"])
def test_a_tuned_axis_is_an_axis_but_not_the_seed(tmp_path, axis):
    with pytest.raises(ConfigurationError, match=f"tuned is '{axis}'; choose one of the axes method, lr"):
        grid_of(tmp_path, TUNED, tuned=axis)


def test_a_tuned_axis_is_no_axis_of_the_table(tmp_path):
    with pytest.raises(ConfigurationError, match=r"report\.rows is 'lr'; choose one of the axes method"):
        grid_of(tmp_path, TUNED, tuned="lr", rows="lr")


@pytest.mark.parametrize(("epsilon", "shown"), [(4.00049, "4.001"), (3.0, "3.000"), (2.9996, "3.000"), ("inf", "inf")])
def test_epsilon_is_never_shown_below_its_value(epsilon, shown):
    assert shown_epsilon(epsilon) == shown


def test_what_is_missing_is_said(tmp_path):
    grid = grid_of(tmp_path)
    text = grid_report(grid, outcomes(tmp_path, grid, skip=(0, 6, 7)), tmp_path).markdown()
    assert "9 of 12 runs are finished" in text
    assert row(text, "DP-SGD", "42.0 (1 of 2)", "41.0 ± 1.4", "41.0 ± 1.4")
    assert row(text, "DP-Muon", "-", "46.0 ± 1.4", "51.0 ± 1.4")
    assert "3 runs are not finished" in text
    assert row(text, "DP-SGD 256 42", "1 of 100", "not started")


def test_a_grid_of_which_nothing_has_run_has_a_page_too(tmp_path):
    grid = grid_of(tmp_path, published="cifar10_batch", figures=["accuracy", "deviation", "curves", "snr"])
    empty = [Outcome.read(cell.labels, RunFolder(tmp_path / cell.name)) for cell in grid.cells()]
    page = grid_report(grid, empty, tmp_path)
    assert "0 of 12 runs are finished" in page.markdown()
    assert "No run is finished." in page.markdown()
    assert "<svg" not in page.html()
    assert "## Runs" not in page.markdown()
    assert row(page.markdown(), "DP-SGD 256 42", "-", "not started")


def test_what_no_run_has_a_point_for_is_left_out(tmp_path):
    axes = {"method": AXES["method"], "epsilon": {"setting": "e", "values": [2, 8]}, **dict(list(AXES.items())[1:])}
    grid = grid_of(tmp_path, axes, columns="batch_size", figures=list(FIGURES))
    found = outcomes(tmp_path, grid, test_accuracy_curve=[], snr_first_epoch=None)
    kept = [o for o in found if o.labels["epsilon"] == "2" and o.labels["seed"] == "42"]
    empty = RunFolder(tmp_path / "nothing")
    page = grid_report(
        grid, [o if o in kept else dataclasses.replace(o, folder=empty, result=None) for o in found], tmp_path
    )
    text = page.markdown()
    assert text.index("## epsilon 8\n\nNo run of these is finished.") < text.index("## Missing")
    assert not row(text, "DP-SGD", "-", "-", "-")
    # One seed has no deviation, no run has a curve, and none has a ratio.
    assert re.findall(r"!\[(.*?)\]", text) == ["Test accuracy after the last step", "Accuracy beside steps"]


def test_one_seed_is_shown_as_its_value(tmp_path, monkeypatch):
    axes = {**AXES, "seed": {"setting": "s", "values": [42]}}
    lines = drawn_lines(monkeypatch, tmp_path, "accuracy", axes=axes)
    assert lines["DP-Muon"] == [pytest.approx([40.0, 45.0, 50.0])]
    assert lines["bars of DP-Muon"] == []
    grid = grid_of(tmp_path, axes, figures=["curves"])
    text = grid_report(grid, outcomes(tmp_path / "again", grid), tmp_path).markdown()
    assert "Accuracy after the last step, one run each:" in text
    assert "mean" not in text
    assert "±" not in text
    assert row(text, "DP-Muon", "40.0", "45.0", "50.0")


def test_runs_link_to_their_statements_and_pages(tmp_path):
    grid = grid_of(tmp_path)
    found = outcomes(tmp_path / "a [b]", grid)
    logs = found[0].folder.logs
    (logs / "privacy_statement.md").touch()
    (logs / "report.html").touch()
    page = tmp_path / "report" / "small"
    text = grid_report(grid, found, page).html()
    links = re.findall('href="([^"#]*/[^"]*)"', text)
    assert [(page / unquote(link)).resolve() for link in links] == [logs / "privacy_statement.md", logs / "report.html"]
    assert all(link.startswith("../..") for link in links)


def test_the_papers_numbers_stand_beside_under_their_own_label(tmp_path):
    grid = grid_of(tmp_path, published="cifar10_batch")
    text = grid_report(grid, outcomes(tmp_path, grid), tmp_path).markdown()
    assert text.index("The paper's numbers, which are best accuracies over epochs") < text.index(
        "| DP-SGD | 39.4 ± 1.2"
    )
    assert row(text, "DP-Muon", "39.0 ± 0.5", "40.5 ± 1.7", "48.7 ± 0.6")
    with pytest.raises(ConfigurationError, match=r"report\.published is 'cifar11'; choose from cifar10_batch"):
        grid_report(grid_of(tmp_path, published="cifar11"), [], tmp_path)


def test_other_axes_have_panels_of_their_own(tmp_path):
    axes = {"method": AXES["method"], "epsilon": {"setting": "e", "values": [2, 8]}, **dict(list(AXES.items())[1:])}
    grid = grid_of(tmp_path, axes, columns="batch_size")
    page = grid_report(grid, outcomes(tmp_path, grid), tmp_path)
    text = page.markdown()
    assert text.index("## epsilon 2") < text.index("## epsilon 8")
    assert text.count("| method by batch_size |") == 4
    page.publish("report")
    assert len(list(tmp_path.glob("small_*_accuracy.png"))) == 2


def test_accuracy_is_correlated_with_steps_and_signal(tmp_path):
    grid = grid_of(tmp_path, figures=["snr"])
    text = grid_report(grid, outcomes(tmp_path, grid), tmp_path).markdown()
    assert row(text, "DP-SGD", "-", "-")  # its accuracy does not vary
    means = [41, 46, 51]
    steps, ratios = statistics.correlation([100, 50, 6], means), statistics.correlation([0.256, 0.512, 4.096], means)
    assert row(text, "DP-Muon", f"{steps:+.2f}", f"{ratios:+.2f}")


def test_starts_that_were_set_aside_are_named(tmp_path):
    grid = grid_of(tmp_path)
    found = outcomes(tmp_path, grid)
    assert "set aside" not in grid_report(grid, found, tmp_path).markdown()
    (found[4].folder.path / "abandoned_0").mkdir()
    text = grid_report(grid, found, tmp_path).markdown()
    assert "1 runs were restarted" in text
    assert "The steps of that attempt are in no epsilon on this page" in text
    assert row(text, "DP-SGD 4096 42", "1", found[4].folder.path.name)


def test_a_run_that_a_setting_has_ended_before_its_last_step_says_so(tmp_path):
    grid = grid_of(tmp_path)
    text = grid_report(grid, outcomes(tmp_path, grid, num_steps_planned=1000), tmp_path).markdown()
    assert "12 of 12 runs are finished" in text
    assert "| 1e-05 | 100 of 1000 | 12 | DP-SGD_256_42-" in text


@pytest.mark.parametrize("missing", [["batch_size"], ["method"], ["method", "batch_size"]])
def test_a_grid_without_rows_or_columns_has_a_single_one(tmp_path, missing):
    axes = {name: axis for name, axis in AXES.items() if name not in missing}
    grid = grid_of(tmp_path, axes, figures=list(FIGURES))
    found = []
    for number, cell in enumerate(grid.cells()):
        folder = RunFolder.of(tmp_path, cell.name, {"number": number, "trainer": {}})
        folder.root.mkdir(parents=True)
        accuracy = 0.5 if cell.labels["seed"] == "42" else 0.6
        result = dict.fromkeys(["num_steps", "num_steps_planned", "epsilon", "delta", "seconds"], 1.0)
        result |= {"completed": True, "test_accuracy_last": accuracy, "test_accuracy_best": accuracy}
        (folder.root / "result.json").write_text(json.dumps(result))
        found.append(Outcome.read(cell.labels, folder))
    text = grid_report(grid, found, tmp_path).markdown()
    if missing == ["batch_size"]:
        assert row(text, "method", "DP-SGD", "DP-Muon")
        assert row(text, "all runs", "55.0 ± 7.1", "55.0 ± 7.1")
    elif missing == ["method"]:
        assert row(text, "batch_size", "256", "512", "4096")
    else:
        assert row(text, "accuracy", "all runs")
        assert row(text, "all runs", "55.0 ± 7.1")


def test_what_must_not_be_released_says_so(tmp_path):
    grid = grid_of(tmp_path)
    assert "Not for release" not in grid_report(grid, outcomes(tmp_path, grid), tmp_path).markdown()
    text = grid_report(
        grid, outcomes(tmp_path / "more", grid, release="not for release: fixed seed"), tmp_path
    ).markdown()
    assert "The privacy statements of 12 runs say that they must not be released" in text
    assert row(text, "DP-SGD 256 42", "not for release: fixed seed")


def test_runs_that_were_last_evaluated_before_their_last_step_say_so(tmp_path):
    grid = grid_of(tmp_path)
    assert "last evaluated before" not in grid_report(grid, outcomes(tmp_path, grid), tmp_path).markdown()
    early = outcomes(tmp_path / "more", grid, evaluated_after_steps=[1, 2, 5])
    assert (
        "12 of these runs were last evaluated before their last step" in grid_report(grid, early, tmp_path).markdown()
    )


def drawn_lines(monkeypatch, tmp_path, kind, axes=AXES):
    """The points of the lines of a figure, by label, and the error bars that are seen."""
    found = {}

    @contextmanager
    def drawn(page, name, caption, *, panels=1):
        made = Figure().subplots(1, panels, squeeze=False).flatten()
        yield made
        for ax in made:
            for line in ax.get_lines():
                if len(line.get_xdata()) > 1:
                    found.setdefault(str(line.get_label()), []).append([float(y) for y in line.get_ydata()])
            for container in ax.containers:
                label = container.get_label()
                found[label] = [[float(y) for y in container.lines[0].get_ydata()]]
                bars = container.lines[2][0].get_segments() if container.has_yerr else []
                found[f"bars of {label}"] = [bar for bar in bars if len(bar) and np.isfinite(bar).all()]

    monkeypatch.setattr(drawings, "figure", drawn)
    grid = grid_of(tmp_path, axes, figures=[kind], published="cifar10_batch")
    grid_report(grid, outcomes(tmp_path, grid), tmp_path)
    return found


def test_the_figure_draws_the_mean_of_the_last_accuracy_over_seeds(tmp_path, monkeypatch):
    lines = drawn_lines(monkeypatch, tmp_path, "accuracy")
    assert lines["DP-Muon"] == [pytest.approx([41.0, 46.0, 51.0])]
    assert lines["DP-SGD"] == [pytest.approx([41.0] * 3)]
    assert [float(top - bottom) for (_, bottom), (_, top) in lines["bars of DP-Muon"]] == pytest.approx(
        [2 * 2**0.5] * 3
    )
    papers = [points for label, every in lines.items() if label.startswith("_") for points in every]
    table = published()["accuracy"]["cifar10_batch"]["values"]["DP-Muon"]
    assert [table[size][0] for size in (256, 512, 4096)] in papers


def test_the_figure_of_deviations_draws_those_of_runs_and_paper(tmp_path, monkeypatch):
    lines = drawn_lines(monkeypatch, tmp_path, "deviation")
    assert lines["DP-Muon"] == [pytest.approx([2**0.5] * 3)]
    papers = [points for label, every in lines.items() if label.startswith("_") for points in every]
    table = published()["accuracy"]["cifar10_batch"]["values"]["DP-Muon"]
    assert [table[size][1] for size in (256, 512, 4096)] in papers


def test_curves_are_means_over_seeds(tmp_path, monkeypatch):
    lines = drawn_lines(monkeypatch, tmp_path, "curves")
    assert lines["DP-Muon"] == [pytest.approx([10.0, 51.0 + rise, 41.0 + rise]) for rise in (0, 5, 10)]


def test_overrides_are_named_on_the_page(tmp_path):
    text = grid_report(grid_of(tmp_path), [], tmp_path, override=["trainer.max_epochs=1"]).markdown()
    assert "With these settings instead of the grid's: trainer.max_epochs=1." in text
    grid = grid_of(tmp_path, published="cifar10_batch")
    text = grid_report(grid, outcomes(tmp_path, grid), tmp_path, override=["trainer.max_epochs=1"]).markdown()
    assert "The paper's numbers are left out" in text
    assert "| DP-SGD | 39.4 ± 1.2" not in text


def test_labels_are_shown_as_they_are(tmp_path):
    """Neither Markdown nor matplotlib takes them for something else."""
    axes = {"method": {"_a*b|c": {}, "$x$ <i>": {}}, "batch_size": {"nan": {}, "in\nf $5$": {}}, "seed": AXES["seed"]}
    grid = grid_of(tmp_path, axes, figures=["accuracy", "curves"])
    found = []
    for number, cell in enumerate(grid.cells()):
        folder = RunFolder.of(tmp_path, cell.name, {"number": number, "trainer": {}})
        folder.root.mkdir(parents=True)
        result = dict.fromkeys(["num_steps", "num_steps_planned", "epsilon", "delta", "seconds"], 1.0)
        result |= {"completed": True, "test_accuracy_last": 0.5, "test_accuracy_best": 0.5}
        (folder.root / "result.json").write_text(
            json.dumps({**result, "test_accuracy_curve": [0.1, 0.5], "evaluated_after_steps": [1, 2]})
        )
        found.append(Outcome.read(cell.labels, folder))
    page = grid_report(grid, found, tmp_path)
    page.publish("report")
    text = page.markdown()
    assert "| \\_a\\*b\\|c | 50.0 ± 0.0 | 50.0 ± 0.0 |" in text
    assert "| $x$ \\<i> |" in text
    assert "| method by batch_size | nan | in f $5$ |" in text
    for kind in ("accuracy", "curves"):
        drawn = "".join(ElementTree.parse(tmp_path / f"small_{kind}.svg").getroot().itertext())
        assert "_a*b|c" in drawn
        assert "$x$ <i>" in drawn


@pytest.mark.parametrize("kind", FIGURES)
def test_each_figure_is_written_twice_and_names_its_lines(tmp_path, kind):
    grid = grid_of(tmp_path, figures=[kind], published="cifar10_batch")
    page = grid_report(grid, outcomes(tmp_path, grid), tmp_path)
    page.publish("report")
    assert (tmp_path / f"small_{kind}.png").read_bytes().startswith(b"\x89PNG")
    drawn = "".join(ElementTree.parse(tmp_path / f"small_{kind}.svg").getroot().itertext())
    assert "DP-SGD" in drawn
    assert "DP-Muon" in drawn
    assert f"](small_{kind}.png)" in page.markdown()


def test_the_page_needs_no_other_file(tmp_path):
    grid = grid_of(tmp_path, figures=["accuracy", "snr"])
    page = grid_report(grid, outcomes(tmp_path, grid), tmp_path).html()
    assert "<title>Small &lt;grid&gt;</title>" in page
    sources = re.findall(r'(?:src|href)="([^"]{0,40})', page)
    assert [source for source in sources if not source.startswith("#")] == ["data:,"]
    assert page.count("<svg") == 2


def test_the_papers_tables_are_whole():
    tables = published()["accuracy"]
    assert len(tables) == 12
    for table in tables.values():
        for values in table["values"].values():
            assert all(0 < value[0] < 100 and len(value) <= 2 for value in values.values())
