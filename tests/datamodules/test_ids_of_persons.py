"""Which images are of one person: folders, a table, an array; the validation split; persons that are evaluated too."""

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import DataLoader

from dp_lightning.datamodules import CachedFeatures, Digits, ImageFolder, NpzImages
from dp_lightning.errors import ConfigurationError, DataError
from dp_lightning.privacy.person_ids import groups_of

#: Images by class and person: p1 has both.
TRAIN = {"benign": {"p1": 3, "p2": 1, "p3": 2}, "malign": {"p1": 1, "p4": 5}}
TEST = {"benign": {"p5": 2}, "malign": {"p6": 1}}


def write_persons(root, **splits):
    for split, classes in (splits or {"train": TRAIN, "test": TEST}).items():
        for name, persons in classes.items():
            for person, count in persons.items():
                folder = root / split / name / person
                folder.mkdir(parents=True)
                for number in range(count):
                    Image.new("RGB", (8, 8), (40 * number, 0, 0)).save(folder / f"{person}_{name}_{number}.png")
    return str(root)


def folder_of_persons(root, **kwargs):
    return ImageFolder(str(root), image_size=8, group_folders=True, augment=False, **kwargs)


def write_npz(root, groups, n=12, **more):
    pixels = np.random.default_rng(0).integers(0, 255, (n, 8, 8), np.uint8)
    arrays = {"train_images": pixels, "train_labels": np.arange(n) % 3, "train_groups": groups, **more}
    np.savez(root / "data.npz", **{name: value for name, value in arrays.items() if value is not None})
    return NpzImages(str(root / "data.npz"))


# Folders


def test_folders_of_one_name_are_one_person_in_every_class(tmp_path):
    data = folder_of_persons(write_persons(tmp_path))
    data.setup()
    dataset = data.train_dataset
    assert (data.num_train, data.num_train_groups, len(dataset)) == (12, 4, 12)
    assert groups_of(dataset) == ["p1"] * 3 + ["p2"] + ["p3"] * 2 + ["p1"] + ["p4"] * 5
    assert dataset.labels.tolist() == [0] * 6 + [1] * 6
    assert all(f"/{group}/" in path for group, path in zip(dataset.groups, map(str, dataset.source.paths), strict=True))
    assert groups_of(data.test_dataset) == ["p5", "p5", "p6"]
    loader = data.train_dataloader()
    assert isinstance(loader, DataLoader)
    assert groups_of(loader.dataset) == dataset.groups


@pytest.mark.parametrize(("group_folders", "named"), [(True, "benign/lone.png"), (False, "benign/p1/p1_benign_0.png")])
def test_an_image_that_is_not_in_the_folder_of_its_person_is_named(tmp_path, group_folders, named):
    write_persons(tmp_path)
    if group_folders:
        Image.new("RGB", (8, 8)).save(tmp_path / "train" / "benign" / "lone.png")
    with pytest.raises(DataError, match=rf"{named} is not .*train/<class>/.*group_folders: true is for class folders"):
        ImageFolder(str(tmp_path), group_folders=group_folders).setup()


def test_data_without_persons_has_none(tmp_path):
    for data in (Digits(), write_npz(tmp_path, None)):
        assert groups_of(data.train_dataset) is None
        with pytest.raises(ConfigurationError, match=r"unit_of_privacy is group, but \w+ does not know which images"):
            data.num_train_groups  # noqa: B018


# A table


def folder_with_table(root, text, encoding="utf-8", **kwargs):
    for name, numbers in (("cat", range(4)), ("dog", range(4, 7))):
        (root / "train" / name).mkdir(parents=True, exist_ok=True)
        for number in numbers:
            Image.new("RGB", (8, 8)).save(root / "train" / name / f"{number}.png")
    (root / "owners.csv").write_text(text, encoding=encoding)
    settings = {"group_file": str(root / "owners.csv"), "group_column": "owner", **kwargs}
    return ImageFolder(str(root), image_size=8, **settings)


PATHS = "owner,file\n" + "".join(f"o{n % 3},train/{'cat' if n < 4 else 'dog'}/{n}.png\n" for n in range(7))
NAMES = "file,age,owner\n" + "".join(f'{n}.png,"4, or 5", o{n % 3} \n' for n in range(9))
STEMS = "id,owner\n" + "".join(f"{n},o{n % 3}\n" for n in range(7))


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (PATHS, {}),
        (NAMES, {"encoding": "utf-8-sig"}),
        (STEMS, {"image_column": "id"}),
        (PATHS.replace(",", ";"), {}),
        (PATHS.replace(",", "\t"), {}),
        (PATHS.replace("train/", ""), {}),
        (PATHS.replace("train/", "./train\\").replace(".png", ""), {}),
        (PATHS + ",,\n\n", {}),
    ],
)
def test_a_table_names_images_by_path_name_or_stem(tmp_path, text, settings):
    data = folder_with_table(tmp_path, text, **settings)
    assert groups_of(data.train_dataset) == [f"o{n % 3}" for n in range(7)]
    assert (data.num_train, data.num_train_groups) == (7, 3)


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (PATHS, {"group_column": "patient"}, r"owners.csv has no column 'patient'; it has owner, file"),
        (PATHS + "o9,train/cat/0.png\n", {}, r"line 9: train/cat/0.png has 'o9' in owner here, but 'o0' before"),
        (PATHS.replace("o2,train/dog/5.png\n", ""), {}, r"does not say which person .*dog/5.png belongs to"),
        (PATHS.replace("o2,train/dog/5", "N/A,train/dog/5"), {}, r"line 7: the id of the person is missing \('N/A'"),
        (PATHS.replace("dog/4.png", "dog/4.png,x"), {}, "csv, line 6: the row has 3 cells, and the header"),
        (PATHS.replace("o1,train/dog/4.png", "o1"), {}, "owners.csv, line 6: the row has 1 cells, and the header has"),
        (PATHS, {"group_file": "/nowhere.csv"}, "nowhere.csv cannot be read as a table"),
    ],
)
def test_a_table_that_leaves_a_person_open_is_refused(tmp_path, text, settings, message):
    data = folder_with_table(tmp_path, text, **settings)
    with pytest.raises(DataError, match=message):
        data.num_train_groups  # noqa: B018


