"""`dpl init`: what it finds in a folder, what it refuses, and that the file it writes runs as it is."""

import json
import math
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import yaml
from depths import dicom, npz, pillow, tiff
from depths import tree as slices_in
from PIL import Image

from dp_lightning.cli import main
from dp_lightning.commands.starting_configuration import Model, delta_for, proposed_window, start_of
from dp_lightning.datamodules import ImageFolder, NpzImages
from dp_lightning.privacy.plan import RunShape, best_bands, error_of_noise

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


@pytest.mark.parametrize(
    ("options", "model", "parameters"),
    [
        (["--from-scratch", "--epsilon", "5"], "SmallCNNModule", 3922),
        (["--backbone", "test_efficientnet_gn", "--weights", "network.pth"], "LinearProbeModule", 514),
        (["--backbone", "scattering"], "SmallCNNModule", 32 * (3 * 9 * 9 + 1 + 32 * 9 + 1) + 2 * (32 * 3 * 3 + 1)),
    ],
)
def test_a_run_trains_as_it_is_written(photos, capsys, options, model, parameters):
    if "network.pth" in options:
        torch.save(timm.create_model("test_efficientnet_gn").state_dict(), "network.pth")
    main(["init", "photos", *options])
    told = capsys.readouterr().out
    assert "downloads" not in told
    assert ("two convolutions on features of scattering" in told) == ("scattering" in options)
    assert f"{parameters:,} parameters" in Path("photos.yaml").read_text()
    assert written()["model"]["class_path"] == model
    assert written()["privacy"].get("bands") == ("auto" if "scattering" in options else None)
    limits = written()["trainer"]
    assert limits["max_epochs"] % limits["check_val_every_n_epoch"] == 0  # the last weights are evaluated
    main(["fit", "--config", "photos.yaml", *SHORT])
    told = json.loads(Path("lightning_logs/version_0/privacy_statement.json").read_text())
    budget = 5 if "--epsilon" in options else 3
    assert (told["num_train"], told["expected_batch_size"], told["num_steps"], told["delta"]) == (60, 15, 16, 1e-3)
    assert 0.9 * budget < told["epsilon"]["prv"] <= budget
    assert json.loads(Path("lightning_logs/version_0/result.json").read_text())["test_accuracy_last"] is not None


@pytest.mark.parametrize(
    ("options", "channels"), [(["--from-scratch"], 1), (["--backbone", "scattering"], 1), ([], None)]
)
def test_images_without_colours_are_taken_in_grey_but_by_a_network_that_has_seen_colours(
    photos, capsys, options, channels
):
    for path in photos.rglob("*.png"):
        with Image.open(path) as image:
            image.convert("L").save(path)
    main(["init", "photos", *options])
    data = written()["data"]
    images = data if options == ["--from-scratch"] else data["init_args"]["images"]
    assert images["init_args"].get("in_channels") == channels
    downloads = "The first run downloads the weights" in capsys.readouterr().out
    assert downloads == (options == []) == (data["init_args"].get("weights", "none") is None)
    assert images["init_args"]["image_size"] == 12
    write_image(photos / "train" / "dark" / "colour.png")
    main(["init", "photos", *options, "--out", "colour.yaml"])
    assert "in_channels" not in Path("colour.yaml").read_text()


def test_no_file_is_overwritten(capsys):
    Path("photos.yaml").write_text("mine")
    assert "photos.yaml exists" in refused(capsys, "photos", "--from-scratch")
    assert Path("photos.yaml").read_text() == "mine"


def test_bad_files_are_listed_with_their_reasons_and_do_not_count(photos, capsys):
    bad = [photos / "train" / name / f"{number}.png" for name in NAMES for number in range(6)]
    for number, path in enumerate(bad):
        path.write_bytes(path.read_bytes()[:60] if number % 2 else b"")
    main(["init", "photos", "--from-scratch"])
    shown = capsys.readouterr().out
    assert "files that cannot be read, to be replaced or removed: 12" in shown
    assert ["dark", "24", "5"] in [line.split() for line in shown.splitlines()]
    listed = dict(line.strip().split(": ", 1) for line in shown.splitlines() if line.startswith("  photos/train"))
    assert list(listed) == list(map(str, bad))
    assert all(("truncated" if number % 2 else "it is empty") in listed[str(path)] for number, path in enumerate(bad))
    # N is that of the file once they are removed.
    assert written()["privacy"]["expected_batch_size"] == 48 // 4


