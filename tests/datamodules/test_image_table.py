"""Images whose labels are in a table: which image has which label and split, several labels, and what is wrong."""

import numpy as np
import pytest
import torch
from PIL import Image

from dp_lightning.datamodules import CachedFeatures, ImageTable
from dp_lightning.errors import DataError

LABELS = ["cat", "dog", "cat", "newt", "dog", "cat"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def write(root, *files, **tables):
    """Write images, each of its own grey, and tables."""
    for number, file in enumerate(files or [f"images/{k}.png" for k in range(6)]):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 20 * number, dtype=np.uint8)).save(root / file)
    for name, text in tables.items():
        path = root / f"{name.replace('__', '/')}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def rows(*given, header="file,label"):
    return "\n".join([header, *given]) + "\n"


def table(root, name="train.csv", label_column="label", **settings):
    return ImageTable(str(root), str(root / name), label_column, image_size=8, augment=False, **settings)


ALL = [f"{k}.png,{label}" for k, label in enumerate(LABELS)]


@pytest.mark.parametrize(
    "lines",
    [
        ALL,
        [line.replace(".png", "") for line in ALL],
        [f"images/{line}" for line in ALL],
        [f"./images\\{line}" for line in reversed(ALL)],
        [*ALL, "99.png,lynx"],
    ],
)
def test_a_table_says_what_each_image_shows(tmp_path, lines):
    write(tmp_path, train=rows(*lines))
    data = table(tmp_path)
    assert (data.num_train, data.num_classes, data.class_names) == (6, 3, ["cat", "dog", "newt"])
    assert not data.multi_label
    shown = {int(image[0, 0, 0]) // 20: data.class_names[label] for image, label in data.train_dataset}
    assert shown == dict(enumerate(LABELS))


def test_numbers_are_classes_in_their_order(tmp_path):
    write(tmp_path, train=rows(*(f"{k},{grade}" for k, grade in enumerate([10, 2, 9, 10, 2, 9]))))
    assert table(tmp_path).class_names == ["2", "9", "10"]


AB = ["a,x", "b,y"]
IN_SPLITS = ["train/a.png", "train/b.png", "valid/c.png", "test/d.png"]


@pytest.mark.parametrize(
    ("files", "name", "tables"),
    [
        # A table for each split beside the images, in the folder of the split, or with the images of each split.
        ("a b c d", "train.csv", {"train": AB, "valid": ["c,x"], "test": ["d,y"]}),
        (
            IN_SPLITS,
            "train/labels.csv",
            {"train__labels": AB, "valid__labels": ["c,x"], "test__labels": ["d,y"]},
        ),
        (IN_SPLITS, "train_set.csv", {"train_set": AB, "Validation_set": ["c,x"], "TEST_set": ["d,y"]}),
        # One table, with the splits in folders.
        (IN_SPLITS, "labels.csv", {"labels": ["a,x", "b,y", "c,x", "d,y"]}),
    ],
)
def test_the_split_of_an_image_is_that_of_its_table_or_folder(tmp_path, files, name, tables):
    files = [f"images/{one}.png" for one in files.split()] if isinstance(files, str) else files
    write(tmp_path, *files, **{key: rows(*lines) for key, lines in tables.items()})
    data = table(tmp_path, name)
    assert {split: data.source(split).labels.tolist() for split in data.own_splits} == {
        "train": [0, 1],
        "val": [0],
        "test": [1],
    }


def test_a_column_says_the_split(tmp_path):
    lines = [f"{line},{split}" for line, split in zip(ALL, ["train"] * 4 + ["Valid", "testing"], strict=True)]
    write(tmp_path, labels=rows(*lines, header="file,label,Split"))
    data = table(tmp_path, "labels.csv")
    assert [len(data.source(split).paths) for split in ("train", "val", "test")] == [4, 1, 1]
    assert table(tmp_path, "labels.csv").own_splits == ("train", "val", "test")


def test_images_of_equal_names_are_those_of_the_tables_split(tmp_path):
    write(tmp_path, "train/0.png", "train/1.png", "test/0.png", train=rows("0,a", "1,b"), test="file\n0\n")
    data = table(tmp_path)
    with pytest.warns(UserWarning, match=r"1 of 3 images are not read, .* no row .*: .*test/0.png") as warned:
        assert data.num_train == 2
    assert data.own_splits == ("train",)
    assert "test.csv is not read: it has no labels" in str(warned[0].message)


COLUMNS = rows("0,1,0,0", "1,1,1.0,0", "2,0,0,0", "3,0,0,True", header="file,a,b,c")
LIST = "a", "a|b", "", "c"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (COLUMNS, {"label_column": ["a", "b", "c"]}),
        (rows(*(f"{k},{cell}" for k, cell in enumerate(LIST))), {"label_separator": "|"}),
        (rows(*(f'{k},"{cell}"' for k, cell in enumerate(("a ", "a; b", "", "c")))), {"label_separator": ";"}),
        (rows("0,\"['a']\"", "1,\"['a', 'b']\"", "2,[]", "3,['c']"), {"label_separator": ","}),
    ],
)
def test_an_image_may_have_several_labels(tmp_path, text, settings):
    write(tmp_path, *(f"{k}.png" for k in range(4)), train=text)
    data = table(tmp_path, **settings)
    assert (data.multi_label, data.num_classes, data.label_names) == (True, 3, ["a", "b", "c"])
    _, targets = next(iter(data._loader(data.train_dataset)))
    assert targets.dtype == torch.float32
    assert targets.tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1]]
    features = CachedFeatures(data, "scattering", cache=str(tmp_path / "cache"))
    assert (features.multi_label, features.label_names) == (True, ["a", "b", "c"])
    features.prepare_data()
    features.setup()
    assert torch.equal(next(iter(features._loader("train")))[1], targets)


