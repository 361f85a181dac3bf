"""Runs of a plain Trainer whose unit of privacy is a person."""

import json

import pytest
import torch
from plain_run import N, PhysicalBatches, Plain, examples, loader, privacy, trainer, without_noise
from torch.nn import functional as F
from torch.utils.data import Subset, TensorDataset

from dp_lightning.callbacks import PrivacyCallback
from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules.schedules import WarmupCosine

PERSONS = 12


def of_persons(n=N, seed=0, name="p"):
    """The first person has half of the images, the others share the rest."""
    dataset = examples(n, seed)
    dataset.groups = [f"{name}{max(0, place - n // 2) % PERSONS:02d}" for place in range(n)]
    return dataset


def for_persons(**kwargs):
    return privacy(**{"unit_of_privacy": "group", "images_per_group": 3, "expected_batch_size": 4, **kwargs})


class Rows(PhysicalBatches):
    """The rows of each example that are trained on."""

    @property
    def shapes(self):
        return {tuple(batch.leaves[0].shape[1:]) for batch in self.batches}


class Counted(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        self.steps = self.trainer.estimated_stepping_batches
        return [optimizer], [{"scheduler": WarmupCosine(optimizer, num_steps=self.steps), "interval": "step"}]


def test_a_run_counts_persons_and_its_statement_says_so(tmp_path):
    callback, rows, module = for_persons(), Rows(), Counted()
    run = trainer(tmp_path, callback, rows, max_epochs=4)
    run.fit(module, loader(of_persons()))
    assert callback.plan.num_train == PERSONS
    assert module.steps == run.global_step == 4 * PERSONS // 4
    assert rows.shapes == {(3, 5)}
    (path,) = tmp_path.rglob("privacy_statement.json")
    facts = json.loads(path.read_text())
    assert facts["release"] == "ok"
    assert (facts["num_train"], facts["sample_rate"]) == (PERSONS, pytest.approx(4 / PERSONS))
    assert facts["unit_of_privacy"] == "one person (all images with the same group)"
    assert "| num train | 12 |" in path.with_suffix(".md").read_text()


@pytest.mark.parametrize("mode", ["together", "one_by_one"])
def test_a_reproducible_run_draws_the_same_images_whoever_reads_them(tmp_path, mode):
    seen = []
    for workers in (0, 2, 2):
        torch.manual_seed(0)
        rows, module = Rows(), Plain()
        callback = for_persons(reproducible=True, examples=mode, max_physical_batch_size=9)
        trainer(tmp_path, callback, rows, max_epochs=2).fit(module, loader(of_persons(), num_workers=workers))
        parameters = torch.cat([p.detach().flatten() for p in module.parameters()])
        seen.append((torch.cat([x for x, *_ in rows.rows]), parameters))
    assert all(torch.equal(a, b) for other in seen[1:] for a, b in zip(seen[0], other, strict=True))


def test_images_per_group_is_one_where_it_is_left_out(tmp_path):
    rows = Rows()
    trainer(tmp_path, for_persons(images_per_group=None), rows, max_steps=2, max_epochs=-1).fit(
        Plain(), loader(of_persons())
    )
    assert rows.shapes == {(1, 5)}


def test_a_resumed_run_keeps_its_persons(tmp_path):
    run = trainer(tmp_path, for_persons(), max_steps=3, max_epochs=-1)
    run.fit(Plain(), loader(of_persons()))
    run.save_checkpoint(tmp_path / "run.ckpt")

    def resume(dataset=None, **kwargs):
        callback = for_persons(**kwargs)
        again = trainer(tmp_path, callback, max_steps=5, max_epochs=-1)
        again.fit(Plain(), loader(dataset or of_persons()), ckpt_path=tmp_path / "run.ckpt")
        return callback.statement()

    for changed, message in (
        ({"images_per_group": 2}, r"privacy\.images_per_group 3, and it is 2 now"),
        (
            {"unit_of_privacy": "example", "images_per_group": None},
            r"privacy\.unit_of_privacy group, and it is example now",
        ),
        ({"dataset": Subset(of_persons(), range(40))}, r"num_train 12, and it is 10 now"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            resume(**changed)
    statement = resume()
    assert statement.unit_of_privacy == "one person (all images with the same group)"
    assert statement.ledger.num_steps == 5


def test_a_run_of_examples_does_not_go_on_with_persons(tmp_path):
    run = trainer(tmp_path, privacy(), max_steps=2, max_epochs=-1)
    run.fit(Plain(), loader())
    run.save_checkpoint(tmp_path / "run.ckpt")
    with pytest.raises(ConfigurationError, match=r"privacy\.unit_of_privacy example, and it is group now"):
        trainer(tmp_path, for_persons()).fit(Plain(), loader(of_persons()), ckpt_path=tmp_path / "run.ckpt")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"unit_of_privacy": "person"}, "unit_of_privacy is 'person'; choose 'example' or 'group'"),
        ({"images_per_group": 2}, r"images_per_group is 2, but each image is an example.*unit_of_privacy: group"),
        ({"unit_of_privacy": "group", "images_per_group": 0}, "images_per_group is 0; it must be at least 1"),
        (
            {"unit_of_privacy": "group", "images_per_group": 8, "max_physical_batch_size": 7},
            "max_physical_batch_size is 7; it must be at least 8, privacy.images_per_group",
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        PrivacyCallback(expected_batch_size=4, noise_multiplier=1.0, **settings)


@pytest.mark.parametrize(
    ("dataset", "settings", "message"),
    [
        (examples(), {}, "unit_of_privacy is group, but the training set tells no groups"),
        (of_persons(), {"num_train": N}, f"has 12 persons, but the plan was made for num_train {N}"),
        (of_persons(), {"num_train": 11}, "has 12 persons, but the plan was made for num_train 11"),
    ],
)
def test_data_that_does_not_fit_is_refused(tmp_path, dataset, settings, message):
    with pytest.raises(ConfigurationError, match=message):
        trainer(tmp_path, for_persons(**settings)).fit(Plain(), loader(dataset))


def test_several_images_of_a_person_give_a_warning_where_an_image_is_protected(tmp_path, recwarn):
    for callback, warns in ((privacy(), True), (for_persons(), False)):
        recwarn.clear()
        trainer(tmp_path, callback, max_steps=1, max_epochs=-1).fit(Plain(), loader(of_persons()))
        said = [str(warning.message) for warning in recwarn]
        assert any("unit_of_privacy is example: the guarantee is about one image" in text for text in said) == warns


@pytest.mark.parametrize("groups", [None, list(range(N)), "no ids", lambda: None])
def test_data_without_several_images_of_a_person_gives_none(tmp_path, recwarn, groups):
    dataset = TensorDataset(*examples().tensors)
    if groups is not None:
        dataset.groups = groups
    trainer(tmp_path, privacy(), max_steps=1, max_epochs=-1).fit(Plain(), loader(dataset))
    assert not any("unit_of_privacy" in str(warning.message) for warning in recwarn)


def test_the_loss_of_a_batch_is_compared_by_persons(tmp_path, recwarn):
    """A loss that takes negatives from the rest of its batch has another meaning; a mean has not."""

    class Contrasted(Plain):
        def training_step(self, batch, batch_idx):
            h = F.normalize(self.net(batch[0]), dim=1)
            return F.cross_entropy(h @ h.T, torch.arange(len(h)))

    for module, expected in ((Plain(), False), (Contrasted(), True)):
        recwarn.clear()
        callback = without_noise(unit_of_privacy="group", images_per_group=3, expected_batch_size=4)
        trainer(tmp_path, callback, max_steps=1, max_epochs=-1).fit(module, loader(of_persons()))
        assert any("The loss of 8 examples together" in str(w.message) for w in recwarn) == expected
