"""The ledger belongs to the weights, whichever callback or Trainer goes on with them."""

import copy
import json
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from plain_run import Plain, examples, held_out, loader, privacy, trainer
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.callbacks import AveragedWeights, PrivacyCallback
from dp_lightning.commands.verify import verify
from dp_lightning.errors import BudgetError, ConfigurationError, DataError, ModelError
from dp_lightning.privacy import PrivacyPlan, PrivateStep
from dp_lightning.privacy.accounting import Ledger, compose
from dp_lightning.privacy.lineage import origin_of
from dp_lightning.privacy.statement import ONE_EXAMPLE, STATEMENT
from dp_lightning.privacy.weights import digest_of
from dp_lightning.private_run.resume import SavedRun
from dp_lightning.strategies.checkpoint_io import PrivateCheckpointIO

save_file = pytest.importorskip("safetensors.torch").save_file


def fit(folder, module, callback=None, **kwargs):
    callback = callback or privacy()
    run = trainer(folder, callback, **kwargs)
    run.fit(module, loader())
    return callback, callback.statement()


def ordinarily(folder, module):
    trainer(folder, max_epochs=1).fit(module, loader())
    return module


SAME = {
    "the same module": lambda module: module,
    "a copy": copy.deepcopy,
    "its network in another module": lambda module: Plain(module.net),
    "its state dict": lambda module: loaded(Plain(), module.state_dict()),
    "a part of it": lambda module: Plain(torch.nn.Sequential(copy.deepcopy(module.net[0]), torch.nn.Linear(8, 3))),
}


def loaded(module, state):
    module.load_state_dict(state)
    return module


@pytest.mark.parametrize("way", SAME)
def test_a_second_private_fit_counts_the_steps_of_the_first(tmp_path, way):
    module = Plain()
    _, first = fit(tmp_path / "1", module, max_epochs=2)
    again, second = fit(tmp_path / "2", SAME[way](module), privacy(noise_multiplier=2.0), max_epochs=1)
    together = compose([(1.0, 1 / 3, 6), (2.0, 1 / 3, 3)], delta=1e-3, accountant="rdp")
    assert second.epsilon["rdp"] == pytest.approx(together)
    assert again.private_run.budget.spent() == pytest.approx(together)
    assert again.ledger.num_steps == 3
    assert second.release == "ok"
    assert f"run {first.run}: 6 private steps, which count here" in second.to_markdown()
    third = fit(tmp_path / "3", SAME[way](module), max_epochs=1)[1]
    assert first.run in third.ledger.earlier


def test_weights_of_a_checkpoint_that_this_process_has_saved_count_too(tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path / "1", save_last=True)
    run = trainer(tmp_path / "1", privacy(), saving, enable_checkpointing=True)
    run.fit(Plain(), loader())
    state = torch.load(tmp_path / "1" / "last.ckpt", weights_only=True)["state_dict"]
    del run
    assert len(fit(tmp_path / "2", loaded(Plain(), state))[1].ledger.earlier) == 1


def test_other_weights_count_nothing(tmp_path):
    fit(tmp_path / "1", Plain())
    assert fit(tmp_path / "2", Plain())[1].ledger.earlier == {}


def test_the_target_holds_for_all_runs_together(tmp_path):
    module = Plain()
    spent = fit(tmp_path / "1", module)[0].private_run.budget.spent()
    wanted = {"noise_multiplier": None, "target_epsilon": spent + 1.0}
    callback, _ = fit(tmp_path / "2", module, privacy(**wanted), max_epochs=1)
    assert spent < callback.private_run.budget.spent() <= spent + 1.0
    with pytest.raises(BudgetError, match="Raise the target"):
        fit(tmp_path / "3", module, privacy(**{**wanted, "target_epsilon": spent}), max_epochs=1)


