"""Weights of another network are told in one line: the tensors, their shapes, and the classes where they differ."""

import pytest
from torch import nn

from dp_lightning.commands.misfit import weights_that_do_not_fit
from dp_lightning.models import SmallCNN

TAKE = " Take the configuration that the checkpoint's run saved."
CLASSIFIER = (
    "classifier.weight has shape (5, 256) in the checkpoint and (7, 256) here; classifier.bias has shape (5) in the "
    "checkpoint and (7) here."
)


def refused(of_checkpoint, here):
    with pytest.raises(RuntimeError) as error:
        here.load_state_dict(of_checkpoint.state_dict())
    return str(error.value)


@pytest.mark.parametrize(("known", "classes"), [(7, " The checkpoint has 5 classes, and the data has 7."), (None, "")])
def test_another_number_of_classes_is_named(known, classes):
    message = refused(SmallCNN(5), SmallCNN(7))
    assert weights_that_do_not_fit(message, known_classes=known) == CLASSIFIER + classes + TAKE


def test_a_width_that_happens_to_be_the_number_of_classes_is_not_taken_for_it():
    told = weights_that_do_not_fit(refused(SmallCNN(8), SmallCNN(8, channels=8)), known_classes=8)
    assert told is not None
    assert "features.0.weight has shape (16, 1, 3, 3) in the checkpoint and (8, 1, 3, 3) here" in told
    assert "classes" not in told


def test_tensors_that_only_one_of_both_has_are_named():
    message = refused(nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Identity(), nn.Linear(2, 2)))
    assert weights_that_do_not_fit(message) == (
        "1.weight is missing from the checkpoint; 1.bias is missing from the checkpoint; 0.weight is only in the "
        f"checkpoint, and 1 more.{TAKE}"
    )


def test_another_error_is_left_as_it_is():
    assert weights_that_do_not_fit("no such thing") is None