def test_a_column_of_the_table_names_the_persons(tmp_path):
    lines = [f"{line},p{k // 2}" for k, line in enumerate(ALL[:4])]
    header = "file,label,patient"
    write(tmp_path, train=rows(*lines, header=header), test=rows("4,cat,p8", "5,dog,p9", header=header))
    data = table(tmp_path, group_column="patient")
    assert (data.num_train_groups, data.groups("test")) == (2, ["p8", "p9"])
    with pytest.raises(DataError, match=r"has no column 'person'; it has file, label, patient."):
        table(tmp_path, group_column="person").num_train_groups  # noqa: B018


SPLIT = rows("0,a,train", "1,b,fold1", header="file,label,split")


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (rows(*ALL), {"label_column": "class"}, r"csv has no column 'class'; it has file, label\. Set image_column,"),
        (rows(*ALL), {"image_column": "id"}, r"train.csv has no column 'id'; it has file, label\. Set image_column"),
        (rows(*ALL), {"label_column": ["label", "b"]}, "has no column 'b'"),
        (rows(*ALL, "7,a,b"), {}, "train.csv, line 8: the row has 3 cells, and the header has 2"),
        (rows(*ALL, "0.png,lynx"), {}, "line 8: 0.png has 'lynx' in label here, but 'cat' before"),
        (rows(*ALL[:5], "5.png,"), {}, "line 7: label is empty. Give the image a label, or remove the row"),
        (COLUMNS.replace("1.0", "-1"), {"label_column": ["a", "b", "c"]}, "line 3: b is '-1', and must be 0 or 1"),
        (rows("x.png,cat"), {}, r"set is empty: .*train.csv names none .* column file\. The first image is .*0\.png"),
        (SPLIT, {"name": "labels"}, "labels.csv, line 3: split is 'fold1', not train, val or test"),
        (rows("0,a", "1,b"), {"test": rows("2,c")}, "test images in .* have classes that no training image has: c"),
        (rows("9,b"), {"name": "labels"}, r"labels.csv: 9 could be .*9.png or .*9.png\. In the table, name images"),
    ],
)
def test_a_table_with_a_fault_is_named_with_the_line(tmp_path, text, settings, message):
    settings = {"name": "train", "test": "file\n", **settings}
    tables = {settings["name"]: text, "test": settings.pop("test")}
    write(tmp_path, *(f"images/{k}.png" for k in range(6)), "images/9.png", "more/9.png", **tables)
    with pytest.raises(DataError, match=message):
        table(tmp_path, f"{settings.pop('name')}.csv", **settings).setup()


def test_images_without_a_row_rows_without_an_image_and_files_that_are_no_images_are_named(tmp_path):
    write(tmp_path, train=rows(*ALL[:5], "98.png,cat", "99.png,lynx"))
    (tmp_path / "images" / "IM0001").write_bytes(b"")
    with pytest.warns(UserWarning, match="are not there") as found:
        assert table(tmp_path).num_train == 5
    text = " ".join(str(each.message) for each in found)
    assert f"2 of 7 images that {tmp_path / 'train.csv'} names are not there: 98.png" in text
    assert "1 of 6 images are not read, since they have no row in the table" in text
    assert "not read as images: 1 x no extension" in text


def test_an_image_in_two_splits_is_refused(tmp_path):
    write(tmp_path, train=rows(*ALL), test=rows("0.png,cat"))
    with pytest.raises(DataError, match=r"0\.png is among the train and the test images"):
        table(tmp_path).setup("fit")
