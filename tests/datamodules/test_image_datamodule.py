"""What every image data module shares, shown on Digits and on small arrays."""

import collections

import numpy as np
import pytest
import torch
from plain_run import Plain, trainer
from sklearn.datasets import load_digits

from dp_lightning.datamodules import Digits, NpzImages
from dp_lightning.errors import ConfigurationError


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def images_of(dataset) -> torch.Tensor:
    return torch.stack([image for image, _ in dataset])


def test_digits_are_scikit_learns_images_split_once():
    data = Digits()
    data.setup("fit")
    train, test = data.train_dataset, data.test_dataset
    assert (len(train), len(test)) == (data.num_train, 360) == (1437, 360)
    assert (data.num_classes, data.in_channels, data.image_size) == (10, 1, 8)
    ours = torch.cat([images_of(train), images_of(test)]).flatten(1)
    theirs = (torch.from_numpy(load_digits().data) / 16 * 255).round().to(torch.uint8)
    assert sorted(ours.tolist()) == sorted(theirs.tolist())


def test_validation_split_is_disjoint_complete_and_repeatable():
    data, again = Digits(val_fraction=0.2), Digits(val_fraction=0.2)
    train, val = data.train_dataset.indices, data.val_dataset.indices
    assert set(train.tolist()).isdisjoint(val.tolist())
    assert sorted([*train.tolist(), *val.tolist()]) == list(range(1437))
    assert torch.equal(train, again.train_dataset.indices)
    assert not torch.equal(train, Digits(val_fraction=0.2, split_seed=1).train_dataset.indices)
    assert data.num_train == len(data.train_dataset) == 1437 - 287
    assert len(data.val_dataset) == 287
    assert (list(data.val_dataloader()), list(Digits().val_dataloader())) == (["val", "test"], ["test"])


@pytest.mark.parametrize(("val_fraction", "seen"), [(0.2, 287), (0.0, 360)])
def test_a_module_whose_validation_step_knows_one_loader_gets_one(tmp_path, val_fraction, seen):
    class OneLoader(Plain):
        def validation_step(self, batch, batch_idx):
            seen_of.append(len(batch[1]))

    seen_of: list[int] = []
    run = trainer(tmp_path, num_sanity_val_steps=0)
    run.validate(OneLoader(), datamodule=Digits(val_fraction=val_fraction))
    assert sum(seen_of) == seen


def test_worker_processes_give_the_same_images():
    data = Digits(num_workers=1, eval_batch_size=360)
    ((images, labels),) = data.val_dataloader()["test"]
    assert torch.equal(images, images_of(data.test_dataset))
    assert torch.equal(labels, data.test_dataset.labels)


@pytest.mark.parametrize(("flip", "edges"), [(True, "zeros"), (False, "zeros"), (True, "mirror")])
def test_every_shift_and_mirror_image_is_drawn(tmp_path, flip, edges):
    image = np.arange(1, 8 * 8 * 2 + 1, dtype=np.uint8).reshape(1, 8, 8, 2)
    np.savez(tmp_path / "a.npz", train_images=image, train_labels=np.zeros(1, int))
    data = NpzImages(str(tmp_path / "a.npz"), flip=flip, crop_edges=edges)
    data.crop_padding = 1
    mode = {"zeros": "constant", "mirror": "symmetric"}[edges]
    padded = np.pad(image[0].transpose(2, 0, 1), [(0, 0), (1, 1), (1, 1)], mode=mode)
    wanted = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    wanted += [each[:, :, ::-1] for each in wanted] if flip else []
    dataset = data.train_dataset
    counted = collections.Counter(dataset[0][0].numpy().tobytes() for _ in range(50 * len(wanted)))
    assert set(counted) == {each.tobytes() for each in wanted}
    assert min(counted.values()) > 20  # each about 50 times


def test_validation_images_are_not_augmented(tmp_path):
    images = np.random.default_rng(0).integers(0, 255, (20, 8, 8, 3), dtype=np.uint8)
    labels = np.arange(20) % 2
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=labels)
    data = NpzImages(str(tmp_path / "a.npz"), val_fraction=0.5)
    assert torch.equal(
        images_of(data.val_dataset), torch.from_numpy(images).permute(0, 3, 1, 2)[data.val_dataset.indices]
    )


def test_mean_and_std_normalise_each_channel(tmp_path):
    images = np.full((4, 8, 8, 3), 51, dtype=np.uint8)
    np.savez(tmp_path / "a.npz", train_images=images, train_labels=np.array([0, 1, 0, 1]))
    mean, std = (0.1, 0.2, 0.3), (0.5, 1.0, 0.1)
    data = NpzImages(str(tmp_path / "a.npz"), mean=mean, std=std, augment=False)
    batch = next(iter(data.train_dataloader()))
    found, labels = data.on_after_batch_transfer(batch, 0)
    torch.testing.assert_close(found[0, :, 0, 0], (0.2 - torch.tensor(mean)) / torch.tensor(std))
    # What is normalised already stays as it is.
    assert data.on_after_batch_transfer([found, labels], 0)[0] is found
    with pytest.raises(ConfigurationError, match="mean has 2 numbers for 3 channels"):
        NpzImages(str(tmp_path / "a.npz"), mean=(0.1, 0.2)).train_dataset  # noqa: B018


@pytest.mark.parametrize("fraction", [1.0, -0.1, 1e-4])
def test_a_split_with_an_empty_part_is_refused(fraction):
    with pytest.raises(ConfigurationError, match=r"val_fraction=.* of 1437 images leaves an empty part"):
        Digits(val_fraction=fraction).num_train  # noqa: B018
