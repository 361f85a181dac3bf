"""The name that a misspelt one stands for."""

import pytest

from dp_lightning.commands.near_names import did_you_mean, nearest

SETTINGS = ["name", "num_classes", "lr", "momentum", "weight_decay", "depth", "width", "pretrained"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("widht", "width"),
        ("Width", "width"),
        ("model_name", "name"),
        ("learning_rate", "lr"),
        ("wd", "weight_decay"),
        ("classes", "num_classes"),
        ("pretrain", "pretrained"),
        ("momentun", "momentum"),
    ],
)
def test_a_name_like_a_known_one_finds_it(wrong, right):
    assert nearest(wrong, SETTINGS) == right
    assert did_you_mean(wrong, SETTINGS) == f" Did you mean {right}?"


@pytest.mark.parametrize("wrong", ["zebra", "x", "", "q_q"])
def test_a_name_like_no_known_one_finds_none(wrong):
    assert nearest(wrong, SETTINGS) is None
    assert did_you_mean(wrong, SETTINGS) == ""
    assert nearest(wrong, []) is None


def test_dotted_names_are_compared_in_their_group_first():
    known = ["trainer.max_epochs", "privacy.max_grad_norm", "max_epoch"]
    assert nearest("trainer.max_epoch", known) == "trainer.max_epochs"
    assert nearest("privcy.max_grad_norm", known) == "privacy.max_grad_norm"
