"""What a checkpoint says of its model is read as data: it never chooses which code runs."""

import lightning.pytorch as pl
import pytest

from dp_lightning.lightning_modules import ResNetModule
from dp_lightning.private_run.saved_model import SavedModel

OURS = f"{ResNetModule.__module__}.{ResNetModule.__name__}"


def saved(class_path=OURS, **settings):
    hyperparameters = {"_class_path": class_path, "_instantiator": "some.function", **settings}
    record = {"class_names": ["cat", "dog"], "resized_to": 256, "features": None}
    return SavedModel.read({"hyper_parameters": hyperparameters, "callbacks": {"DataRecord": record}})


class Users(pl.LightningModule):
    """Of somebody's own."""

    def __init__(self, width=1):
        super().__init__()


USERS = f"{Users.__module__}.Users"


def test_what_callbacks_have_left_is_read():
    model = saved(num_classes=2)
    assert model.data == {"class_names": ["cat", "dog"], "resized_to": 256, "features": None}
    assert model.settings == {"num_classes": 2}
    assert model.module_class() is ResNetModule
    assert saved(USERS, width=4, image_size=32).arguments_of(Users) == {"width": 4}
    assert SavedModel.read({}) == SavedModel(None, {}, {})


@pytest.mark.parametrize("path", [None, "os.system", USERS, "dp_lightning.errors.DataError", "dp_lightning.x"])
def test_no_other_class_is_taken_from_a_checkpoint_but_one_that_the_user_names(path):
    assert saved(path).module_class() is None
    assert saved(path).module_class("another.Class") is None
    assert saved(path).module_class(USERS) is (Users if path == USERS else None)


def test_a_class_that_is_not_trusted_is_not_even_imported(tmp_path, monkeypatch):
    (tmp_path / "module_that_tells.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert saved("module_that_tells.Net").module_class() is None
    assert saved("module_that_tells.Net").module_class("module_that_tells.Other") is None