def test_equal_images_are_named_those_of_two_classes_first(photos, capsys):
    for number in range(4):
        shutil.copy(photos / "train" / "dark" / f"{number}.png", photos / "train" / "dark" / f"again{number}.png")
    shutil.copy(photos / "train" / "dark" / "5.png", photos / "train" / "light" / "copy.png")
    shutil.copy(photos / "train" / "dark" / "7.png", photos / "test" / "dark" / "trained.png")
    main(["init", "photos", "--from-scratch"])
    shown = capsys.readouterr().out
    assert "repeats in the training set: 5, 1 of them in another class; each is an example" in shown
    assert "photos/train/dark/5.png = photos/train/light/copy.png\n  photos/train/dark/0.png = photos/" in shown
    assert shown.count(".png = ") == 3
    assert "evaluation images that are also in the training set: 1\n  photos/test/dark/trained.png\n" in shown
    assert "So much noise probably leaves nothing to learn" in shown


@pytest.mark.parametrize(("delta", "warned"), [(None, False), (5e-3, True)])
def test_a_delta_that_lets_persons_be_published_is_told_so(photos, capsys, delta, warned):
    given = [] if delta is None else ["--delta", str(delta)]
    main(["init", "photos", "--from-scratch", *given])
    shown = capsys.readouterr().out
    assert ("N delta is 0.3: the guarantee allows" in shown) == warned  # N is 60
    assert written()["privacy"]["delta"] == (delta or 1e-3)


@pytest.mark.parametrize("option", ["", "--epsilon 5"])
def test_a_folder_of_classes_alone_is_told_how_to_be_split(photos, capsys, option):
    flat = (photos / "train").rename("flat")
    told = refused(capsys, str(flat), *option.split())
    (command,) = [line for line in told.splitlines() if line.startswith("  mkdir")]
    make, _, init = command.rpartition(" && ")
    subprocess.run(make, shell=True, check=True)
    assert init == f"dpl init flat_run {option}".strip()
    main([*init.split()[1:], "--from-scratch"])
    settings = written("flat_run.yaml")["data"]["init_args"]
    assert settings["val_fraction"] == 0.1
    data = ImageFolder(**settings)
    data.prepare_data()
    assert (data.num_train, len(data.val_dataset)) == (54, 6)


def test_an_npz_file_has_its_own_size(capsys):
    arrays = {"train_images": NOISE.integers(0, 256, (50, 28, 28), dtype=np.uint8), "train_labels": np.arange(50) % 3}
    np.savez("scans.npz", **arrays, test_images=arrays["train_images"][:4], test_labels=np.zeros(4, int))
    main(["init", "scans.npz", "--from-scratch"])
    data = written("scans.yaml")["data"]
    assert data == {"class_path": "NpzImages", "init_args": {"path": "scans.npz", "augment": False}}
    assert NpzImages(**data["init_args"]).num_train == 50
    shown = capsys.readouterr().out
    assert "evaluation images that are also in the training set: 4" in shown
    assert "shorter side: 28 pixels (median); grey" in shown


@pytest.mark.parametrize(
    ("suffix", "write", "window", "values"),
    [
        (".png", pillow, [896, 1088], r"9\d\d to 1,\d\d\d"),
        (".tif", tiff, [896, 1088], r"9\d\d to 1,\d\d\d"),
        (".dcm", dicom, [-128, 64], r"-1\d\d to \d\d"),
        (".npz", pillow, [896, 1088], r"9\d\d to 1,\d\d\d"),
    ],
)
def test_more_than_8_bits_are_told_with_their_range_and_get_a_window(capsys, suffix, write, window, values):
    if write is dicom:
        pytest.importorskip("pydicom")
    data, is_array = slices_in(Path("scans"), write, suffix.replace("npz", "png"), train=30, test=5), suffix == ".npz"
    main(["init", str(npz(Path("scans.npz"), data) if is_array else data), "--from-scratch"])
    shown = capsys.readouterr().out
    assert re.search(rf"values: {values}, of more than 8 bits\n", shown)
    assert "is a proposal: replace it by what is known of such images" in shown
    text, found = Path("scans.yaml").read_text(), written("scans.yaml")["data"]["init_args"]
    assert "follow from the lowest and the highest value of the images without noise. Replace them" in text
    assert found["window"] == window
    dataset = (NpzImages if is_array else ImageFolder)(**found).train_dataset
    pixels = torch.stack([image for image, _ in dataset])
    assert pixels.unique().numel() > 150
    assert 0 < pixels.min() < 40 < 215 < pixels.max() <= 255


