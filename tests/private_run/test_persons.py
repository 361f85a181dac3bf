"""Runs of a plain Trainer whose unit of privacy is a person."""

import warnings

import pytest
from plain_run import N, PhysicalBatches, Plain, examples, loader, privacy, trainer, written
from torch.utils.data import DataLoader, Subset, TensorDataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.private_run.data_checks import SHARED_PERSONS

PERSONS = 12


def of_persons(n=N, seed=0, name="p"):
    """The first person has half of the images, the others share the rest."""
    dataset = examples(n, seed)
    dataset.groups = [f"{name}{max(0, place - n // 2) % PERSONS:02d}" for place in range(n)]
    return dataset


def for_persons(**kwargs):
    return privacy(**{"unit_of_privacy": "group", "images_per_group": 3, "expected_batch_size": 4, **kwargs})


class Counted(Plain):
    def configure_optimizers(self):
        self.steps = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Validated(Plain):
    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.training_step(batch, batch_idx))


@pytest.mark.parametrize("images_per_group", [3, None])
def test_a_run_counts_persons_and_its_statement_says_so(tmp_path, images_per_group):
    callback, seen, module = for_persons(images_per_group=images_per_group), PhysicalBatches(), Counted()
    run = trainer(tmp_path, callback, seen, max_epochs=4)
    run.fit(module, loader(of_persons()))
    assert callback.plan.num_train == PERSONS
    assert module.steps == run.global_step == 4 * PERSONS // 4
    assert {tuple(batch.leaves[0].shape[1:]) for batch in seen.batches} == {(images_per_group or 1, 5)}
    facts = written(callback)
    assert facts["release"] == "ok"
    assert (facts["num_train"], facts["sample_rate"]) == (PERSONS, pytest.approx(4 / PERSONS))
    assert facts["unit_of_privacy"] == "one person (all images with the same group)"


def test_all_images_of_a_person_are_in_one_group_of_correlated_noise_and_a_resumed_run_draws_groups_anew(tmp_path):
    dataset, bands = of_persons(), 3
    person_of = dict(zip(map(tuple, dataset.tensors[0].tolist()), dataset.groups, strict=True))
    found = []
    for steps in (9, 18):
        callback, seen = for_persons(bands=bands), PhysicalBatches()  # with q = 1, each person of a step's group
        run = trainer(tmp_path, callback, seen, max_steps=steps, max_epochs=-1)
        run.fit(Plain(), loader(dataset), ckpt_path=tmp_path / "run.ckpt" if found else None)
        run.save_checkpoint(tmp_path / "run.ckpt")
        groups, images = {}, {}
        for batch, (x, _) in zip(seen.batches, seen.rows, strict=True):
            for image in map(tuple, x.tolist()):
                groups.setdefault(person_of[image], []).append(batch.place.step)
                images.setdefault(person_of[image], set()).add(image)
        for drawn in groups.values():
            first = min(drawn)
            assert sorted(drawn) == [step for step in range(first, steps, bands) for _ in range(3)]
        assert set(groups) == set(dataset.groups)
        assert len(images["p00"]) > 3
        found.append({person: min(drawn) % bands for person, drawn in groups.items()})
    assert found[0] != found[1]


def test_a_resumed_run_keeps_its_persons(tmp_path):
    run = trainer(tmp_path, for_persons(), max_steps=3)
    run.fit(Plain(), loader(of_persons()))
    run.save_checkpoint(tmp_path / "run.ckpt")

    def resume(dataset, **kwargs):
        again = trainer(tmp_path, callback := for_persons(**kwargs), max_steps=5)
        again.fit(Plain(), loader(dataset), ckpt_path=tmp_path / "run.ckpt")
        return callback.statement()

    with pytest.raises(ConfigurationError, match=r"privacy\.images_per_group 3, and it is 2 now"):
        resume(of_persons(), images_per_group=2)
    with pytest.raises(ConfigurationError, match=r"num_train 12, and it is 10 now"):
        resume(Subset(of_persons(), range(40)))
    assert resume(of_persons()).ledger.num_steps == 5


@pytest.mark.parametrize("unit", [for_persons, privacy])
@pytest.mark.parametrize(("name", "warns"), [("p", True), ("q", False), (None, False)])
def test_persons_of_the_training_set_in_the_validation_are_named(tmp_path, name, warns, unit):
    others = examples(12, seed=3) if name is None else of_persons(12, seed=3, name=name)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        trainer(tmp_path, callback := unit(), max_steps=1).fit(Validated(), loader(of_persons()), DataLoader(others))
    assert any("persons of the training set are also in the validation" in str(each.message) for each in found) == warns
    assert (SHARED_PERSONS in written(callback)["unprotected"]) == warns


def with_groups(groups):
    dataset = TensorDataset(*examples().tensors)
    dataset.groups = groups
    return dataset


@pytest.mark.parametrize(
    ("callback", "dataset", "warns"),
    [
        (privacy, of_persons(), True),
        (for_persons, of_persons(), False),
        (privacy, with_groups(list(range(N))), False),
        (privacy, with_groups(lambda: None), False),
    ],
    ids=["persons", "protected", "an image each", "no ids"],
)
def test_several_images_of_a_person_give_a_warning_where_an_image_is_protected(
    tmp_path, recwarn, callback, dataset, warns
):
    trainer(tmp_path, callback(), max_steps=1).fit(Plain(), loader(dataset))
    said = [str(warning.message) for warning in recwarn]
    assert any("unit_of_privacy is example: the guarantee is about one image" in text for text in said) == warns