def test_a_name_that_two_images_have_is_refused(tmp_path):
    data = folder_with_table(tmp_path, NAMES)
    Image.new("RGB", (8, 8)).save(tmp_path / "train" / "dog" / "0.png")
    with pytest.raises(DataError, match=r"0\.png.*cat/0\.png.*dog/0\.png"):
        data.num_train_groups  # noqa: B018


def test_test_images_may_be_left_out_of_a_table_all_or_none(tmp_path):
    data = folder_with_table(tmp_path, PATHS)
    folder = tmp_path / "test" / "cat"
    folder.mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "70.png")
    data.setup()
    assert groups_of(data.test_dataset) is None
    data = folder_with_table(tmp_path, PATHS + "o8,70.png\n")
    assert groups_of(data.test_dataset) == ["o8"]
    Image.new("RGB", (8, 8)).save(folder / "71.png")
    with pytest.raises(DataError, match=r"does not say which person .*71.png belongs to"):
        folder_with_table(tmp_path, PATHS + "o8,70.png\n").setup()


@pytest.mark.parametrize("settings", [{"group_file": "a.csv"}, {"group_file": "a.csv", "group_folders": True}])
def test_settings_that_contradict_each_other_are_refused(tmp_path, settings):
    with pytest.raises(ConfigurationError, match="do not say which images belong to the same person"):
        ImageFolder(str(tmp_path), **settings)


# An array

IDS = np.array([5, 5, 5, 8, 8, 9, 5, 3, 3, 3, 3, 7])


@pytest.mark.parametrize("groups", [IDS, IDS.reshape(-1, 1), IDS.astype(str)])
def test_an_array_tells_persons(tmp_path, groups):
    data = write_npz(tmp_path, groups)
    assert (data.num_train, data.num_train_groups) == (12, 5)
    assert groups_of(data.train_dataset) == groups.reshape(-1).tolist()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"groups": IDS[:5]}, r"train_groups int64 \(5,\)"),
        ({"groups": IDS.astype(float)}, "train_groups float64"),
        ({"groups": np.array(["p", ""] * 6)}, r"train_groups, element 1: the id of the person is missing"),
        ({"groups": IDS, "test_groups": IDS}, "needs test_images"),
    ],
)
def test_an_array_that_leaves_a_person_open_is_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        write_npz(tmp_path, **arrays).num_train_groups  # noqa: B018


def test_features_keep_their_persons(tmp_path):
    images = write_npz(tmp_path, IDS, val_images=np.zeros((2, 8, 8), np.uint8), val_labels=np.array([0, 1]))
    data = CachedFeatures(images, "scattering", cache=str(tmp_path / "cache"))
    data.prepare_data()
    data.setup("fit")
    assert (data.num_train, data.num_train_groups) == (12, 5)
    assert groups_of(data.train_dataloader().dataset) == IDS.tolist()
    assert groups_of(data.val_dataloader()["val"].dataset) is None


# The validation split


@pytest.mark.parametrize("seed", range(2))
def test_no_person_is_in_training_and_validation(tmp_path, seed):
    ids = np.random.default_rng(seed).integers(0, 20, 120)
    data = write_npz(tmp_path, ids, n=120)
    data.val_fraction, data.split_seed = 0.3, seed
    train, val = data.train_dataset, data.val_dataset
    assert set(train.groups).isdisjoint(val.groups)
    assert sorted([*train.indices.tolist(), *val.indices.tolist()]) == list(range(120))
    persons = len(np.unique(ids))
    assert data.num_train_groups == len(set(train.groups)) == persons - round(0.3 * persons)
    assert data.num_train == len(train)
    assert groups_of(train) == ids[train.indices].tolist()


def test_a_split_follows_from_the_persons_and_not_from_their_images(tmp_path):
    one = write_npz(tmp_path, np.arange(12))
    one.val_fraction = 0.25
    held_out = set(one.val_dataset.groups)
    many = write_npz(tmp_path, np.concatenate([np.arange(12), [3] * 10, [11] * 7]), n=29)
    many.val_fraction = 0.25
    assert set(many.val_dataset.groups) == held_out
    assert len(held_out) == 3


def test_a_split_without_persons_on_one_side_is_refused(tmp_path):
    data = write_npz(tmp_path, IDS)
    data.val_fraction = 0.05
    with pytest.raises(ConfigurationError, match=r"val_fraction=0.05 of 5 persons leaves an empty part"):
        data.num_train_groups  # noqa: B018