def test_images_of_8_bits_among_others_are_counted(photos, capsys):
    for name in NAMES:
        pillow(photos / "train" / name / "deep.png", NOISE.integers(0, 60_000, (14, 12)).astype(np.uint16))
    main(["init", "photos", "--from-scratch"])
    shown = capsys.readouterr().out
    assert "60 other images have 8 bits, and the window is applied to their values too" in shown
    assert "are few" not in shown


@pytest.mark.parametrize(
    ("values", "window"),
    [
        ((0, 4095), [0, 4096]),
        ((0, 65_535), [0, 65_536]),
        ((-1024, 3071), [-1024, 3072]),
        ((0.0, 1.0), [0, 1]),
        ((5, 5), [5, 5.0625]),
    ],
)
def test_a_proposed_window_holds_all_values_and_is_round(values, window):
    assert proposed_window(*values) == window


def test_folders_inside_the_class_folders_are_persons():
    tree(Path("scans"), person=lambda number: f"p{number // 3}")
    main(["init", "scans", "--from-scratch"])
    found = written("scans.yaml")
    assert found["privacy"]["unit_of_privacy"] == "group"
    assert found["privacy"]["images_per_group"] == 4  # a person has 3 images in each of two classes
    data = ImageFolder(**found["data"]["init_args"])
    assert data.num_train_groups == 10
    assert found["privacy"]["expected_batch_size"] == 2


@pytest.mark.parametrize("text", ["file,owner\ndark/0.png,7\n", "file,age\n0,8\n", "file\n0,8\n"])
def test_another_table_leaves_the_folders_of_classes_to_say_the_labels(photos, capsys, text):
    (photos / "train").rename("flat")
    Path("flat/owners.csv").write_text(text)
    assert "flat_run/train && dpl init flat_run" in refused(capsys, "flat")
    said = refused(capsys, "flat", "--label-file", "flat/owners.csv")
    assert "Give --label-column" in said or "line 2: the row has 2 cells" in said


