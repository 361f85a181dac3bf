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
"""


def test_axes_are_multiplied_out_with_files_in_the_order_of_base_and_axes_and_settings_last(load, tmp_path):
    cells = list(load(WHOLE).cells())
    assert [tuple(cell.labels.values()) for cell in cells] == [
        (method, size, seed) for method in ("DP-SGD", "DP-Muon") for size in ("256", "1024") for seed in ("42", "43")
    ]
    assert cells[0].name == "DP-SGD_256_42"
    base, vectors = str(tmp_path / "base.yaml"), str(tmp_path / "vectors.yaml")
    assert cells[-1].arguments == (
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


@pytest.mark.parametrize(
    ("axes", "shown"),
    [
        ("seed method size", ("method", "size")),
        ("method lr size", ("method", "size")),
        ("size seed", (None, "size")),
        ("seed", (None, None)),
    ],
)
def test_the_first_two_axes_but_the_seed_and_the_tuned_one_are_rows_and_columns(load, axes, shown):
    points = ", ".join(f"{axis}: {{setting: s, values: [1]}}" for axis in axes.split())
    assert load(f"axes: {{{points}}}\ntuned: {'lr' if 'lr' in axes else 'null'}").rows_and_columns == shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("axes: [", "cannot be read"),
        ("base: []", "axes is empty"),
        ("axis: {}\naxes: {a: {A: {}}}", "The grid has no key axis; its keys are axes, base"),
        ("axes: {a: {}}", "axes.a has no points"),
        ("axes: {a: {setting: s, values: 3}}", "axes.a.setting must be a mapping, but it is 's'"),
        ("axes: {a: {A: {configs: x}}}", "axes.a.A has no key configs; its keys are config, settings"),
        ("axes: {a: {A: {}}, seed: {B: {}}}\ntuned: seed", "tuned is 'seed'; choose one of the axes but seed"),
    ],
)
def test_what_cannot_be_read_is_named(load, text, message):
    with pytest.raises(ConfigurationError, match=message):
        load(text)
