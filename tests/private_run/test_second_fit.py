"""A second fit of one callback continues its run: what counts, what is planned, and what keeps it from release."""

import pytest
from plain_run import Plain, Stop, examples, loader, privacy, trainer

from dp_lightning.errors import BudgetError, ConfigurationError

TARGET = {"noise_multiplier": None, "target_epsilon": 5.0, "accountant": "rdp"}


def stopped(tmp_path, callback, **kwargs):
    """The module after two steps of a fit that an error has ended."""
    module = Plain()
    with pytest.raises(RuntimeError, match="stopped"):
        trainer(tmp_path, callback, Stop(2), **kwargs).fit(module, loader())
    return module


def test_a_longer_second_fit_is_planned_for_the_same_target(tmp_path):
    callback = privacy(**TARGET)
    module = stopped(tmp_path, callback, max_epochs=1)
    first = callback.plan
    trainer(tmp_path, callback, max_epochs=3).fit(module, loader())
    assert callback.ledger.num_steps == 3 * first.num_steps
    assert callback.plan.noise_multiplier > first.noise_multiplier
    assert 4.9 < callback.private_run.budget.spent() <= 5.0
    assert callback.ledger.totals == {
        (first.noise_multiplier, first.sample_rate): 2,
        (callback.plan.noise_multiplier, first.sample_rate): 3 * first.num_steps - 2,
    }


def test_steps_of_an_earlier_fit_are_not_lost_and_neither_is_its_fault(tmp_path):
    """Lightning counts anew in each Trainer."""
    callback = privacy()
    trainer(tmp_path, callback).fit(stopped(tmp_path, callback), loader())
    said = callback.statement()
    assert (said.ledger.num_steps, said.lost_steps) == (9, 0)
    assert "the run ended by an error (RuntimeError)" in said.release


def test_a_fit_that_was_refused_binds_no_later_one(tmp_path):
    callback, module = privacy(**TARGET), Plain()
    module.configure_optimizers = lambda: []
    with pytest.raises(ConfigurationError, match="optimizers"):
        trainer(tmp_path, callback).fit(module, loader())
    assert callback.ledger.num_steps == 0
    trainer(tmp_path, callback).fit(Plain(), loader(examples(40)))
    assert (callback.plan.num_train, callback.ledger.num_steps) == (40, callback.plan.num_steps)
    assert callback.statement().release == "ok"


def test_another_data_set_and_a_refused_setting_leave_a_run_as_it_is(tmp_path):
    callback, module = privacy(), Plain()
    trainer(tmp_path, callback, max_epochs=1).fit(module, loader())
    with pytest.raises(ConfigurationError, match="num_train 60, and it is 61 now"):
        trainer(tmp_path, callback).fit(module, loader(examples(61)))
    with pytest.raises(ConfigurationError, match="gradient_clip_val"):
        trainer(tmp_path, callback, gradient_clip_val=1.0).fit(module, loader())
    assert callback.statement().release == "ok"


def test_a_run_does_not_go_on_beyond_its_target_after_steps_of_another(tmp_path):
    callback = privacy(**TARGET)
    module = stopped(tmp_path, callback)
    trainer(tmp_path, privacy(**{**TARGET, "target_epsilon": 8.0}), max_epochs=2).fit(module, loader())
    with pytest.raises(BudgetError, match=r"above privacy\.target_epsilon 5"):
        trainer(tmp_path, callback).fit(module, loader())
    assert callback.ledger.num_steps == 2