@pytest.mark.parametrize("folders", [("part_1", "part_2"), ("images", "masks"), ("train", "test")])
def test_a_table_comes_before_folders_that_are_no_classes(folders):
    for number, kind in enumerate(NAMES * 20):
        write_image(Path("scans", folders[number // 30], f"{number}.png"), NAMES.index(kind))
    lines = [f"lesion{k},{k},{kind},consensus,{40 + k}" for k, kind in enumerate(NAMES * 20)]
    Path("scans/metadata.csv").write_text("\n".join(["lesion_id,image_id,dx,dx_type,age", *lines]))
    main(["init", "scans", "--from-scratch"])
    data = written("scans.yaml")["data"]
    assert (data["class_path"], data["init_args"]["label_column"]) == ("ImageTable", "dx")
    assert ("val_fraction" in data["init_args"]) == ("test" not in folders)


@pytest.mark.parametrize("before", ["", "train/", "photos/train/"])
def test_a_table_names_the_persons(photos, before):
    rows = [f"{before}{name}/{number}.png,p{number % 12},7" for name in NAMES for number in range(30)]
    Path("owners.csv").write_text("\n".join(["file,patient,age", *rows]))
    main(["init", "photos", "--group-file", "owners.csv", "--group-column", "patient", "--from-scratch"])
    assert written()["privacy"]["unit_of_privacy"] == "group"
    assert ImageFolder(**written()["data"]["init_args"]).num_train_groups == 12


KINDS = [NAMES[number % 2] for number in range(40)]


def flat():
    """Images of both kinds in one folder; even numbers are dark."""
    for number, kind in enumerate(KINDS):
        write_image(Path("scans", "images", f"{number}.png"), NAMES.index(kind))


@pytest.mark.parametrize(
    ("table", "header", "row", "options", "settings"),
    [
        ("scans/train.csv", "image,diagnosis", "{k},{kind}", [], {}),
        ("all.csv", "image;diagnosis", "{k}.png;{kind}", [], {}),
        ("scans/tables/x.tsv", "image\tdiagnosis", "images/{k}.png\t{kind}", [], {}),
        (
            "scans/train.csv",
            "row,image,diagnosis,Patient ID",
            "{k},{k},{kind},p{k}",
            [],
            {"group_column": "Patient ID"},
        ),
        (
            "scans/train.csv",
            "row,image,diagnosis,mrn",
            "{k},{k},{kind},p{k}",
            ["--person-column", "mrn", "--image-column", "row"],
            {"image_column": "row", "group_column": "mrn"},
        ),
        ("scans/train.csv", "image,kind", "{k},{kind}", ["--label-column", "kind"], {"label_column": "kind"}),
        ("scans/train.csv", "image,dim,bright,sex", "{k},{dim},{bright},f", [], {"label_column": ["dim", "bright"]}),
        (
            "scans/train.csv",
            "image,Finding Labels",
            "{k},{several}",
            [],
            {"label_column": "Finding Labels", "label_separator": "|"},
        ),
        ("scans/train.csv", "image,Finding", "{k},{place} {kind}", [], {"label_column": "Finding"}),
    ],
)
def test_a_table_of_labels_is_found_and_named(capsys, table, header, row, options, settings):
    flat()
    settings = {"image_column": "image", "label_column": "diagnosis", **settings}
    Path(table).parent.mkdir(exist_ok=True)
    lines = [
        row.format(k=k, kind=kind, dim=1 - k % 2, bright=k % 2, several=("a", "b", "a|b")[k % 3], place=f"site{k % 3}")
        for k, kind in enumerate(KINDS)
    ]
    Path(table).write_text("\n".join([header, *lines]))
    Path("other.csv").write_text("run,accuracy\n1,2,3\n")  # of something else, and malformed
    main(["init", "scans", "--from-scratch", *options])
    shown, data = capsys.readouterr().out, written("scans.yaml")["data"]
    assert data["class_path"] == "ImageTable"
    found = data["init_args"]
    assert found.pop("label_file") == table
    assert f"label_file: {table}\nlabel_column: {settings['label_column']}\n" in shown
    assert "give --label-file, --label-column, --image-column and --person-column" in shown
    own = {"root", "val_fraction", "image_size", "augment"}
    assert {name: value for name, value in found.items() if name not in own} == settings
    assert ("unit_of_privacy" in written("scans.yaml")["privacy"]) == ("group_column" in settings)
    assert ["all", "40"] in [line.split() for line in shown.splitlines()]


def test_a_run_trains_on_a_table_as_it_is_written():
    flat()
    lines = [f"{k},{kind},{'test' if k > 29 else 'train'}" for k, kind in enumerate(KINDS)]
    Path("scans/labels.csv").write_text("\n".join(["image,label,split", *lines]))
    main(["init", "scans", "--from-scratch"])
    main(["fit", "--config", "scans.yaml", *SHORT])
    assert json.loads(Path("lightning_logs/version_0/privacy_statement.json").read_text())["num_train"] == 30


@pytest.mark.parametrize(
    ("files", "text", "options", "message"),
    [
        (["images/0.png"], None, [], "or give a table of their labels by --label-file"),
        (["images/0.png"], "image,kind\n0,dark", [], "which has the labels: kind? Give --label-column"),
        (["images/0.png"], "image,label\n0,dark,x", [], "scans/train.csv, line 2: the row has 3 cells"),
        (
            ["images/0.png"],
            "image,label\n0,dark",
            ["--label-column", "kind"],
            "has no column 'kind'; it has image, label",
        ),
        (["0.nii", "a/1.nii"], None, [], "scans holds 2 x .nii. The names of images end with"),
        (["cat/0.heic", "dog/1.heic"], None, [], "scans holds 2 x .heic"),
        (["train/cat/0.nii", "train/dog/1.nii"], None, [], "scans/train holds 2 x .nii"),
    ],
)
def test_a_folder_without_labels_or_images_is_told_what_it_holds(capsys, files, text, options, message):
    for file in files:
        write_image(Path("scans", file).with_suffix(".png"))
        Path("scans", file).with_suffix(".png").rename(Path("scans", file))
    if text is not None:
        Path("scans/train.csv").write_text(text)
    said = refused(capsys, "scans", *options)
    assert message in said
    assert "ln -s" not in said


@pytest.mark.parametrize("other", ["holdout", "masks", "extra"])
def test_what_is_passed_over_is_named_before_images_are_held_out(capsys, other):
    tree(Path("photos"), splits=(("Training", 20), (other, 2)))
    with pytest.warns(UserWarning, match=f"The images in photos/{other} are not read"):
        main(["init", "photos", "--from-scratch"])
    shown = capsys.readouterr().out
    assert "No images for validation or test were found: 4 of the 40 training images are held out" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere does not exist; give a folder of images"),
        (["notes.txt"], "notes.txt is neither a folder nor an .npz"),
        (["empty"], "empty/train is missing. Put the images into empty/train/<class>/"),
        (["photos", "--from-scratch", "--backbone", "resnet50"], "not allowed with argument"),
        (["photos", "--group-file", "owners.csv"], "name its column with the person ids by --person-column"),
        (["one"], "images of one class, dark; a classifier tells at least 2 classes apart"),
        (["photos", "--backbone", "vit_smal"], "timm has no model 'vit_smal'"),
        (["photos", "--from-scratch", "--epsilon", "-1"], "target_epsilon must be a finite number above 0"),
    ],
)
def test_what_cannot_be_is_refused_and_writes_nothing(photos, capsys, arguments, message):
    Path("notes.txt").touch()
    Path("empty").mkdir()
    shutil.copytree(photos / "train" / "dark", "one/train/dark")
    assert message in refused(capsys, *arguments)
    assert not list(Path().glob("*.yaml"))


@pytest.mark.parametrize(("count", "delta"), [(2, 1e-2), (60, 1e-3), (100, 1e-3), (330, 1e-4), (50_000, 1e-6)])
def test_delta_is_the_largest_power_of_ten_up_to_a_tenth_of_one_over_n(count, delta):
    assert delta_for(count) == delta
    assert count * delta <= 0.1 < 10 * count * delta * (1 + 1e-9)


@pytest.mark.parametrize(
    ("count", "batch", "delta", "parameters"),
    [(50_000, 1200, 1e-6, 36_010), (50_000, 1200, 1e-6, 90_000), (128, 32, 1e-4, 36_010), (10**6, 4096, 1e-7, 36_010)],
)
def test_the_learning_rate_on_scattering_coefficients_is_that_of_correlated_noise(count, batch, delta, parameters):
    found = start_of(count, parameters, Model.on_features("scattering"))
    shape = RunShape.of_length(num_train=count, expected_batch_size=batch, delta=delta, max_epochs=16)
    banded = replace(shape, bands=best_bands(shape, 3.0))
    assert found.plan == banded.calibrate(3.0)
    assert (banded.bands > 1) == (count > 128)
    noise = shape.calibrate(3.0).noise_multiplier * error_of_noise(banded, 3.0) / batch
    assert found.noise_norm == pytest.approx(noise * parameters**0.5)
    # Without momentum, all steps of a cosine schedule move a weight by 0.01 if there are 36,010, and others alike.
    assert found.learning_rate == float(f"{1.9 / found.noise_norm / math.sqrt(3 * shape.num_steps / 8):.0e}")


def test_the_learning_rate_on_scattering_coefficients_is_at_most_4():
    assert start_of(10**6, 36_010, Model.on_features("scattering"), epsilon=100.0).learning_rate == 4.0


@pytest.mark.parametrize(("size", "scales", "angles"), [(15, 1, 8), (16, 2, 8), (23, 2, 8), (24, 2, 4), (224, 2, 4)])
def test_maps_with_fewer_places_have_more_angles(size, scales, angles):
    found = Model.on_features("scattering").backbone_kwargs(size)
    assert found == {"scales": scales, "angles": angles, "mirror": False, "shift": True}


@pytest.mark.parametrize(("count", "batch"), [(8, 2), (100, 25), (1_000, 32), (4_000, 100), (1_000_000, 4096)])
def test_a_batch_on_scattering_coefficients_is_a_fortieth_but_not_small(count, batch):
    assert start_of(count, 40_000, Model.on_features("scattering")).plan.expected_batch_size == batch
