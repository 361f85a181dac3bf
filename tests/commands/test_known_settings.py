"""Misspelt names are found before torch is imported, and no name that the parser knows is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dp_lightning.cli import main
from dp_lightning.commands.known_settings import FILE, require_known
from dp_lightning.commands.named_configs import FOLDER, GRIDS, names, with_paths
from dp_lightning.errors import ConfigurationError

sys.path.insert(0, str(Path(__file__).parents[2]))
from tools.known_settings import content

DIGITS = str(FOLDER / "digits.yaml")

TYPOS = [
    (
        ["--privacy.target_epsilom", "8"],
        "There is no setting privacy.target_epsilom. Did you mean privacy.target_epsilon?",
    ),
    (["--trainer.max_epoch=3"], "There is no setting trainer.max_epoch. Did you mean trainer.max_epochs?"),
    (["--privcy.delta", "1e-5"], "There is no setting privcy.delta. Did you mean privacy.delta?"),
    (["--averaging.deacy", "0.9"], "There is no setting averaging.deacy. Did you mean averaging.decay?"),
    (["--privacy.target_eps", "8"], "There is no setting privacy.target_eps. Did you mean privacy.target_epsilon?"),
    (["--ckpt", "last"], "There is no setting ckpt. Did you mean ckpt_path?"),
    (["--seed", "1"], "There is no setting seed. Did you mean seed_everything?"),
    (
        ["--postprocess.transform", "null"],
        "There is no setting postprocess.transform. Did you mean postprocess.transforms?",
    ),
    (["--model.init_args.chanels", "4"], "SmallCNNModule has no setting chanels. Did you mean channels?"),
    (["--model.chanels", "4"], "SmallCNNModule has no setting chanels. Did you mean channels?"),
    (["--data.init_args.agument=true"], "Digits has no setting agument. Did you mean augment?"),
    (["--optimizer.init_args.learning_rate", "1"], "SGD has no setting learning_rate. Did you mean lr?"),
    (["--optimizer.momentun", "0.9"], "SGD has no setting momentun. Did you mean momentum?"),
    (["--lr_scheduler.init_args.warm_up", "9"], "WarmupCosine has no setting warm_up."),
    (
        ["--model", "TimmModule", "--model.init_args.model_name", "x"],
        "TimmModule has no setting model_name. Did you mean name?",
    ),
    (["--model=WideResNetModule", "--model.widht", "4"], "WideResNetModule has no setting widht. Did you mean width?"),
    (["--model", "SmalCNNModule"], "model has no class 'SmalCNNModule'. Did you mean SmallCNNModule?"),
    (["--model.class_path", "TimModule"], "model has no class 'TimModule'. Did you mean TimmModule?"),
    (["--data", "Digit"], "data has no class 'Digit'. Did you mean Digits?"),
    (["--data", "cifar10"], "data has no class 'cifar10'. Did you mean CIFAR10?"),
    (["--optimizer", "AdamWW"], "optimizer has no class 'AdamWW'. Did you mean AdamW?"),
    (["--lr_scheduler", "WarmupCosin"], "lr_scheduler has no class 'WarmupCosin'. Did you mean WarmupCosine?"),
    (
        ["--postprocess.transforms", "[Momentum, {class_path: Normalize}, Normalise]"],
        "postprocess.transforms has no class 'Normalise'. Did you mean Normalize?",
    ),
    (["--confg", "x"], "There is no setting confg. Did you mean config?"),
    (["--config", "dp_moun"], "There is no file dp_moun, and no configuration of that name. Did you mean dp_muon?"),
    (
        ["--postprocess.transforms", "[{class_path: Momentum, init_args: {beta: 0.9, beta: 0.5}}]"],
        "--postprocess.transforms has 'beta' twice, in line 1; keep one.",
    ),
    (["--config={trainer: {max_steps: 1}, trainer: {}}"], "--config has 'trainer' twice, in line 1; keep one."),
    (["--config=nowhere.yaml"], "There is no file nowhere.yaml, and no configuration of that name."),
]

IN_FILES = [
    (
        "postprocess: {transforms: [Momentum, Normalise]}",
        "postprocess.transforms has no class 'Normalise'. Did you mean Normalize?",
    ),
    (
        "privacy: {target_epsilom: 3}",
        "There is no setting privacy.target_epsilom. Did you mean privacy.target_epsilon?",
    ),
    ("privcy: {delta: 3}", "There is no setting privcy. Did you mean privacy?"),
    ("trainer: {max_epoch: 3}", "There is no setting trainer.max_epoch. Did you mean trainer.max_epochs?"),
    ("model: {init_args: {chanels: 3}}", "SmallCNNModule has no setting chanels. Did you mean channels?"),
    ("model: {class_path: TimmModule, init_args: {model_name: x}}", "TimmModule has no setting model_name."),
    (
        "postprocess: {transforms: [{class_path: Momentun}]}",
        "postprocess.transforms has no class 'Momentun'. Did you mean Momentum?",
    ),
    ("postprocess: {transforms: [{class_path: Momentum, init_args: {betta: 1}}]}", "Momentum has no setting betta."),
    (
        "data: {class_path: CachedFeatures, init_args: {images: {class_path: Digits, init_args: {agument: 1}}}}",
        "Digits has no setting agument. Did you mean augment?",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), TYPOS, ids=[" ".join(given) for given, _ in TYPOS])
def test_a_misspelt_option_is_refused_with_the_nearest_name(arguments, message):
    with pytest.raises(ConfigurationError) as refused:
        require_known(with_paths(["fit", "--config", DIGITS, *arguments]))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("text", "message"), IN_FILES, ids=[text[:40] for text, _ in IN_FILES])
def test_a_misspelt_key_of_a_file_is_refused_with_the_file(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        require_known(["fit", "--config", DIGITS, f"--config={path}"])
    assert str(refused.value).startswith(f"{path}: {message}")


A_CONFIGURATION = (
    "a configuration has settings by name, such as model, data and privacy. `dpl init FOLDER` writes one for your "
    "images, and `dpl configs` lists some."
)
NO_MAPPING = {"": "empty", "# nothing\n": "empty", "hello\n": "text", "3": "text", "- a\n- b\n": "a list"}
NOT_YAML = [
    ("privacy:\n  delta: 1\nmodel: {}\nprivacy:\n  delta: 2\n", "has 'privacy' twice, in lines 1 and 4; keep one."),
    ("data:\n  init_args:\n    root: a\n    root: a\n", "has 'root' twice, in lines 3 and 4; keep one."),
    *((text, f"is {kind}; {A_CONFIGURATION}") for text, kind in NO_MAPPING.items()),
    ("trainer:\n\tmax_steps: 1\n", "has a tab in line 2, column 1; YAML is indented by spaces."),
    ("trainer:\n  max_steps: 1\n  \tmax_epochs: 1\n", "has a tab in line 3, column 3; YAML is indented by spaces."),
    (
        "privacy:\n  delta: 1\n  target_epsilon 3\n  max_grad_norm: 1\n",
        "cannot be read as YAML: while scanning a simple key in line 3, column 3 could not find expected ':' in line "
        "4, column 3. Often a colon is missing in the line before, or the line is indented by another number of spaces "
        "than those around it.",
    ),
    (
        "privacy:\n  delta: 1\n  target_epsilon 3\n",
        "cannot be read as YAML: while scanning a simple key in line 3, column 3 could not find expected ':' in line "
        "4, column 1. Often a colon is missing in the line before, or the line is indented by another number of spaces "
        "than those around it.",
    ),
    (
        "privacy:\n  delta: 1\n   target_epsilon: 3\n",
        "cannot be read as YAML: mapping values are not allowed in this context in line 3, column 18. Often a colon is "
        "missing in the line before, or a value with a colon in it needs quotes.",
    ),
]


@pytest.mark.parametrize(("text", "message"), NOT_YAML, ids=[message for _, message in NOT_YAML])
def test_what_is_no_yaml_of_settings_is_refused_with_the_file_and_the_fix(tmp_path, text, message):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        require_known(["fit", "--config", DIGITS, f"--config={path}"])
    assert str(refused.value) == f"{path} {message}"


@pytest.mark.parametrize("name", [name for name in names() if not name.startswith(GRIDS)])
@pytest.mark.parametrize("command", ["fit", "validate", "test", "predict"])
def test_every_configuration_of_the_package_passes(name, command):
    require_known(with_paths([command, "--config", name]))


def test_the_settings_of_every_grid_pass():
    for name in names():
        if name.startswith(GRIDS):
            grid = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
            axes = [axis["setting"] for axis in grid["axes"].values() if "setting" in axis]
            points = [point or {} for axis in grid["axes"].values() if "setting" not in axis for point in axis.values()]
            settings = [
                *axes,
                *grid.get("settings", {}),
                *(key for point in points for key in point.get("settings", {})),
            ]
            require_known(["fit", *(f"--{setting}=1" for setting in settings)])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model", "mine.Network", "--model.init_args.anything", "1"],
        ["--data.class_path=mine.Data", "--data.anything=1"],
        ["--model.init_args.anything", "1"],
        ["--trainer.logger", "CSVLogger", "--trainer.logger.init_args.save_dir", "x"],
        ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=x"],
        ["--postprocess.transforms+=Momentum", "--postprocess.transforms.beta=0.9"],
        ["--model", "dp_lightning.lightning_modules.WideResNetModule", "--model.depth", "16"],
        ["--optimizer", "torch.optim.Adam", "--optimizer.betas", "[0.9, 0.99]"],
        ["--model.dict_kwargs.x", "1", "--model.help", "TimmModule", "--print_config"],
        ["--trainer.max_steps", "-1", "--privacy.disk.gain", "0.5"],
        ["--config", "{not: [yaml"],
    ],
)
def test_what_only_the_parser_can_know_is_left_to_it(arguments):
    require_known(["fit", *arguments])


def test_a_class_that_replaces_that_of_the_file_has_its_own_settings():
    require_known(["fit", "--config", DIGITS, "--model", "WideResNetModule", "--model.init_args.depth", "16"])
    with pytest.raises(ConfigurationError, match="no setting depth"):
        require_known(["fit", "--config", DIGITS, "--model.init_args.depth", "16"])


def test_other_versions_of_the_libraries_are_left_to_the_parser(monkeypatch):
    monkeypatch.setattr("dp_lightning.commands.known_settings.version", lambda name: "2.11.0")
    require_known(["fit", "--optimizer", "OfLater", "--trainer.new_setting", "1"])


def test_a_file_that_is_no_configuration_is_refused_with_other_versions_too(monkeypatch, tmp_path):
    monkeypatch.setattr("dp_lightning.commands.known_settings.version", lambda name: "2.11.0")
    (tmp_path / "mine.yaml").touch()
    with pytest.raises(ConfigurationError, match=r"mine\.yaml is empty; a configuration has settings by name"):
        require_known(["fit", "--config", str(tmp_path / "mine.yaml")])


def test_the_names_are_those_of_the_parser():
    assert json.loads(FILE.read_text()) == content(), "Run `python tools/known_settings.py`."


def test_torch_is_not_imported_for_a_misspelt_name():
    code = (
        "import sys\nfrom dp_lightning.cli import main\n"
        "try: main(['fit', 'digits', '--privacy.dleta', '1'])\n"
        "except SystemExit as left: print(left.code, sorted({'torch', 'lightning', 'numpy'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split(maxsplit=1) == ["2", "[]\n"]
    assert "Did you mean privacy.delta?" in shown.stderr


def test_a_command_that_does_not_exist_names_the_nearest(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fti"])
    assert "there is no command 'fti'. Did you mean fit?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["plan"], ["audit"], ["analyze", "snr"]])
def test_commands_with_the_options_of_a_fit_find_misspelt_names_too(command, capsys):
    with pytest.raises(SystemExit) as ended:
        main([*command, DIGITS, "--privacy.target_epsilom", "8"])
    assert ended.value.code == 2
    assert "Did you mean privacy.target_epsilon?" in capsys.readouterr().err
