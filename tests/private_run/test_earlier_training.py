"""The ledger belongs to the weights, whichever callback or Trainer goes on with them."""

import gc
import json
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, examples, loader, privacy, trainer, written
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.commands.verify import verify
from dp_lightning.errors import BudgetError, ConfigurationError, DataError
from dp_lightning.privacy import PrivacyPlan, PrivateStep, record
from dp_lightning.privacy.accounting import compose
from dp_lightning.privacy.statement import STATEMENT
from dp_lightning.privacy.weights import digest_of


def fit(folder, module, callback=None, **kwargs):
    callback = callback or privacy()
    trainer(folder, callback, **kwargs).fit(module, loader())
    return callback, callback.statement()


def ordinarily(folder, module):
    trainer(folder, max_epochs=1).fit(module, loader())
    return module


def export(path, claims, weight=1.0):
    """A module that starts from a file of weights, whose statement is about weights of one."""
    of_claims, tensors = {"w": torch.ones(3)}, {"w": torch.full((3,), weight)}
    if not isinstance(claims, str | None):
        claims = json.dumps(replace(claims, weights=digest_of(of_claims)).saved())
    save_file(tensors, str(path), metadata=None if claims is None else {STATEMENT: claims})
    module = Plain()
    module.weights_file = str(path)
    return module


SAME = {
    "the same module": lambda module: module,
    "its network in another module": lambda module: Plain(module.net),
    "a part of it": lambda module: Plain(torch.nn.Sequential(module.net[0], torch.nn.Linear(8, 3))),
}


@pytest.mark.parametrize("way", SAME)
def test_a_second_private_fit_counts_the_steps_of_the_first(tmp_path, way):
    module = Plain()
    _, first = fit(tmp_path, module, max_epochs=2)
    again, second = fit(tmp_path, SAME[way](module), privacy(noise_multiplier=2.0), max_epochs=1)
    together = compose([(1.0, 1 / 3, 6), (2.0, 1 / 3, 3)], delta=1e-3, accountant="rdp")
    assert second.epsilon["rdp"] == again.private_run.budget.spent() == pytest.approx(together)
    assert again.ledger.num_steps == 3
    assert second.release == "ok"
    assert second.ledger.earlier == {first.run: first.ledger.runs}
    assert first.run in second.to_markdown()
    assert fit(tmp_path, Plain(), max_epochs=1)[1].ledger.earlier == {}


def test_a_target_that_is_spent_but_for_rounding_is_refused(tmp_path):
    """The noise of a run meets its target from below: by a ten-thousandth of it, which is nothing to train with."""
    module = Plain()
    wanted = {"noise_multiplier": None, "target_epsilon": 3.0}
    spent = fit(tmp_path, module, privacy(**wanted))[0].private_run.budget.spent()
    assert 2.99 < spent < 3.0
    with pytest.raises(BudgetError, match="spent epsilon 3 by RDP, and target_epsilon is 3: too little is left"):
        fit(tmp_path, module, privacy(**wanted))
    callback, _ = fit(tmp_path, module, privacy(**{**wanted, "target_epsilon": 3.5}))
    assert 3.4 < callback.private_run.budget.spent() <= 3.5  # of both runs together


