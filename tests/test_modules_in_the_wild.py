"""Modules that know nothing of privacy train as they are, or are refused in one line that says what to change."""

import logging

import pytest
import torch
from modules_in_the_wild import REFUSED, TRAIN
from pages import read, tables
from plain_run import privacy, trainer

from dp_lightning.errors import ConfigurationError, ModelError

STEPS = 4


def fit(module, tmp_path, **settings):
    """Two epochs of two logical steps, of about two physical batches each."""
    callback = privacy(**{"expected_batch_size": 12, "max_physical_batch_size": 8, "delta": 1e-2, **settings})
    run = trainer(tmp_path, callback, max_epochs=2)
    run.fit(module)
    return run, callback


@pytest.fixture(autouse=True)
def secret_start():
    torch.manual_seed(0)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    logging.getLogger("lightning.pytorch").setLevel(logging.INFO)


@pytest.mark.parametrize("kind", TRAIN, ids=lambda kind: kind.__name__)
def test_a_module_trains_as_it_is(kind, tmp_path):
    module = kind()
    before = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
    run, callback = fit(module, tmp_path)
    assert run.global_step == callback.ledger.num_steps == STEPS
    moved = [name for name, p in module.named_parameters() if name in before and not torch.equal(p, before[name])]
    assert moved == list(before)
    assert callback.statement().release == "ok"


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_a_module_is_refused_in_one_line_with_what_to_change(kind, tmp_path):
    with pytest.raises((ModelError, ConfigurationError)) as refused:
        fit(kind(), tmp_path)
    message = str(refused.value)
    assert "\n" not in message
    for part in REFUSED[kind]:
        assert part in message


def test_what_was_refused_for_its_code_trains_one_by_one(tmp_path):
    flips = next(kind for kind in REFUSED if kind.__name__ == "Flips")
    run, callback = fit(flips(), tmp_path, examples="one_by_one")
    assert run.global_step == STEPS
    assert callback.statement().release == "ok"


@pytest.mark.docs
def test_the_page_lists_the_modules_that_train_and_those_that_are_refused():
    page = read("docs/own_module.md")
    (train, refused) = (each for each in tables(page) if each.head[0] == "module")
    assert [row[0].text for row in train.rows] == [kind.__name__ for kind in TRAIN]
    assert [row[0].text for row in refused.rows] == [kind.__name__ for kind in REFUSED]
    assert all(cell.text for row in (*train.rows, *refused.rows) for cell in row)
