"""What the parser refuses is told in one line: the setting, its value, and what it takes."""

import json

import pytest

from dp_lightning.commands.composition import Composer
from dp_lightning.commands.parser_messages import one_line, shortened
from dp_lightning.errors import ConfigurationError


def transforms(name, **settings):
    return ["--postprocess.transforms", json.dumps([{"class_path": name, "init_args": settings}])]


FEATURES = ["--data", "CachedFeatures", "--data.init_args.images.class_path", "Digits"]

WRONG = [
    (["--trainer.max_epochs", "many"], "trainer.max_epochs is many; give a whole number or null."),
    (["--privacy.delta", "small"], "privacy.delta is small; give a number."),
    (["--privacy.not_private", "maybe"], "privacy.not_private is maybe; give true or false."),
    (["--privacy.clipping", "flatt"], "privacy.clipping is flatt; give flat or per_layer."),
    (["--privacy", "{delta: x}"], "privacy.delta is x; give a number."),
    (["--averaging.decay", "a"], "averaging.decay is a; give a number or null."),
    (["--model.init_args.channels", "x"], "model.init_args.channels is x; give a whole number."),
    (["--optimizer.init_args.lr", "fast"], "optimizer.init_args.lr is fast; give a number."),
    (["--optimizer.lr", "fast"], "optimizer.init_args.lr is fast; give a number."),
    (
        [*FEATURES, "--data.init_args.images.init_args.val_fraction", "abc"],
        "data.init_args.images.init_args.val_fraction is abc; give a number.",
    ),
    (transforms("Momentum", beta="x"), "postprocess.transforms.init_args.beta is x; give a number."),
    (transforms("Momentum", betta=0.9), "The class of postprocess.transforms has no setting betta."),
    (["--model.widht", "4"], "The class of model has no setting widht."),
    (["--model", "3"], "model is 3; give the name of a class."),
    (["--model", "torch.nn.Linear"], "model is torch.nn.Linear, which is not a LightningModule."),
    (
        ["--model", "my.module.Class"],
        "model names the class my.module.Class, which cannot be used: No module named 'my'.",
    ),
    (["--model.init_args.channels"], "--model has no value: give one after it."),
    (
        ["privacy.delta=1"],
        "privacy.delta=1 is no option: settings begin with two dashes, as in --privacy.delta=1.",
    ),
    (
        ["--privacy.dleta", "1"],
        "There is no setting privacy.dleta. Did you mean privacy.delta? `--help` lists the settings.",
    ),
]


@pytest.fixture(scope="module")
def compose():
    """Reads the options of `dpl fit`, with a parser that is made once."""
    return Composer()


@pytest.mark.parametrize(("arguments", "message"), WRONG, ids=[" ".join(given)[:40] for given, _ in WRONG])
def test_a_refusal_is_one_line(compose, arguments, message):
    with pytest.raises(ConfigurationError) as refused:
        compose(["--config", "configs/digits.yaml", *arguments])
    assert str(refused.value) == message


@pytest.mark.parametrize(
    ("setting", "value", "near"),
    [
        ("trainer.callbacks", "ModelCheckpont", "ModelCheckpoint"),
        ("lr_scheduler", "WarmupCosin", "WarmupCosine"),
        ("trainer.logger", "TensorBoardLoger", "TensorBoardLogger"),
        ("optimizer", "AdamWW", "AdamW"),
    ],
)
def test_a_class_that_does_not_exist_is_named_with_the_nearest(compose, setting, value, near):
    with pytest.raises(ConfigurationError) as refused:
        compose(["--config", "configs/digits.yaml", f"--{setting}", value])
    assert str(refused.value).startswith(f"There is no class '{value}' for {setting}. Did you mean {near}? ")


def test_a_message_of_another_form_is_folded_into_one_line():
    assert one_line("Something\n  else\n\tfails", options=[], classes=[]) == "Something else fails"


def test_a_value_as_long_as_a_file_is_shortened():
    text = one_line(
        f"Parser key \"privacy.delta\":\n  Expected a <class 'float'>. Got value: {'x' * 10_000}",
        options=[],
        classes=[],
    )
    assert text.startswith("privacy.delta is xxx")
    assert text.endswith("give a number.")
    assert len(text) < 300
    assert shortened("short") == "short"
