"""Images in an .npz file: what is read, and the message for each malformed file."""

import numpy as np
import pytest
import torch

from dp_lightning.datamodules import NpzImages
from dp_lightning.errors import ConfigurationError, DataError

RNG = np.random.default_rng(0)


def images(num: int, *shape: int) -> np.ndarray:
    return RNG.integers(0, 255, (num, *(shape or (8, 8))), dtype=np.uint8)


def labels(num: int) -> np.ndarray:
    return (np.arange(num) % 3).reshape(-1, 1)


def write(tmp_path, **arrays) -> str:
    contents = {"train_images": images(9), "train_labels": labels(9)} | arrays
    path = tmp_path / "data.npz"
    np.savez_compressed(path, **{key: value for key, value in contents.items() if value is not None})
    return str(path)


def test_shapes_and_splits_come_from_the_file(tmp_path):
    path = write(
        tmp_path,
        train_images=images(9, 8, 8, 3),
        val_images=images(4, 8, 8, 3),
        val_labels=labels(4),
        test_images=images(5, 8, 8, 3),
        test_labels=labels(5).reshape(-1),
    )
    data = NpzImages(path)
    assert (data.num_train, data.num_classes, data.in_channels, data.image_size) == (9, 3, 3, 8)
    data.setup()
    assert len(data.train_dataset) == 9
    assert {name: len(loader.dataset) for name, loader in data.val_dataloader().items()} == {"val": 4, "test": 5}


def test_only_headers_are_read_before_training(tmp_path, monkeypatch):
    data = NpzImages(write(tmp_path), num_classes=3)
    monkeypatch.setattr(np, "load", lambda *args, **kwargs: pytest.fail("read an array"))
    assert (data.num_train, data.num_classes, data.in_channels, data.image_size) == (9, 3, 1, 8)


def test_without_evaluation_images_there_is_nothing_to_evaluate(tmp_path):
    data = NpzImages(write(tmp_path))
    data.setup("fit")
    assert data.val_dataloader() == []
    with pytest.raises(DataError, match="no test set"):
        data.test_dataloader()


def test_a_second_validation_split_is_refused(tmp_path):
    path = write(tmp_path, val_images=images(4), val_labels=labels(4))
    with pytest.raises(ConfigurationError, match="its own validation set; set val_fraction to 0"):
        NpzImages(path, val_fraction=0.1).num_train  # noqa: B018


@pytest.mark.parametrize(
    ("arrays", "split"),
    [
        ({"train_labels": None}, "train"),
        ({"test_images": images(3)}, "test"),
        ({"train_images": images(9).astype(bool)}, "train"),
        ({"train_images": images(9, 3, 8, 8)}, "train"),
        ({"train_images": images(9, 8, 6)}, "train"),
        ({"train_labels": labels(8)}, "train"),
        ({"test_images": images(3), "test_labels": np.zeros((3, 14), dtype=int)}, "test"),
        ({"train_labels": np.zeros((9, 2, 2), dtype=int)}, "train"),
        ({"train_labels": np.array([{}] * 9, dtype=object)}, "train"),  # would run code
        ({"test_images": images(3, 6, 6), "test_labels": labels(3)}, "test"),
    ],
)
def test_arrays_of_another_layout_are_refused_before_training(tmp_path, arrays, split):
    path = write(tmp_path, **arrays)
    with pytest.raises(DataError, match=rf"{path} needs {split}_images, numbers .*It has .*(train|test|val)_\w+ "):
        NpzImages(path).num_train  # noqa: B018


@pytest.mark.parametrize("several", [2, 3, 14])
def test_columns_of_labels_are_several_labels_of_an_image(tmp_path, several):
    columns = RNG.integers(0, 2, (9, several))
    data = NpzImages(write(tmp_path, train_labels=columns, test_images=images(3), test_labels=columns[:3]))
    assert (data.multi_label, data.num_classes, data.label_names) == (True, several, [str(k) for k in range(several)])
    _, targets = next(iter(data.test_dataloader()))
    assert targets.dtype == torch.float32
    assert torch.equal(targets, torch.from_numpy(columns[:3]).float())
    assert not NpzImages(write(tmp_path)).multi_label


def test_an_empty_training_set_is_said_to_be_empty(tmp_path):
    with pytest.raises(DataError, match=r"The training set is empty: .*npz needs .* train_images uint8 \(0, 8, 8\)"):
        NpzImages(write(tmp_path, train_images=images(0), train_labels=labels(0))).num_train  # noqa: B018


@pytest.mark.parametrize(
    ("arrays", "num_classes", "message"),
    [
        ({"train_labels": labels(9) - 1}, None, "train_labels are -1 to 1, and must be 0 to 1"),
        ({"train_labels": np.full((9, 3), 2)}, None, "are 2 to 2, and must be 0 to 1 with several labels per image"),
        ({}, 2, "train_labels are 0 to 2, and must be 0 to 1 with 2 classes"),
        ({"test_images": images(3), "test_labels": labels(3) + 1}, None, "test_labels are 1 to 3"),
    ],
)
def test_labels_out_of_range_are_named(tmp_path, arrays, num_classes, message):
    path = write(tmp_path, **arrays)
    data = NpzImages(path, num_classes=num_classes)
    with pytest.raises(DataError, match=message) as caught:
        list(data.val_dataloader() if "test_labels" in arrays else data.train_dataloader())
    assert path in str(caught.value)


def test_a_missing_file_says_what_to_set(tmp_path):
    data = NpzImages(str(tmp_path / "nothing.npz"))
    for access in (lambda: data.num_train, lambda: data.num_classes, data.setup):
        with pytest.raises(DataError, match=r"nothing.npz is missing; set data.init_args.path"):
            access()


@pytest.mark.parametrize("kept", [0, 200])
def test_a_truncated_file_is_named(tmp_path, kept):
    path = tmp_path / "data.npz"
    write(tmp_path, train_images=images(40))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(DataError, match=r"data.npz is not a complete .npz file"):
        NpzImages(str(path)).train_dataset  # noqa: B018
