"""A module reads its trainer's public properties before and during a private fit as in an ordinary one."""

import lightning.pytorch as pl
import pytest
from plain_run import Plain, loader, privacy, trainer

from dp_lightning.errors import ModelError
from dp_lightning.private_run.public_trainer import PUBLIC, PublicTrainer

PROPERTIES = sorted(
    name
    for kind in pl.Trainer.__mro__
    for name, value in vars(kind).items()
    if isinstance(value, property) and not name.startswith("_")
)
B, EPOCHS = 25, 3
# Logical steps: floor(3 * 60 / 25) in all, and ceil(60 / 25) that begin in an epoch.
STEPS, STEPS_OF_AN_EPOCH = 7, 3


class Failure(str):
    """What reading a property raised."""


def read(run):
    """Each property's number or text, the type of another value, or the message of the error that reading it raises.

    The module may not keep more of its trainer.
    """
    found = {}
    for name in PROPERTIES:
        try:
            value = getattr(run, name)
            found[name] = value if isinstance(value, int | float | str) else type(value)
        except Exception as error:
            found[name] = Failure(f"{type(error).__name__}: {error}")
    return found


class Reads(Plain):
    """Reads every property in the hooks where modules do."""

    def __init__(self, found):
        super().__init__()
        self.note = lambda hook: hook in found or found.update({hook: read(self.trainer)})

    def setup(self, stage):
        self.note("setup")

    def configure_optimizers(self):
        self.note("configure_optimizers")
        return super().configure_optimizers()

    def on_fit_start(self):
        self.note("on_fit_start")

    def on_train_start(self):
        self.note("on_train_start")

    def on_train_epoch_start(self):
        self.note("on_train_epoch_start")

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.note("on_train_batch_end")

    def on_train_epoch_end(self):
        self.note("on_train_epoch_end")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a private and an ordinary fit of the same module answer, hook by hook."""
    private, ordinary = {}, {}
    settings = {"max_epochs": EPOCHS, "num_sanity_val_steps": 0}
    trainer(tmp_path_factory.mktemp("private"), privacy(expected_batch_size=B), **settings).fit(
        Reads(private), loader()
    )
    trainer(tmp_path_factory.mktemp("ordinary"), **settings).fit(Reads(ordinary), loader())
    return private, ordinary


def test_the_trainer_has_as_many_properties_as_were_looked_at():
    assert len(PROPERTIES) > 50


def test_every_property_that_an_ordinary_fit_answers_is_answered(found):
    private, ordinary = found
    assert private.keys() == ordinary.keys()
    unanswered = [
        (hook, name, answers[name])
        for hook, answers in private.items()
        for name in PROPERTIES
        if isinstance(answers[name], Failure) and not isinstance(ordinary[hook][name], Failure)
    ]
    assert unanswered == []


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "on_fit_start", "on_train_start"])
def test_counts_are_those_of_the_plan_from_the_first_hook_on(found, hook):
    answers = found[0][hook]
    assert answers["estimated_stepping_batches"] == STEPS
    assert answers["num_training_batches"] == STEPS_OF_AN_EPOCH
    assert isinstance(answers["num_training_batches"], int)
    assert answers["max_epochs"] == EPOCHS
    assert answers["max_steps"] == -1


def test_counts_are_the_same_in_every_later_hook(found):
    for answers in found[0].values():
        assert answers["estimated_stepping_batches"] == STEPS
        assert answers["num_training_batches"] == STEPS_OF_AN_EPOCH


def test_a_training_step_reads_the_public_ones(tmp_path):
    class Asks(Plain):
        def training_step(self, batch, batch_idx):
            for name in PUBLIC:
                getattr(self.trainer, name)
            return super().training_step(batch, batch_idx)

    run = trainer(tmp_path, privacy(), max_steps=1)
    run.fit(Asks(), loader())
    assert run.global_step == 1


@pytest.mark.parametrize("name", sorted({*PROPERTIES} - PUBLIC - {"progress_bar_callback"}))
def test_a_training_step_is_refused_the_others(tmp_path, name):
    with pytest.raises(ModelError, match=f"trainer.{name}"):
        getattr(PublicTrainer(trainer(tmp_path)), name)