@pytest.mark.parametrize("privately", [True, False])
def test_a_run_that_goes_on_keeps_what_came_before_it(tmp_path, privately):
    module = Plain()
    before = fit(tmp_path / "1", module)[1] if privately else ordinarily(tmp_path, module)
    saving = ModelCheckpoint(dirpath=tmp_path / "2", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    trainer(tmp_path / "2", privacy(), saving, enable_checkpointing=True, max_epochs=2).fit(module, loader())
    assert [finding for finding in verify(tmp_path / "2", []) if finding[1]] == []
    again = privacy()
    resumed = trainer(tmp_path / "2", again, max_epochs=4)
    resumed.fit(Plain(), loader(), ckpt_path=tmp_path / "2" / "step=6.ckpt", weights_only=True)
    said = again.statement()
    assert said.ledger.num_steps == 12
    if privately:
        assert said.ledger.earlier == {before.run: before.ledger.runs}
    else:
        assert "trained before by steps without privacy" in said.release


def test_training_without_privacy_before_is_not_for_release(tmp_path):
    callback, said = fit(tmp_path, Plain(ordinarily(tmp_path, Plain()).net))
    assert "not for release: the weights were trained before by steps without privacy on net.0." in said.release
    assert written(callback)["release"] == said.release


def test_training_on_other_data_may_be_declared_and_is_said(tmp_path):
    module = ordinarily(tmp_path, Plain())
    fit(tmp_path, module, privacy(earlier_training="other_data"))
    _, said = fit(tmp_path, module, privacy(earlier_training="other_data"))
    assert said.release == "ok"
    assert said.ledger.earlier == {}
    assert said.to_markdown().count("on data that was declared to be other") == 2


def test_what_keeps_an_earlier_run_from_release_keeps_this_one(tmp_path):
    module = Plain()
    _, first = fit(tmp_path, module, privacy(reproducible=True))
    _, second = fit(tmp_path, module)
    assert f"run {first.run}, which trained the weights before: it is reproducible" in second.release

    class Fails(Plain):
        def on_train_epoch_end(self):
            raise RuntimeError("stops")

    failed = Fails()
    with pytest.raises(RuntimeError, match="stops"):
        fit(tmp_path, failed)
    assert "before: the run ended by an error" in fit(tmp_path, Plain(failed.net))[1].release


class Grouped(TensorDataset):
    groups = tuple(str(row // 2) for row in range(60))


def test_runs_with_another_unit_of_privacy_cannot_be_added_up(tmp_path):
    module = Plain()
    fit(tmp_path, module)
    persons = {"unit_of_privacy": "group", "images_per_group": 2, "expected_batch_size": 10}
    data = loader(Grouped(*examples().tensors))
    with pytest.raises(ConfigurationError, match=r"protects one training example.*cannot be added up"):
        trainer(tmp_path, privacy(**persons)).fit(module, data)
    trainer(tmp_path, privacy(**persons, earlier_training="other_data"), max_epochs=1).fit(module, data)


def test_weights_of_an_export_bring_their_steps(tmp_path):
    first, file = fit(tmp_path, Plain())[1], tmp_path / "model.safetensors"
    callback, module = privacy(), export(file, first)
    trainer(tmp_path, callback, max_epochs=1).fit(module, loader())
    assert callback.ledger.earlier == {first.run: first.ledger.runs}

    class Features(pl.LightningDataModule):
        """Of a network that was trained privately."""

        weights_file = str(file)

        def train_dataloader(self):
            return loader()

    callback = privacy()
    trainer(tmp_path, callback, max_epochs=1).fit(Plain(), Features())
    assert callback.ledger.earlier == {first.run: first.ledger.runs}
    assert "it is unknown on what they were trained" in fit(tmp_path, export(file, None))[1].to_markdown()
    with pytest.raises(DataError, match="cannot be read"):
        fit(tmp_path, export(file, '{"ledger": 3}'))
    with pytest.raises(DataError, match=r"other tensors.*Export it anew"):
        fit(tmp_path, export(file, first, weight=0.0))


def test_what_is_behind_weights_is_said_however_many_runs_lie_between(tmp_path):
    module = Plain()
    module.weights_file = "foreign.pth"
    first = fit(tmp_path, module)[1]
    unknown = "weights of foreign.pth: it is unknown on what they were trained"
    assert first.earlier_training == (unknown,)
    second = fit(tmp_path, Plain(module.net))[1]
    assert second.earlier_training == (unknown,)
    fresh = export(tmp_path / "model.safetensors", second)
    third = fit(tmp_path, fresh)[1]
    assert third.earlier_training == (unknown,)
    assert third.ledger.earlier == {first.run: first.ledger.runs, second.run: second.ledger.runs}
    declared = fit(tmp_path, Plain(fresh.net), privacy(earlier_training="other_data"))[1]
    runs = {f"run {run.run}: 9 private steps, on data that was declared to be other" for run in (first, second, third)}
    assert set(declared.earlier_training) == {unknown, *runs}
    assert declared.ledger.earlier == {}


def take(net, num_steps=1):
    """The statement after some steps of a plain loop."""
    plan = PrivacyPlan(num_train=60, expected_batch_size=20, num_steps=9, noise_multiplier=1.0, delta=1e-3)
    private = PrivateStep(net, lambda batch: F.cross_entropy(net(batch[0]), batch[1]), examples(), plan=plan)
    for _ in range(num_steps):
        for batch in private.batches():
            private.accumulate(batch)
        private.release()
        step(net)
    return private.statement()


def step(net):
    torch.optim.SGD(net.parameters(), lr=0.1).step()


def test_a_plain_loop_counts_them_as_well():
    net = torch.nn.Linear(5, 3)
    first = take(net, 2)
    assert first.release == "ok"
    assert take(net).ledger.earlier == {first.run: first.ledger.runs}
    step(net)  # with the same release once more
    assert take(net).release == "ok"


def test_an_ordinary_step_between_two_private_runs_is_seen():
    net = torch.nn.Linear(5, 3)
    take(net)
    net.zero_grad()
    net(torch.randn(4, 5)).sum().backward()
    step(net)
    assert "trained before by steps without privacy on weight, bias" in take(net).release


def test_a_gradient_that_was_cleared_or_is_not_trained_with_is_no_training():
    net = torch.nn.Linear(5, 3)
    net(torch.randn(4, 5)).sum().backward()
    net.weight.requires_grad_(False)
    net.bias.grad = None
    assert take(net).release == "ok"


def test_what_hangs_on_weights_goes_with_them():
    net = torch.nn.Linear(5, 3)
    take(net)
    known = len(record._known)
    del net
    gc.collect()
    assert len(record._known) == known - 4  # with their gradients