def test_a_target_that_is_spent_but_for_rounding_is_refused(tmp_path):
    """The noise of a run meets its target from below: by a ten-thousandth of it, which is nothing to train with."""
    module = Plain()
    wanted = {"noise_multiplier": None, "target_epsilon": 3.0}
    spent = fit(tmp_path / "1", module, privacy(**wanted))[0].private_run.budget.spent()
    assert 2.99 < spent < 3.0
    with pytest.raises(BudgetError, match="spent epsilon 3 by RDP, and target_epsilon is 3: too little is left"):
        fit(tmp_path / "2", module, privacy(**wanted))
    with pytest.warns(UserWarning, match="without the steps behind the weights. They will teach the model little"):
        fit(tmp_path / "3", module, privacy(**{**wanted, "target_epsilon": 3.05}))


def test_a_run_that_goes_on_keeps_what_came_before_it(tmp_path):
    module = Plain()
    _, first = fit(tmp_path / "1", module)
    saving = ModelCheckpoint(dirpath=tmp_path / "2", every_n_train_steps=3, save_top_k=-1, filename="{step}")
    run = trainer(tmp_path / "2", privacy(), saving, enable_checkpointing=True, max_epochs=2)
    run.fit(module, loader())
    assert [finding for finding in verify(tmp_path / "2", []) if finding[1]] == []
    again = privacy()
    resumed = trainer(tmp_path / "2", again, max_epochs=4)
    resumed.fit(Plain(), loader(), ckpt_path=tmp_path / "2" / "step=6.ckpt", weights_only=True)
    said = again.statement()
    assert said.ledger.earlier == {first.run: first.ledger.runs}
    assert said.ledger.num_steps == 12
    assert first.run in said.to_markdown()


def test_earlier_runs_that_are_edited_away_are_found(tmp_path):
    module = Plain()
    fit(tmp_path / "1", module)
    run = trainer(tmp_path / "2", privacy(), enable_checkpointing=False)
    run.fit(module, loader())
    run.save_checkpoint(tmp_path / "2" / "end.ckpt")
    saved = torch.load(tmp_path / "2" / "end.ckpt", weights_only=True)
    claims, ledger = SavedRun.read(saved), Ledger()
    ledger.load_state_dict({"runs": claims.statement.ledger.state_dict()["runs"]})
    replace(claims, statement=replace(claims.statement, ledger=ledger)).write(saved)
    PrivateCheckpointIO().save_checkpoint(saved, tmp_path / "2" / "end.ckpt")
    assert any(wrong and "earlier runs" in what for what, wrong in verify(tmp_path / "2", []))


def test_a_callback_does_not_go_on_with_weights_of_another_run(tmp_path):
    one, other = Plain(), Plain()
    fit(tmp_path / "1", other)
    callback, _ = fit(tmp_path / "2", one, max_epochs=1)
    with pytest.raises(ConfigurationError, match="new PrivacyCallback"):
        fit(tmp_path / "2", other, callback, max_epochs=2)


@pytest.mark.parametrize("way", [way for way in SAME if way != "its state dict"])
def test_training_without_privacy_before_is_not_for_release(tmp_path, way):
    before = ordinarily(tmp_path, Plain())
    _, said = fit(tmp_path, SAME[way](before))
    assert "not for release: the weights were trained before by steps without privacy on net.0." in said.release
    assert json.loads((tmp_path / "privacy_statement.json").read_text())["release"] == said.release


