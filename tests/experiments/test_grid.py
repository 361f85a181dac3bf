"""A grid's file expands to the options of single runs."""

import pytest
import yaml

from dp_lightning.errors import ConfigurationError
from dp_lightning.experiments.grid import Grid


@pytest.fixture
def load(tmp_path):
    (tmp_path / "sweeps").mkdir()
    for name in ("base.yaml", "vectors.yaml"):
        (tmp_path / name).write_text("{}\n")

    def loaded(text):
        path = tmp_path / "sweeps" / "grid.yaml"
        path.write_text(text)
        return Grid.load(path)

    return loaded


WHOLE = """
title: Accuracy
base: [../base.yaml]
settings: {trainer.max_epochs: 3}
axes:
  method:
    DP-SGD: {}
    DP-Muon: {config: [dp_muon, ../vectors.yaml], settings: {optimizer.init_args.lr: 0.02}}
  batch_size: {setting: privacy.expected_batch_size, values: [256, 1024]}
  seed: {setting: seed_everything, values: [42, 43]}
report: {rows: batch_size, columns: method, figures: [accuracy, snr]}
"""


def test_axes_are_multiplied_out_and_the_last_one_turns_fastest(load):
    grid = load(WHOLE)
    cells = list(grid.cells())
    assert grid.title == "Accuracy"
    assert [tuple(cell.labels.values()) for cell in cells] == [
        (method, size, seed) for method in ("DP-SGD", "DP-Muon") for size in ("256", "1024") for seed in ("42", "43")
    ]
    assert cells[0].name == "DP-SGD_256_42"
    assert (grid.report.rows, grid.report.columns, grid.report.figures) == ("batch_size", "method", ("accuracy", "snr"))


def test_files_and_names_come_in_the_order_of_base_and_axes_and_settings_last(load, tmp_path):
    cell = list(load(WHOLE).cells())[-1]
    base, vectors = str(tmp_path / "base.yaml"), str(tmp_path / "vectors.yaml")
    assert cell.arguments == (
        *("--config", base, "--config", "dp_muon", "--config", vectors),
        *("--trainer.max_epochs=3", "--optimizer.init_args.lr=0.02"),
        *("--privacy.expected_batch_size=1024", "--seed_everything=43"),
    )


def test_values_are_passed_as_yaml_reads_them(load):
    values = [1e-05, None, True, "text", [1, {"a": 2}], "--a"]
    grid = load(yaml.safe_dump({"axes": {"x": {"A": {"settings": {f"s{k}": v for k, v in enumerate(values)}}}}}))
    (cell,) = grid.cells()
    texts = [argument.partition("=")[2] for argument in cell.arguments]
    assert [yaml.safe_load(text) if text != "1e-05" else float(text) for text in texts] == values


def test_a_point_of_a_later_axis_overrides_one_of_an_earlier_axis(load):
    grid = load("axes: {a: {setting: s, values: [1]}, b: {B: {settings: {s: 2}}}}")
    (cell,) = grid.cells()
    assert cell.arguments == ("--s=2",)


POINT = "{setting: s, values: [1]}"


@pytest.mark.parametrize(
    ("axes", "report", "shown"),
    [
        ("seed method size", "{}", ("method", "size")),
        ("seed", "{}", (None, None)),
        ("seed size", "{}", (None, "size")),
        ("method size", "{columns: method}", ("size", "method")),
        ("1 2", "{columns: 1}", ("2", "1")),
    ],
)
def test_the_report_shows_the_first_two_axes_but_the_seed(load, axes, report, shown):
    grid = load(f"axes: {{{', '.join(f'{axis}: {POINT}' for axis in axes.split())}}}\nreport: {report}")
    assert (grid.report.rows, grid.report.columns) == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- 1", "The grid must be a mapping"),
        ("axes: [", "cannot be read"),
        ("base: []", "axes is empty"),
        ("axis: {}\naxes: {a: {A: {}}}", "The grid has no key axis; its keys are axes, base"),
        ("axes: {a: {}}", "axes.a has no points"),
        ("axes: {a: {setting: s, values: 3}}", "axes.a needs both setting"),
        ("axes: {a: {setting: s, values: [1, 1]}}", "axes.a has a value twice"),
        ("axes: {a: {A: {configs: x}}}", "axes.a.A has no key configs; its keys are config, settings"),
        ("axes: {a: {A: {}}, seed: {B: {}}}\nreport: {rows: seed}", "report.rows is 'seed'; choose one of the axes a"),
        ("axes: {a: {A: {}}, b: {B: {}}}\nreport: {rows: a, columns: a}", "report.columns are both 'a'"),
        ("axes: {a: {A: {}, B: {}, A: {settings: {s: 1}}}}", "has 'A' twice, in line 1; keep one"),
        ("axes: {a: {A: {}}}\nreport: {figures: [pie]}", "report.figures is \\['pie'\\]; choose from accuracy"),
        ("axes: {a: {A: {}}, seed: {B: {}}}\ntuned: seed", "tuned is 'seed'; choose one of the axes a"),
        ("axes: {a: {A: {}}, b: {B: {}}}\ntuned: b\nreport: {rows: b}", "report.rows is 'b'; choose one of the axes a"),
    ],
)
def test_what_cannot_be_read_is_named(load, text, message):
    with pytest.raises(ConfigurationError, match=message):
        load(text)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigurationError, match=r"grid\.yaml cannot be read: .*No such file"):
        Grid.load(tmp_path / "grid.yaml")
