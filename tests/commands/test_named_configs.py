"""Configurations of the package by name, from any folder; `dpl configs`."""

from pathlib import Path

import pytest

from dp_lightning.cli import main
from dp_lightning.commands.configs import FOLDER, names, path_of, with_paths
from dp_lightning.errors import ConfigurationError

REPOSITORY = Path(__file__).parents[2] / "configs"


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """The current folder has no configurations."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("given", "file"),
    [
        ("digits", "digits.yaml"),
        ("./configs/digits.yaml", "digits.yaml"),
        ("dp_muon", "fragments/postprocess/dp_muon.yaml"),
        ("fragments/averaging/ema", "fragments/averaging/ema.yaml"),
    ],
)
def test_a_name_finds_its_file_from_any_folder(given, file):
    assert path_of(given) == FOLDER / file
    assert path_of(given).read_text() == (REPOSITORY / file).read_text()


def test_a_grid_and_a_run_may_have_the_same_name():
    assert path_of("digits", grid=True) == FOLDER / "grids" / "digits.yaml"
    assert path_of("digits") == FOLDER / "digits.yaml"
    with pytest.raises(ConfigurationError, match="no configuration of that name"):
        path_of("cifar10_batch")


def test_a_file_of_the_user_comes_before_a_name(tmp_path):
    (tmp_path / "digits").write_text("seed_everything: 1")
    assert path_of("digits") == Path("digits")


@pytest.mark.parametrize(("given", "near"), [("wrn16_cifar", "wrn16_cifar10"), ("dpmuon", "dp_muon")])
def test_a_misspelt_name_is_refused_with_the_nearest(given, near):
    with pytest.raises(ConfigurationError, match=f"no file {given}, and no configuration.*Did you mean {near}"):
        path_of(given)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (["fit", "digits"], ["fit", "--config=DIGITS"]),
        (["fit", "digits", "dp_muon", "--seed", "3"], ["fit", "--config=DIGITS", "--config=MUON", "--seed", "3"]),
        (["fit", "--config", "digits", "--x", "digits"], ["fit", "--config=DIGITS", "--x", "digits"]),
        (["fit", "--config=digits", "-c", "dp_muon"], ["fit", "--config=DIGITS", "--config=MUON"]),
        (["fit", "--config", "{seed_everything: 1}"], ["fit", "--config={seed_everything: 1}"]),
    ],
)
def test_configurations_among_the_arguments_become_paths(given, found):
    paths = {"DIGITS": str(FOLDER / "digits.yaml"), "MUON": str(FOLDER / "fragments/postprocess/dp_muon.yaml")}
    for name, path in paths.items():
        found = [argument.replace(name, path) for argument in found]
    assert with_paths(given) == found
    assert with_paths(found) == found


def test_the_list_names_each_once_with_its_purpose_and_fits_a_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    main(["configs"])
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(shown) == sorted(name.removeprefix("fragments/").removeprefix("grids/") for name in names())
    assert all(len(line.split()) > 2 and len(line) <= 90 for line in lines if line.startswith("  "))
    monkeypatch.setenv("COLUMNS", "0")  # piped
    main(["configs"])
    assert all(line.endswith(".") for line in capsys.readouterr().out.splitlines() if line.startswith("  "))


def test_a_configuration_is_printed_as_it_is(capsys):
    main(["configs", "digits"])
    assert capsys.readouterr().out == (REPOSITORY / "digits.yaml").read_text()


def test_copies_keep_their_folders_so_that_a_grid_finds_its_files(tmp_path):
    main(["configs", "--to", "mine"])
    copied = {path.relative_to(tmp_path / "mine") for path in (tmp_path / "mine").rglob("*.yaml")}
    assert copied == {path.relative_to(REPOSITORY) for path in REPOSITORY.rglob("*.yaml")}


def test_what_is_named_is_copied_with_the_files_that_it_needs(tmp_path):
    main(["configs", "grids/digits", "--to", "mine"])
    main(["configs", "dp_muon", "dp_sgd", "--to", "mine"])  # one of them is there, and the same
    copied = {str(path.relative_to(tmp_path / "mine")) for path in (tmp_path / "mine").rglob("*.yaml")}
    fragments = {f"fragments/postprocess/{name}.yaml" for name in ("dp_muon", "dp_sgd")}
    assert copied == {"grids/digits.yaml", "digits.yaml", *fragments}


def test_nothing_is_overwritten(tmp_path, capsys):
    (tmp_path / "digits.yaml").write_text("mine")
    with pytest.raises(SystemExit, match="2"):
        main(["configs", "wrn16_cifar10", "digits", "--to", "."])
    assert "digits.yaml exists" in capsys.readouterr().err
    assert (tmp_path / "digits.yaml").read_text() == "mine"
    assert not (tmp_path / "wrn16_cifar10.yaml").exists()