def test_it_stays_so_where_the_run_goes_on(tmp_path):
    saving = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    run = trainer(tmp_path, privacy(), saving, enable_checkpointing=True, max_epochs=1)
    run.fit(ordinarily(tmp_path, Plain()), loader())
    again = privacy()
    resumed = trainer(tmp_path, again)
    resumed.fit(Plain(), loader(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert "trained before by steps without privacy" in again.statement().release


def test_training_on_other_data_may_be_declared_and_is_said(tmp_path):
    module = ordinarily(tmp_path, Plain())
    fit(tmp_path, module, privacy(earlier_training="other_data"))
    _, said = fit(tmp_path, module, privacy(earlier_training="other_data"))
    assert said.release == "ok"
    assert said.ledger.earlier == {}
    assert said.to_markdown().count("on data that was declared to be other") == 2
    with pytest.raises(ConfigurationError, match="earlier_training is 'none'"):
        PrivacyCallback(10, noise_multiplier=1.0, earlier_training="none")


def test_what_keeps_an_earlier_run_from_release_keeps_this_one(tmp_path):
    module = Plain()
    _, first = fit(tmp_path / "1", module, privacy(reproducible=True))
    _, second = fit(tmp_path / "2", module)
    assert f"run {first.run}, which trained the weights before: it is reproducible" in second.release

    class Fails(Plain):
        def on_train_epoch_end(self):
            raise RuntimeError("stops")

    failed = Fails()
    with pytest.raises(RuntimeError, match="stops"):
        fit(tmp_path / "3", failed)
    assert "before: the run ended by an error" in fit(tmp_path / "4", Plain(failed.net))[1].release


class Grouped(TensorDataset):
    groups = tuple(str(row // 2) for row in range(60))


def test_runs_with_another_unit_of_privacy_cannot_be_added_up(tmp_path):
    module = Plain()
    fit(tmp_path / "1", module)
    persons = {"unit_of_privacy": "group", "images_per_group": 2, "expected_batch_size": 10}
    data = loader(Grouped(*examples().tensors))
    with pytest.raises(ConfigurationError, match=r"protects one training example.*cannot be added up"):
        trainer(tmp_path / "2", privacy(**persons)).fit(module, data)
    trainer(tmp_path / "2", privacy(**persons, earlier_training="other_data"), max_epochs=1).fit(module, data)


def test_weights_of_an_export_bring_their_steps(tmp_path):
    module = Plain()
    first = fit(tmp_path / "1", module)[1]
    file = str(tmp_path / "model.safetensors")
    tensors = {"w": torch.ones(3)}
    claims = replace(first, weights=digest_of(tensors))
    save_file(tensors, file, metadata={STATEMENT: json.dumps(claims.saved())})
    fresh = Plain()
    fresh.weights_file = file
    said = fit(tmp_path / "2", fresh)[1]
    assert said.ledger.earlier == {first.run: first.ledger.runs}
    save_file({"w": torch.ones(3)}, file)
    fresh = Plain()
    fresh.weights_file = file
    assert "it is unknown on what they were trained" in fit(tmp_path / "3", fresh)[1].to_markdown()
    save_file({"w": torch.ones(3)}, file, metadata={STATEMENT: '{"ledger": 3}'})
    fresh = Plain()
    fresh.weights_file = file
    with pytest.raises(DataError, match="cannot be read"):
        fit(tmp_path / "4", fresh)
    fewer = {**claims.saved(), "ledger": {"runs": [[1.0, 0.5, 1]], "earlier": {}}}
    for kept, said_of_them in ((tensors, fewer), ({"w": torch.zeros(3)}, claims.saved())):
        save_file(kept, file, metadata={STATEMENT: json.dumps(said_of_them)})
        with pytest.raises(DataError, match=r"edited.*Export it anew|other tensors.*Export it anew"):
            fit(tmp_path / "5", fresh)


def test_what_is_behind_weights_is_said_however_many_runs_lie_between(tmp_path):
    module, file = Plain(), str(tmp_path / "model.safetensors")
    module.weights_file = "foreign.pth"
    first = fit(tmp_path / "1", module)[1]
    unknown = "weights of foreign.pth: it is unknown on what they were trained"
    assert first.earlier_training == (unknown,)
    second = fit(tmp_path / "2", Plain(copy.deepcopy(module.net)))[1]
    counted = f"run {first.run}: 9 private steps, which count here"
    assert second.earlier_training == (counted, unknown)
    tensors = {"w": torch.ones(3)}
    save_file(tensors, file, metadata={STATEMENT: json.dumps(replace(second, weights=digest_of(tensors)).saved())})
    fresh = Plain()
    fresh.weights_file = file
    third = fit(tmp_path / "3", fresh)[1]
    assert third.earlier_training == (counted, f"run {second.run}: 9 private steps, which count here", unknown)
    declared = fit(tmp_path / "4", Plain(fresh.net), privacy(earlier_training="other_data"))[1].earlier_training
    assert unknown in declared
    assert not any(word.endswith("which count here") for word in declared)


def test_features_of_a_network_that_was_trained_privately_bring_its_steps(tmp_path):
    first = fit(tmp_path / "1", Plain())[1]
    file, tensors = str(tmp_path / "model.safetensors"), {"w": torch.ones(3)}
    claims = replace(first, weights=digest_of(tensors))
    save_file(tensors, file, metadata={STATEMENT: json.dumps(claims.saved())})

    class Features(pl.LightningDataModule):
        weights_file = file

        def train_dataloader(self):
            return loader()

    callback = privacy()
    trainer(tmp_path / "2", callback).fit(Plain(), Features())
    assert callback.ledger.earlier == {first.run: first.ledger.runs}


class Steps:
    """A plain loop."""

    def __init__(self, net, **kwargs):
        plan = PrivacyPlan(num_train=60, expected_batch_size=20, num_steps=9, noise_multiplier=1.0, delta=1e-3)
        self.private = PrivateStep(net, lambda b: F.cross_entropy(net(b[0]), b[1]), examples(), plan=plan, **kwargs)
        self.net, self.optimizer = net, torch.optim.SGD(net.parameters(), lr=0.1)

    def release(self):
        for batch in self.private.batches():
            self.private.accumulate(batch)
        self.private.release()

    def take(self, num=1):
        for _ in range(num):
            self.release()
            self.optimizer.step()
        return self.private.statement()


def test_a_plain_loop_counts_them_as_well(tmp_path):
    net = torch.nn.Linear(5, 3)
    first = Steps(net).take(2)
    assert first.release == "ok"
    again = Steps(net)
    assert again.take(1).ledger.earlier == {first.run: first.ledger.runs}
    again.optimizer.step()  # with the same release once more
    assert Steps(net).take().release == "ok"


@pytest.mark.parametrize("fresh", [True, False])
def test_a_gradient_in_the_place_of_a_release_is_seen(fresh):
    net = torch.nn.Linear(5, 3)
    steps = Steps(net)
    steps.take()
    steps.optimizer.zero_grad(set_to_none=fresh)
    net(torch.randn(4, 5)).sum().backward()
    steps.optimizer.step()
    assert "trained before by steps without privacy" in Steps(net).take().release


# During the run


class Trains:
    """Ordinary steps on the trained parameters, as a probe of the head before the run takes them."""

    def train(self, module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with torch.inference_mode(False), torch.enable_grad():
            F.cross_entropy(module.net(examples().tensors[0]), examples().tensors[1]).backward()
        optimizer.step()
        optimizer.zero_grad()


BEFORE_THE_FIRST_LOSS = ("on_fit_start", "on_train_start", "on_train_epoch_start", "on_train_batch_start")
BY = {
    "an optimizer": Trains().train,
    "hand": lambda module: module.net[0].weight.data.copy_(torch.randn(8, 5)),
}


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize("hook", [*BEFORE_THE_FIRST_LOSS, "on_sanity_check_end"])
def test_what_is_trained_may_not_change_before_the_first_loss(tmp_path, hook, by):
    kind = type("Hook", (Callback,), {hook: lambda self, trainer, pl_module, *args: BY[by](pl_module)})

    class Validates(Plain):
        def validation_step(self, batch, batch_idx):
            pass

    run = trainer(tmp_path, privacy(), kind())
    with pytest.raises(ModelError, match=r"net\.0\.weight.* changed since the private run began"):
        run.fit(Validates(), loader(), held_out())


def test_what_is_not_trained_may_be_set_there(tmp_path):
    class Student(Plain):
        def __init__(self):
            super().__init__()
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
            self.register_buffer("scale", torch.ones(()))

        def on_train_start(self):
            self.teacher.load_state_dict(self.net.state_dict())
            self.scale.fill_(0.5)

        def training_step(self, batch, batch_idx):
            return F.mse_loss(self.net(batch[0]), self.scale * self.teacher(batch[0]))

        def optimizer_step(self, epoch, batch_idx, optimizer, closure):
            optimizer.step(closure)
            with torch.no_grad():
                for mine, average in zip(self.net.parameters(), self.teacher.parameters(), strict=True):
                    average.lerp_(mine, 0.1)
                    mine.clamp_(-2, 2)

    assert fit(tmp_path, Student())[1].release == "ok"


class StepsTwice(Plain):
    def optimizer_step(self, epoch, batch_idx, optimizer, closure):
        optimizer.step(closure)
        BY["an optimizer"](self)


class StepsInZeroGrad(Plain):
    def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
        BY["an optimizer"](self)


class AddsToTheRelease(Plain):
    def on_before_optimizer_step(self, optimizer):
        with torch.enable_grad():
            self.net(examples().tensors[0]).sum().backward()


@pytest.mark.parametrize("kind", [StepsTwice, StepsInZeroGrad, AddsToTheRelease])
def test_a_raw_gradient_beside_a_release_is_refused_at_the_next_loss(tmp_path, kind):
    callback = privacy()
    run = trainer(tmp_path, callback)
    with pytest.raises(ModelError, match="by an optimizer's step on another gradient than a release"):
        run.fit(kind(), loader())
    assert callback.ledger.num_steps == 1
    assert "has changed net.0.weight" in callback.statement().release


# In a plain loop


def ordinary_step(steps):
    steps.optimizer.zero_grad()
    steps.net(torch.randn(4, 5)).sum().backward()
    steps.optimizer.step()


def raw_gradient(steps):
    steps.release()
    steps.net(torch.randn(4, 5)).sum().backward()
    steps.optimizer.step()


def hand_before_the_step(steps):
    steps.release()
    steps.net.bias.data.add_(1)
    steps.optimizer.step()


class Clears(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
        self.zero_grad()


def clearing_step(steps):
    steps.net(torch.randn(4, 5)).sum().backward()
    Clears(steps.net.parameters(), lr=0.1).step()


def other_tensor(steps):
    steps.release()
    steps.net.weight.grad = steps.net.weight.grad * 2
    steps.optimizer.step()


BY_A_STEP = {
    "an ordinary step": ordinary_step,
    "an ordinary step that clears the gradients": clearing_step,
    "a raw gradient on top of a release": raw_gradient,
    "a tensor in the place of a release": other_tensor,
}
BY_HAND = {
    "a hand": lambda steps: steps.net.weight.data.add_(0.01),
    "a hand before the step": hand_before_the_step,
    "other memory": lambda steps: setattr(steps.net.weight, "data", torch.zeros(3, 5)),
}


@pytest.mark.parametrize("taken", [0, 2])
@pytest.mark.parametrize("code", [*BY_A_STEP, *BY_HAND])
def test_a_plain_loop_notices_other_code(code, taken):
    steps = Steps(torch.nn.Linear(5, 3))
    steps.take(taken)
    {**BY_A_STEP, **BY_HAND}[code](steps)
    assert "other code than an optimizer's step on a release has changed" in steps.private.statement().release
    said = "parameter.grad.copy_" if code in BY_A_STEP else "by other code than an optimizer's step"
    with pytest.raises(ModelError, match=rf"changed since the private run began.*{said}"):
        steps.take()
    assert steps.private.ledger.num_steps <= taken + 1


def test_a_plain_loop_may_change_what_is_not_trained_and_post_process():
    net = torch.nn.Linear(5, 3)
    net.teacher = copy.deepcopy(net).requires_grad_(False)
    other = torch.nn.Linear(5, 1)
    steps = Steps(net)
    others = torch.optim.SGD(other.parameters(), lr=0.1)
    steps.optimizer.register_step_post_hook(lambda *args: net.weight.data.clamp_(-1, 1))
    for _ in range(3):
        steps.release()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        steps.optimizer.step()
        net.teacher.weight.data.lerp_(net.weight.data, 0.1)
        other(net(torch.randn(4, 5)).detach()[:, :1].expand(4, 5)).sum().backward()
        others.step()
    assert steps.private.statement().release == "ok"
    net.requires_grad_(False)
    assert steps.private.statement().release == "ok"


def test_runs_in_turns_on_one_model_count_each_others_steps():
    net = torch.nn.Linear(5, 3)
    one, other = Steps(net), Steps(net)
    for _ in range(2):
        one.take()
        other.take()
    for mine, its in ((one, other), (other, one)):
        said = mine.private.statement()
        assert said.ledger.num_steps == 2
        assert said.ledger.earlier == {its.private.run: its.private.ledger.runs}
        assert f"run {its.private.run}: 2 private steps, taken in turns with this run" in said.to_markdown()
        assert said.release == "ok"
    other.private.faults.add("it is a test")
    assert f"run {other.private.run}, which trained the weights in turns with this one: it is a test" in (
        one.private.statement().release
    )


# Copies that are not the same numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_a_copy_in_another_dtype_is_known(tmp_path, dtype):
    module = Plain()
    first = fit(tmp_path / "1", module)[1]
    state = {name: tensor.to(dtype) for name, tensor in module.state_dict().items()}
    assert first.run in fit(tmp_path / "2", loaded(Plain(), state))[1].ledger.earlier


def test_a_copy_that_the_trainer_converts_is_known(tmp_path):
    module = Plain()
    first = fit(tmp_path / "1", module)[1]
    assert first.run in fit(tmp_path / "2", copy.deepcopy(module), precision="64-true")[1].ledger.earlier
    before = ordinarily(tmp_path, Plain())
    assert "steps without privacy" in fit(tmp_path / "3", copy.deepcopy(before), precision="64-true")[1].release


def test_a_copy_of_the_middle_of_a_run_is_known(tmp_path):
    class Keeps(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            if trainer.current_epoch == 0:
                self.state = copy.deepcopy(pl_module.state_dict())

    keeps = Keeps()
    run = trainer(tmp_path / "1", callback := privacy(), keeps)
    run.fit(Plain(), loader())
    assert callback.run in fit(tmp_path / "2", loaded(Plain(), keeps.state))[1].ledger.earlier


def test_a_copy_of_the_average_is_known(tmp_path):
    average = AveragedWeights(decay=0.5)
    run = trainer(tmp_path / "1", callback := privacy(), average)
    run.fit(Plain(), loader())
    assert callback.run in fit(tmp_path / "2", loaded(Plain(), average.average))[1].ledger.earlier


def test_a_copy_in_another_shape_is_known():
    net = torch.nn.Linear(5, 3)
    first = Steps(net).take().run
    again = torch.nn.Linear(3, 5, bias=False)
    again.weight.data.copy_(net.weight.data.view(5, 3))
    ledger = Ledger()
    origin_of(again, ledger, run="again", unit=ONE_EXAMPLE, other_data=False)
    assert list(ledger.earlier) == [first]


def test_public_weights_that_a_run_started_from_are_not_its_own():
    torch.manual_seed(0)
    net = torch.nn.Linear(5, 3)
    public = copy.deepcopy(net)
    Steps(net).take()
    assert Steps(public).take().ledger.earlier == {}
