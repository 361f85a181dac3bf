"""The notebooks of docs/notebooks run from their first cell to the last, and are kept without outputs."""

import json
import linecache
import math
import warnings

import pytest
import timm
import torch
from pages import ROOT
from PIL import Image

pytestmark = pytest.mark.docs

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
CLASSIFIER, OWN_MODULE = (
    ROOT / "docs" / "notebooks" / f"{name}.ipynb" for name in ("private_classifier", "own_module")
)


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
                unknown = parameters.keys() - names.keys()
                assert not unknown
                names.update(parameters)
    return names


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path):
    content = json.loads(path.read_text())
    assert content["nbformat"] == 4
    code = [cell for cell in content["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert sum(is_parameters for _, is_parameters in cells(path)) == 1
    assert len({cell["id"] for cell in content["cells"]}) == len(content["cells"])


def test_a_private_classifier_is_trained_on_images_that_the_notebook_draws(here, capsys):
    torch.save(timm.create_model("test_efficientnet_gn").state_dict(), "network.pth")
    found = run(CLASSIFIER, backbone="test_efficientnet_gn", weights="network.pth", image_size=32, epochs=2)
    facts = json.loads((here / "privacy_runs" / "version_0" / "privacy_statement.json").read_text())
    assert facts["release"] == "ok"
    assert (facts["num_train"], facts["num_steps"]) == (400, 8)
    assert facts["epsilon"]["prv"] == pytest.approx(1.0, abs=0.01)
    assert facts["delta"] < 1 / 400
    assert found["plan"].noise_multiplier == pytest.approx(found["privacy"].plan.noise_multiplier)
    assert math.isfinite(found["result"]["test/loss"])
    assert "(1, " in capsys.readouterr().out.splitlines()[-3]


def test_a_folder_of_ones_own_takes_the_place_of_the_drawn_images(here):
    for kind in ("cat", "dog", "owl"):
        (here / "photos" / "train" / kind).mkdir(parents=True)
        Image.new("RGB", (40, 50)).save(here / "photos" / "train" / kind / "1.png")
    torch.save(timm.create_model("test_efficientnet_gn").state_dict(), "network.pth")
    small = {"backbone": "test_efficientnet_gn", "weights": "network.pth", "image_size": 32}
    data = run(CLASSIFIER, first=3, folder="photos", **small)["data"]
    assert (data.class_names, data.num_train) == (["cat", "dog", "owl"], 3)
    assert not (here / "shapes").exists()


def test_an_ordinary_module_is_trained_privately(here):
    found = run(OWN_MODULE, epochs=3)
    facts = json.loads((here / "privacy_runs" / "version_0" / "privacy_statement.json").read_text())
    assert facts["release"] == "ok"
    assert facts["num_steps"] == 3 * round(1437 / 256)
    assert facts["epsilon"]["prv"] == pytest.approx(3.0, abs=0.01)
    assert found["result"]["test/accuracy"] > 0.3  # of ten classes
    assert "self.last = loss.item()" in str(found["refused"])
