"""What the command line takes from the data for the model cannot be set to something else, wherever it is set."""

import pytest

from dp_lightning.commands.composition import Stopped
from dp_lightning.commands.named_configs import FOLDER
from dp_lightning.commands.training import command_line
from dp_lightning.errors import ConfigurationError

DIGITS = str(FOLDER / "digits.yaml")
QUIET = ["--trainer.accelerator=cpu", "--trainer.logger=false", "--trainer.enable_progress_bar=false"]


def read(tmp_path, *arguments, text="{}"):
    (tmp_path / "mine.yaml").write_text(text)
    files = ["--config", DIGITS, f"--config={tmp_path / 'mine.yaml'}"]
    return command_line(["fit", *files, f"--trainer.default_root_dir={tmp_path}", *QUIET, *arguments], Stopped)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "model: {init_args: {num_classes: 10, in_channels: 1, image_size: 8}}"),
        (["--model.num_classes=10", "--model.init_args.in_channels", "1"], "{}"),
        (["--model.num_classes=10"], "model: {init_args: {num_classes: 7}}"),
        (["--data.mean=[0.25]"], "model: {class_path: TimmModule, init_args: {name: resnet18, mean: [0.25]}}"),
    ],
)
def test_the_value_of_the_data_may_be_repeated(tmp_path, arguments, text):
    assert read(tmp_path, *arguments, text=text).datamodule.num_classes == 10


@pytest.mark.parametrize(
    ("arguments", "text", "message"),
    [
        ([], "model: {init_args: {num_classes: 7}}", "num_classes is 7, and the data has 10"),
        ([], "model: {init_args: {in_channels: 3}}", "in_channels is 3, and the data has 1"),
        ([], "model: {class_path: SmallCNNModule, init_args: {image_size: 9}}", "image_size is 9, and the data has 8"),
        (["--model.num_classes=7"], "model: {init_args: {num_classes: 10}}", "num_classes is 7, and the data has 10"),
        (
            [],
            "model: {class_path: TimmModule, init_args: {name: resnet18, std: [0.5]}}",
            r"std is \[0.5\], and the data has \[0.376\]",
        ),
    ],
)
def test_another_value_than_that_of_the_data_is_refused(tmp_path, arguments, text, message):
    with pytest.raises(ConfigurationError, match=rf"^model\.init_args\.{message}; leave it out: it comes from the"):
        read(tmp_path, *arguments, text=text)
