"""`dpl init`: what it finds in a folder, what it refuses, and that the file it writes runs as it is."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from PIL import Image

from dp_lightning.cli import main
from dp_lightning.commands.starting_file import times
from dp_lightning.commands.starting_point import batch_size_for, delta_for, learning_rate_for
from dp_lightning.datamodules import ImageFolder, NpzImages
from dp_lightning.datamodules.survey import Survey
from dp_lightning.errors import DataError

NOISE = np.random.default_rng(0)
NAMES = ("dark", "light")
# As written, but for the number of epochs: a step takes a tenth of a second.
SHORT = ["--trainer.max_epochs", "4", "--trainer.check_val_every_n_epoch", "4"]


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.set_num_threads(1)


def write_image(path, label=0, size=(14, 12)):
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = NOISE.integers(120 * label, 120 * label + 130, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)


def tree(root, splits=(("train", 30), ("test", 5)), person=None):
    for split, each in splits:
        for label, name in enumerate(NAMES):
            for number in range(each):
                inside = "" if person is None else person(number)
                write_image(root / split / name / inside / f"{number}.png", label)
    return root


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    return tree(tmp_path_factory.mktemp("images") / "photos")


@pytest.fixture
def photos(images):
    return Path(shutil.copytree(images, "photos"))


def written(name="photos.yaml"):
    return yaml.safe_load(Path(name).read_text())


def refused(capsys, *arguments):
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(["init", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def statement():
    return json.loads(Path("lightning_logs/version_0/privacy_statement.json").read_text())


def test_a_run_from_scratch_trains_as_it_is_written(photos):
    main(["init", "photos", "--from-scratch", "--epsilon", "5"])
    assert written()["trainer"]["max_epochs"] == 50
    main(["fit", "--config", "photos.yaml", *SHORT])
    told = statement()
    assert (told["num_train"], told["delta"]) == (60, 1e-3)
    assert (told["expected_batch_size"], told["num_steps"]) == (15, 16)
    assert 4.9 < told["epsilon"]["prv"] <= 5
    assert json.loads(Path("lightning_logs/version_0/result.json").read_text())["test_accuracy_last"] is not None


def test_a_run_on_features_trains_as_it_is_written(photos):
    torch.save(timm.create_model("test_efficientnet_gn").state_dict(), "network.pth")
    main(["init", "photos", "--backbone", "test_efficientnet_gn", "--weights", "network.pth"])
    assert written()["model"]["class_path"] == "LinearProbeModule"
    main(["fit", "--config", "photos.yaml", *SHORT])
    assert (statement()["num_train"], statement()["num_steps"]) == (60, 16)


def test_a_run_on_scattering_coefficients_needs_no_network(photos, capsys):
    main(["init", "photos", "--backbone", "scattering"])
    told, content = capsys.readouterr().out, written()
    assert "one layer on scattering coefficients" in told
    assert "downloads" not in told
    assert "weights" not in content["data"]["init_args"]
    assert content["model"]["init_args"] == {"normalize": "unit"}
    assert content["data"]["init_args"]["images"]["init_args"]["image_size"] == 12
    assert content["data"]["init_args"]["backbone_kwargs"] == {"mirror": False}
    assert f"{3 * 81 * 3 * 3 * 2 + 2:,} parameters" in told
    main(["fit", "--config", "photos.yaml", *SHORT])
    assert (statement()["num_train"], statement()["num_steps"]) == (60, 16)


@pytest.mark.parametrize(
    ("options", "channels"), [(["--from-scratch"], 1), (["--backbone", "scattering"], 1), ([], None)]
)
def test_images_without_colours_are_taken_in_grey_but_by_a_network_that_has_seen_colours(photos, options, channels):
    for path in photos.rglob("*.png"):
        with Image.open(path) as image:
            image.convert("L").save(path)
    main(["init", "photos", *options])
    data = written()["data"]
    images = data if options == ["--from-scratch"] else data["init_args"]["images"]
    assert images["init_args"].get("in_channels") == channels
    if options == ["--from-scratch"]:
        main(["fit", "--config", "photos.yaml", *SHORT])
        assert statement()["num_steps"] == 16
    write_image(photos / "train" / "dark" / "colour.png")
    main(["init", "photos", *options, "--force"])
    assert "in_channels" not in Path("photos.yaml").read_text()


def test_few_images_start_with_features_that_the_first_run_downloads(photos, capsys):
    main(["init", "photos"])
    data = written()["data"]
    assert (data["class_path"], data["init_args"]["weights"]) == ("CachedFeatures", None)
    assert data["init_args"]["images"] == {
        "class_path": "ImageFolder",
        "init_args": {"root": "photos", "image_size": 12},
    }
    assert "The first run downloads the weights" in capsys.readouterr().out


def test_a_file_is_overwritten_only_by_force(photos, capsys):
    Path("photos.yaml").write_text("mine")
    assert "photos.yaml exists" in refused(capsys, "photos", "--from-scratch")
    assert Path("photos.yaml").read_text() == "mine"
    main(["init", "photos", "--from-scratch", "--out", "other.yaml"])
    main(["init", "photos", "--from-scratch", "--force"])
    assert written() == written("other.yaml")


def spoil(paths):
    """Spoil files in different ways; returns them with a part of the reason."""
    whole = [
        (lambda path: path.write_bytes(b""), "it is empty"),
        (lambda path: path.write_bytes(path.read_bytes()[:60]), "truncated"),
        (lambda path: path.write_text("<html>403</html>"), "not an image of a known format"),
        (lambda path: Image.fromarray(np.ones((9, 9), np.float32)).save(path, format="TIFF"), "32 bits per pixel"),
    ]
    found = {}
    for number, path in enumerate(paths):
        way, reason = whole[number % len(whole)]
        way(path)
        found[str(path)] = reason
    return found


def test_bad_files_are_listed_with_their_reasons_and_do_not_count(photos, capsys):
    bad = spoil([photos / "train" / name / f"{number}.png" for name in NAMES for number in range(6)])
    main(["init", "photos", "--from-scratch"])
    with Path("photos.bad_files.txt").open(newline="") as file:
        listed = dict(csv.reader(file, delimiter="\t"))
    assert listed.keys() == bad.keys()
    assert all(bad[path] in reason for path, reason in listed.items())
    shown = capsys.readouterr().out
    assert "12 files cannot be read; photos.bad_files.txt lists all of them" in shown
    assert written()["privacy"]["expected_batch_size"] == batch_size_for(48, at_most=100)
    # As it says: they are removed, and N is that of the file.
    with pytest.raises(DataError, match="12 of 60 files"):
        ImageFolder("photos").prepare_data()
    (command,) = [line.partition("all of them: ")[2] for line in shown.splitlines() if "| xargs" in line]
    subprocess.run(command, shell=True, check=True)
    data = ImageFolder("photos")
    data.prepare_data()
    assert data.num_train == 48


def test_a_few_bad_files_are_on_the_screen_alone(photos, capsys):
    Path("photos.bad_files.txt").write_text("of an earlier survey")
    spoil([photos / "test" / "dark" / "2.png"])
    main(["init", "photos", "--from-scratch"])
    assert "photos/test/dark/2.png: it is empty" in capsys.readouterr().out
    assert not Path("photos.bad_files.txt").exists()


def test_what_a_survey_counts(photos):
    write_image(photos / "train" / "dark" / "wide.png", size=(40, 20))
    Image.new("L", (12, 12)).save(photos / "train" / "light" / "grey.png")
    shutil.copy(photos / "train" / "dark" / "0.png", photos / "train" / "dark" / "again.png")
    shutil.copy(photos / "train" / "dark" / "0.png", photos / "test" / "dark" / "trained.png")
    (photos / "train" / "light" / "9.png").write_bytes(b"")
    survey = Survey.of(ImageFolder("photos"))
    assert survey.counts("train") == [32, 30]
    assert survey.counts("test") == [6, 5]
    assert [[Path(survey.files["train"][place]).name for place in pair] for pair in survey.repeats] == [
        ["0.png", "again.png"]
    ]
    assert [(split, Path(survey.files[split][place]).name) for split, place in survey.shared] == [
        ("test", "trained.png")
    ]
    assert survey.median_side == 12
    assert survey.kinds == {"colour": 61, "grey": 1}
    assert sorted({look.width for look in survey.readable}) == [12, 14, 40]
    assert [Path(path).name for path, _ in survey.bad] == ["9.png"]


def test_equal_images_are_named_those_of_two_classes_first(photos, capsys):
    for number in range(4):
        shutil.copy(photos / "train" / "dark" / f"{number}.png", photos / "train" / "dark" / f"again{number}.png")
    shutil.copy(photos / "train" / "dark" / "5.png", photos / "train" / "light" / "copy.png")
    main(["init", "photos", "--from-scratch"])
    shown = capsys.readouterr().out
    assert "repeats in the training set: 5, 1 of them in another class; each counts" in shown
    assert "photos/train/dark/5.png = photos/train/light/copy.png\n  photos/train/dark/0.png = photos/" in shown
    assert shown.count(".png = ") == 3
    assert "  and 2 more\n" in shown
    assert "Look at the images that are there twice" in shown


def test_images_that_are_in_two_sets_are_named(photos, capsys):
    shutil.copy(photos / "train" / "dark" / "3.png", photos / "test" / "dark" / "again.png")
    main(["init", "photos", "--from-scratch"])
    shown = capsys.readouterr().out
    assert "evaluation images that are also in the training set: 1\n  photos/test/dark/again.png\n" in shown


def test_a_run_that_can_only_guess_is_told_so(photos, capsys):
    main(["init", "photos", "--from-scratch"])
    assert "So much noise probably leaves nothing to learn" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("ratio", "words"), [(0.996, "as long"), (1.24, "1.2 times as long"), (98.1, "98 times as long")]
)
def test_a_length_in_words(ratio, words):
    assert times(ratio) == words


def test_a_gif_is_an_image(photos):
    Image.new("P", (12, 12), 7).save(photos / "train" / "dark" / "old.GIF")
    survey = Survey.of(ImageFolder("photos"))
    assert any(path.endswith("old.GIF") for path in survey.files["train"])
    assert survey.bad == []


def test_a_folder_of_one_class_is_refused(photos, capsys):
    for split in ("train", "test"):
        shutil.rmtree(photos / split / "light")
    with pytest.raises(SystemExit):
        main(["init", "photos", "--from-scratch"])
    assert "images of one class, dark; a classifier tells at least 2 classes apart" in capsys.readouterr().err


def test_a_folder_of_classes_alone_is_told_how_to_be_split(photos, capsys):
    flat = (photos / "train").rename("flat")
    told = refused(capsys, str(flat), "--from-scratch", "--epsilon", "5")
    (command,) = [line for line in told.splitlines() if line.startswith("  mkdir")]
    make, _, init = command.rpartition(" && ")
    subprocess.run(make, shell=True, check=True)
    assert init == "dpl init flat_run --from-scratch --epsilon 5"
    main(init.split()[1:])
    settings = written("flat_run.yaml")["data"]["init_args"]
    assert settings["val_fraction"] == 0.1
    data = ImageFolder(**settings)
    data.prepare_data()
    assert (data.num_train, data.num_val) == (54, 6)


def test_an_npz_file_has_its_own_size(capsys):
    arrays = {"train_images": NOISE.integers(0, 256, (50, 28, 28), dtype=np.uint8), "train_labels": np.arange(50) % 3}
    np.savez("scans.npz", **arrays, test_images=arrays["train_images"][:4], test_labels=np.zeros(4, int))
    main(["init", "scans.npz", "--from-scratch"])
    data = written("scans.yaml")["data"]
    assert data == {"class_path": "NpzImages", "init_args": {"path": "scans.npz", "augment": False}}
    assert NpzImages(**data["init_args"]).num_train == 50
    shown = capsys.readouterr().out
    assert "evaluation images that are also in the training set: 4" in shown
    assert "50 in grey" in shown


def test_folders_inside_the_class_folders_are_persons():
    tree(Path("scans"), person=lambda number: f"p{number // 3}")
    main(["init", "scans", "--from-scratch"])
    found = written("scans.yaml")
    assert found["privacy"]["unit_of_privacy"] == "group"
    assert found["privacy"]["images_per_group"] == 4  # a person has 3 images in each of two classes
    data = ImageFolder(**found["data"]["init_args"])
    assert data.num_train_groups == 10
    assert found["privacy"]["expected_batch_size"] == 2


@pytest.mark.parametrize("persons", [False, True])
def test_settings_that_follow_from_the_images_are_said_to_be_unprotected(persons):
    tree(Path("scans"), person=(lambda number: f"p{number // 3}") if persons else None)
    main(["init", "scans", "--from-scratch"])
    head = " ".join(line.strip("# ") for line in Path("scans.yaml").read_text().splitlines() if line.startswith("#"))
    counted = ", or from the number of images of a person" if persons else ""
    assert (
        f"No noise protects those that follow from the sizes and colours of the images{counted}: set them yourself"
        in head
    )


@pytest.mark.parametrize("inside", [True, False])
def test_a_table_names_the_persons(photos, inside):
    table = photos / "owners.csv" if inside else Path("owners.csv")
    rows = [f"train/{name}/{number}.png,p{number % 12}" for name in NAMES for number in range(30)]
    table.write_text("\n".join(["file,patient", *rows]))
    main(["init", *([str(table)] if inside else ["photos", "--group-file", str(table)]), "--from-scratch"])
    found = written("owners.yaml" if inside else "photos.yaml")
    assert found["privacy"]["unit_of_privacy"] == "group"
    assert ImageFolder(**found["data"]["init_args"]).num_train_groups == 12


def test_a_table_with_several_columns_asks_which_one_names_persons(photos, capsys):
    Path("owners.csv").write_text("file,patient,age\n")
    told = refused(capsys, "photos", "--group-file", "owners.csv")
    assert "--group-column to one of patient, age" in told


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; give a folder of images, or an .npz or .csv file"),
        (["nowhere.npz"], "nowhere.npz does not exist"),
        (["nowhere.csv"], "nowhere.csv does not exist"),
        (["notes.txt"], "notes.txt is neither a folder nor an .npz"),
        (["empty"], "empty is empty. Put the images into empty/train/<class>/"),
        (["photos", "--from-scratch", "--backbone", "resnet50"], "leave out --weights and --backbone"),
        (["photos", "--weights", "nowhere.pth"], "--weights nowhere.pth is not a file"),
        (["photos", "--backbone", "vit_smal"], "timm has no model 'vit_smal'"),
        (["photos", "--from-scratch", "--epsilon", "-1"], "target_epsilon must be a finite number above 0"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(photos, capsys, arguments, message):
    Path("notes.txt").touch()
    Path("empty").mkdir()
    Path("linked").mkdir()
    for link in ("lost", "linked/train"):
        Path(link).symlink_to("/nowhere/else")
    assert message in refused(capsys, *arguments)
    assert not list(Path().glob("*.yaml"))


def test_control_characters_of_names_do_not_reach_the_terminal(photos, capsys):
    (photos / "train" / "dark").rename(photos / "train" / "da\x1b[31mrk")
    (photos / "test" / "dark").rename(photos / "test" / "da\x1b[31mrk")
    spoil([photos / "train" / "da\x1b[31mrk" / "0.png"])
    main(["init", "photos", "--from-scratch"])
    assert "\x1b" not in capsys.readouterr().out
    assert "\x1b" not in Path("photos.yaml").read_text()


def test_the_help_needs_no_torch():
    code = (
        "import sys; from dp_lightning.cli import main\ntry: main(['init', '--help'])\n"
        "except SystemExit: assert not {'torch', 'lightning', 'numpy', 'PIL'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize("count", [2, 50, 51, 499, 500, 1_437, 50_000, 50_001, 1_281_167])
def test_delta_is_the_largest_power_of_ten_up_to_half_of_one_over_n(count):
    delta = delta_for(count)
    assert delta <= 1 / (2 * count) < 10 * delta
    assert f"{delta:e}".startswith("1.000000e")


def test_the_batch_is_a_quarter_in_two_digits():
    assert [batch_size_for(count, at_most=4096) for count in (2, 60, 1_437, 3_999, 50_000)] == [1, 15, 350, 990, 4096]


def test_the_learning_rate_falls_with_the_noise():
    noises = (0.0, 0.1, 1.0, 3.0, 30.0)
    assert [learning_rate_for(noise, features=False) for noise in noises] == [0.3, 0.3, 0.04, 0.01, 0.001]
    assert [learning_rate_for(noise, features=True) for noise in noises] == [1.0, 1.0, 0.1, 0.05, 0.005]
    of_a_weight = (0.0, 4e-4, 1e-3, 6.5e-3)
    assert [learning_rate_for(noise, features=True, unit=True) for noise in of_a_weight] == [30.0, 30.0, 20.0, 2.0]
