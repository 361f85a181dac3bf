"""The notebooks of docs/notebooks run from their first cell to the last, and are kept without outputs."""

import json
import linecache
import warnings

import pytest
import timm
import torch
from pages import ROOT
from PIL import Image

pytestmark = pytest.mark.docs

CLASSIFIER, OWN_MODULE = (
    ROOT / "docs" / "notebooks" / f"{name}.ipynb" for name in ("private_classifier", "own_module")
)
SMALL = {"backbone": "test_efficientnet_gn", "weights": "network.pth", "image_size": 32}


def cells(path):
    """The code cells: source, and whether it is the cell of parameters."""
    found = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    return [("".join(cell["source"]), "parameters" in cell["metadata"].get("tags", [])) for cell in found]


def run(path, *, first=None, **parameters):
    """Run the first cells, or all, in one namespace, and return it; the parameters replace those of their cell."""
    names = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice about workers and logging
        for number, (source, is_parameters) in enumerate(cells(path)[:first]):
            cell = f"{path.stem}-{number}"
            linecache.cache[cell] = (len(source), None, source.splitlines(keepends=True), cell)  # as a kernel does
            exec(compile(source, cell, "exec"), names)
            if is_parameters:
                assert parameters.keys() <= names.keys()
                names.update(parameters)
    return names


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with weights of a small network."""
    monkeypatch.chdir(tmp_path)
    torch.save(timm.create_model("test_efficientnet_gn").state_dict(), "network.pth")
    return tmp_path


@pytest.mark.parametrize("path", [CLASSIFIER, OWN_MODULE], ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum(is_parameters for _, is_parameters in cells(path)) == 1


@pytest.mark.parametrize(
    ("path", "parameters", "num_train", "num_steps", "epsilon"),
    [(CLASSIFIER, {**SMALL, "epochs": 2}, 400, 8, 1.0), (OWN_MODULE, {"epochs": 3}, 1437, 18, 3.0)],
    ids=["classifier", "own module"],
)
def test_a_notebook_trains_privately(path, parameters, num_train, num_steps, epsilon, here):
    found = run(path, **parameters)
    (statement,) = here.rglob("privacy_statement.json")
    facts = json.loads(statement.read_text())
    assert (facts["release"], facts["num_train"], facts["num_steps"]) == ("ok", num_train, num_steps)
    assert facts["epsilon"]["prv"] == pytest.approx(epsilon, abs=0.01)
    assert found["result"]["test/accuracy"] > 0.3
    if path == OWN_MODULE:
        assert "self.last = loss.item()" in str(found["refused"])


def test_a_folder_of_ones_own_takes_the_place_of_the_drawn_images(here):
    for kind in ("cat", "dog", "owl"):
        (here / "photos" / "train" / kind).mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(here / "photos" / "train" / kind / "1.png")
    data = run(CLASSIFIER, first=3, folder="photos", **SMALL)["data"]
    assert (data.class_names, data.num_train) == (["cat", "dog", "owl"], 3)
