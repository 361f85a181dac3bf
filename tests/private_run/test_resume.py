"""A run that comes back: from its checkpoint, with what the journal knows, within its budget."""

import enum
import json

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from plain_run import N, Plain, Stop, examples, loader, parameters_after, privacy, trainer, without_noise
from torch.nn import functional as F

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback
from dp_lightning.errors import BudgetError, ConfigurationError, DataError, ModelError
from dp_lightning.lightning_modules.schedules import WarmupCosine
from dp_lightning.postprocess import LowPass, MagnitudeScale, Orthogonalize
from dp_lightning.privacy import GaussianNoise
from dp_lightning.private_run.resume import PRIVATE_RUN


def test_a_resumed_run_goes_on_and_never_reports_less(tmp_path):
    # The next epoch's draws may not repeat: they come from a fresh key.
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="half")
    first = privacy(target_epsilon=5.0, noise_multiplier=None)
    run = trainer(tmp_path, first, checkpoint, enable_checkpointing=True, max_epochs=6)
    module = Plain()

    class Stop(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = trainer.current_epoch == 2

    run.callbacks.append(Stop())
    run.fit(module, loader())
    assert first.ledger.num_steps == 9
    spent = first.ledger.epsilon(delta=1e-3)

    def resume(target_epsilon):
        callback = privacy(target_epsilon=target_epsilon, noise_multiplier=None)
        again = trainer(tmp_path, callback, max_epochs=6)
        again.fit(Plain(), loader(), ckpt_path=tmp_path / "half.ckpt", weights_only=True)
        assert again.global_step == 18
        return callback.ledger

    with pytest.raises(BudgetError, match="target_epsilon"):
        resume(0.5)
    ledger = resume(5.0)
    assert ledger.num_steps == 18
    assert spent < ledger.epsilon(delta=1e-3) <= 5.0
    # Once more from the same checkpoint: the journal beside it knows that the steps have been taken.
    with pytest.raises(AssertionError, match="9 == 18"):
        resume(5.0)
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert (facts["num_steps"], facts["lost_steps"]) == (18, 9)


class Scheduled(Plain):
    """An optimizer and a schedule with state of their own; always the same start."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("step", [2, 4, 6, 7])
def test_a_run_resumed_within_an_epoch_equals_one_that_was_not_interrupted(tmp_path, step):
    def callbacks():
        filters = PostProcessCallback([LowPass(bias_correction=True), MagnitudeScale(Orthogonalize())])
        return without_noise(max_physical_batch_size=6), filters

    whole = parameters_after(tmp_path, *callbacks(), module=Scheduled())
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    with pytest.raises(RuntimeError, match="stopped"):
        parameters_after(tmp_path, *callbacks(), checkpoint, Stop(step), module=Scheduled(), enable_checkpointing=True)
    (callback, filters), module = callbacks(), Scheduled()
    again = trainer(tmp_path, callback, filters)
    again.fit(module, loader(), ckpt_path=tmp_path / f"step={step}.ckpt", weights_only=True)
    assert callback.ledger.num_steps == again.global_step == 9
    found = torch.cat([p.detach().flatten() for p in module.parameters()])
    assert torch.equal(found, whole)


@pytest.fixture
def drawn(monkeypatch):
    """The noise of each step, as bytes."""
    found, normals = [], GaussianNoise._normals

    def noted(noise, *args):
        values = normals(noise, *args)
        found.append(bytes(values.numpy()))
        return values

    monkeypatch.setattr(GaussianNoise, "_normals", noted)
    return found


@pytest.mark.parametrize("reproducible", [False, True])
def test_noise_of_lost_steps_is_not_drawn_again(tmp_path, drawn, reproducible):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="four", every_n_train_steps=4)
    with pytest.raises(RuntimeError, match="stopped"):
        parameters_after(tmp_path, privacy(reproducible=reproducible), checkpoint, Stop(6), enable_checkpointing=True)
    again = privacy(reproducible=reproducible)
    trainer(tmp_path, again).fit(Plain(), loader(), ckpt_path=tmp_path / "four.ckpt", weights_only=True)
    # Six steps, of which two are lost, and three that are left.
    assert again.ledger.num_steps == len(set(drawn)) == len(drawn) == 9


@pytest.mark.parametrize(
    ("now", "message"),
    [
        ({"examples": "one_by_one"}, "privacy.examples together, and it is one_by_one now"),
        ({"reproducible": True}, "privacy.seed None, and it is 0 now"),
    ],
)
def test_a_run_keeps_what_its_statement_says_once(tmp_path, now, message):
    crash(tmp_path, privacy(), saved=4, stopped=4)
    with pytest.raises(ConfigurationError, match=message):
        resume(tmp_path, privacy(**now), tmp_path / "step=4.ckpt")


def test_a_checkpoint_whose_steps_no_ledger_counts_is_refused(tmp_path):
    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="plain")
    trainer(tmp_path, checkpoint, enable_checkpointing=True, max_epochs=1).fit(Plain(), loader())
    with pytest.raises(ConfigurationError, match="ledger holds 0"):
        trainer(tmp_path, privacy()).fit(Plain(), loader(), ckpt_path=tmp_path / "plain.ckpt", weights_only=True)


def test_a_subclass_and_the_names_that_the_statement_lists_survive_a_resume(tmp_path):
    class Own(PrivacyCallback):
        pass

    checkpoint = ModelCheckpoint(dirpath=tmp_path, filename="half", every_n_train_steps=4)
    run = trainer(tmp_path, privacy(), checkpoint, enable_checkpointing=True, max_epochs=3)
    run.fit(Plain(), loader())
    again = Own(expected_batch_size=20, noise_multiplier=1.0, delta=1e-3, accountant="rdp")

    class Silent(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    resumed = trainer(tmp_path, again, max_epochs=4)
    resumed.fit(Silent(), loader(), ckpt_path=checkpoint.best_model_path, weights_only=True)
    assert again.ledger.num_steps == 12
    assert again.statement().unprotected == ("train_loss",)


def crash(folder, callback, *others, saved, stopped, checkpoints=None, **kwargs):
    """A run of 9 steps (3 epochs) with a checkpoint after each ``saved`` steps that ends after ``stopped``."""
    writer = ModelCheckpoint(dirpath=checkpoints or folder, filename="{step}", every_n_train_steps=saved, save_top_k=-1)
    with pytest.raises(RuntimeError, match="stopped"):
        parameters_after(folder, callback, *others, writer, Stop(stopped), enable_checkpointing=True, **kwargs)


def resume(folder, callback, checkpoint, **kwargs):
    run = trainer(folder, callback, **kwargs)
    run.fit(Plain(), loader(), ckpt_path=checkpoint, weights_only=True)
    return run


def test_a_checkpoint_in_a_folder_of_its_own_has_its_journal(tmp_path):
    crash(tmp_path / "logs", privacy(), saved=4, stopped=6, checkpoints=tmp_path / "elsewhere")
    (tmp_path / "logs").rename(tmp_path / "gone")
    again = privacy()
    run = resume(tmp_path / "new", again, tmp_path / "elsewhere" / "step=4.ckpt")
    # Steps five and six are lost and spent.
    assert (again.ledger.num_steps, run.global_step) == (9, 7)
    facts = json.loads((tmp_path / "new" / "privacy_statement.json").read_text())
    assert (facts["num_steps"], facts["lost_steps"]) == (9, 2)


def test_a_checkpoint_without_its_journal_is_refused(tmp_path):
    crash(tmp_path, privacy(), saved=4, stopped=6)
    for path in tmp_path.glob("privacy_journal_*"):
        path.unlink()
    with pytest.raises(DataError, match="unknown how many steps ran"):
        resume(tmp_path / "new", privacy(num_train=N), tmp_path / "step=4.ckpt")
    assert not (tmp_path / "new" / "privacy_statement.json").exists()


def test_a_journal_with_too_few_steps_is_refused_by_name(tmp_path):
    crash(tmp_path, privacy(), saved=4, stopped=6)
    (path,) = tmp_path.glob("privacy_journal_*")
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:3]))
    with pytest.raises(DataError, match=rf"{path.name} is older than the checkpoint"):
        resume(tmp_path, privacy(), tmp_path / "step=4.ckpt")


class Evaluated(Plain):
    def validation_step(self, batch):
        return None


@pytest.mark.parametrize("gone", ["weights", "lost_steps"])
def test_a_checkpoint_of_another_version_is_refused_with_the_cure(tmp_path, gone):
    crash(tmp_path, privacy(), saved=4, stopped=6)
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    del saved[PRIVATE_RUN]["statement"][gone]
    torch.save(saved, tmp_path / "step=4.ckpt")
    message = rf"cannot be read by dp-lightning .*{gone}.*Resume and export it with the version that wrote it"
    with pytest.raises(DataError, match=message):
        resume(tmp_path, privacy(), tmp_path / "step=4.ckpt")
    run = trainer(tmp_path, privacy())
    with pytest.raises(DataError, match=message):
        run.validate(Evaluated(), loader(), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)


class Activation(enum.Enum):
    RELU = 1


class WithEnum(Plain):
    def __init__(self, activation=Activation.RELU):
        super().__init__()
        self.save_hyperparameters()


def test_a_checkpoint_with_an_enum_resumes_where_its_code_may_run(tmp_path):
    crash(tmp_path, privacy(), saved=4, stopped=4, module=WithEnum())
    with pytest.raises(DataError, match=r"Activation.*pass weights_only=False with ckpt_path"):
        trainer(tmp_path, privacy()).fit(WithEnum(), loader(), ckpt_path=tmp_path / "step=4.ckpt")
    run = trainer(tmp_path, again := privacy())
    run.fit(WithEnum(), loader(), ckpt_path=tmp_path / "step=4.ckpt", weights_only=False)
    assert again.ledger.num_steps == run.global_step == 9


def test_a_checkpoint_whose_run_was_taken_out_is_refused(tmp_path):
    crash(tmp_path, privacy(), saved=4, stopped=6)
    saved = torch.load(tmp_path / "step=4.ckpt", weights_only=True)
    del saved[PRIVATE_RUN]
    torch.save(saved, tmp_path / "step=4.ckpt")
    with pytest.raises(ConfigurationError, match="has taken 4 steps and its ledger holds 0"):
        resume(tmp_path, privacy(), tmp_path / "step=4.ckpt")


def test_a_module_may_leave_out_weights_and_adapt_what_is_loaded(tmp_path):
    class Part(Plain):
        def on_save_checkpoint(self, checkpoint):
            del checkpoint["state_dict"]["net.0.bias"]

        def on_load_checkpoint(self, checkpoint):
            checkpoint["state_dict"]["net.0.bias"] = torch.zeros(8)

    crash(tmp_path, privacy(), saved=4, stopped=6, module=Part())
    run = trainer(tmp_path, privacy())
    run.fit(Part(), loader(), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)
    assert run.global_step == 7


def test_a_checkpoint_that_is_saved_again_keeps_its_ledger(tmp_path):
    crash(tmp_path, privacy(), saved=4, stopped=4)

    class Validated(Plain):
        def validation_step(self, batch, batch_idx):
            pass

    callback = privacy()
    run = trainer(tmp_path, callback)
    run.validate(Validated(), loader(), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)
    run.save_checkpoint(tmp_path / "copy.ckpt")
    again = privacy()
    went_on = resume(tmp_path, again, tmp_path / "copy.ckpt")
    # The weights hold four steps already, whatever Lightning counts.
    assert (again.ledger.num_steps, went_on.global_step) == (9, 5)


@pytest.mark.parametrize("stopped", [4, 6])
def test_a_fit_after_the_evaluation_of_a_checkpoint_counts_its_steps_and_those_after_it(tmp_path, stopped):
    crash(tmp_path, privacy(), saved=4, stopped=stopped)
    callback, module = privacy(), Evaluated()
    trainer(tmp_path / "1", callback).validate(module, loader(), ckpt_path=tmp_path / "step=4.ckpt", weights_only=True)
    run = trainer(tmp_path / "2", callback)
    run.fit(module, loader())
    assert (callback.ledger.num_steps, run.global_step) == (9, 9 - stopped)
    assert callback.statement().lost_steps == stopped - 4


def test_a_second_reproducible_fit_draws_other_noise(tmp_path, drawn):
    class Ends(Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            trainer.should_stop = True

    callback, module = privacy(reproducible=True), Plain()
    trainer(tmp_path, callback, Ends()).fit(module, loader())
    trainer(tmp_path, callback).fit(module, loader())
    assert len(drawn) == len(set(drawn)) == callback.ledger.num_steps == 9


@pytest.mark.timeout(60)
def test_a_run_with_lost_steps_ends_with_its_plan(tmp_path):
    """Lightning's own counter never reaches max_steps; the run has to end without it."""
    crash(tmp_path, privacy(), saved=4, stopped=6, max_epochs=-1, max_steps=9)
    again = privacy()
    run = resume(tmp_path, again, tmp_path / "step=4.ckpt", max_epochs=-1, max_steps=9)
    assert (again.ledger.num_steps, run.global_step) == (9, 7)


def budgeted(target, **kwargs):
    return privacy(target_epsilon=target, noise_multiplier=None, **kwargs)


@pytest.fixture
def interrupted(tmp_path):
    """Five of nine steps at epsilon 5, without a loss; the checkpoint and what is spent."""
    first = budgeted(5.0)
    crash(tmp_path, first, saved=5, stopped=5)
    return tmp_path / "step=5.ckpt", first.private_run.budget.spent(), first.plan.noise_multiplier


def test_a_target_below_what_is_spent_is_refused(tmp_path, interrupted):
    checkpoint, spent, _ = interrupted
    for target in (0.5 * spent, 0.999 * spent):
        with pytest.raises(BudgetError, match=r"steps taken have spent epsilon .* Raise the target"):
            resume(tmp_path, budgeted(target), checkpoint)


@pytest.mark.parametrize(("target", "accountant"), [(4.5, "rdp"), (8.0, "rdp"), (8.0, "prv")])
def test_another_target_changes_the_noise_of_the_steps_that_are_left(tmp_path, interrupted, target, accountant):
    checkpoint, _, sigma = interrupted
    again = budgeted(target, accountant=accountant)
    resume(tmp_path, again, checkpoint)
    (_, _, before), (changed, _, after) = again.ledger.runs
    assert (before, after) == (5, 4)
    if accountant == "rdp":
        assert (changed > sigma) == (target == 4.5)
    epsilon = again.ledger.epsilon(delta=1e-3, accountant=accountant)
    # The whole of the new target, and not more.
    assert 0.99 * target < epsilon <= target
    facts = json.loads((tmp_path / "privacy_statement.json").read_text())
    assert facts["target_epsilon"] == target
    assert facts["release"] == "ok"


def test_the_same_target_keeps_the_noise(tmp_path, interrupted, monkeypatch):
    checkpoint, _, sigma = interrupted

    def solver_that_rounds_differently(shape, target, **others):
        return shape.with_noise(sigma * 1.0001, target_epsilon=target)

    monkeypatch.setattr("dp_lightning.private_run.settings._calibrated", solver_that_rounds_differently)
    again = budgeted(5.0)
    resume(tmp_path, again, checkpoint)
    assert again.ledger.runs == ((sigma, 20 / N, 9),)


def test_fewer_steps_get_less_noise_and_none_left_is_refused(tmp_path, interrupted):
    checkpoint, _, sigma = interrupted
    again = budgeted(5.0)
    with pytest.raises(BudgetError, match="num_steps is 3 and 5 are taken"):
        resume(tmp_path, again, checkpoint, max_epochs=1)
    again = budgeted(5.0)
    resume(tmp_path, again, checkpoint, max_epochs=2)
    assert again.ledger.num_steps == 6
    assert again.ledger.runs[1][0] < sigma
    assert 4.95 < again.ledger.epsilon(delta=1e-3, accountant="rdp") <= 5.0


def test_another_batch_size_is_refused(tmp_path, interrupted):
    checkpoint, *_ = interrupted
    with pytest.raises(ConfigurationError, match="expected_batch_size 20, and it is 10 now"):
        resume(tmp_path, budgeted(5.0, expected_batch_size=10), checkpoint)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"max_grad_norm": 7.0}, r"privacy\.max_grad_norm 1\.0, and it is 7\.0 now"),
        ({"clipping": "per_layer"}, r"privacy\.clipping flat, and it is per_layer now"),
    ],
)
def test_another_clipping_is_refused(tmp_path, interrupted, changed, said):
    checkpoint, *_ = interrupted
    with pytest.raises(ConfigurationError, match=said):
        resume(tmp_path, budgeted(5.0, **changed), checkpoint)


def test_what_kept_a_checkpoint_from_release_keeps_the_run_that_goes_on_from_it(tmp_path):
    class Fails(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if self.global_step < 4 else None

    run = trainer(tmp_path, privacy(), OnExceptionCheckpoint(tmp_path), enable_checkpointing=True)
    with pytest.raises(ModelError, match="no loss"):
        run.fit(Fails(), loader())
    again = privacy()
    resume(tmp_path, again, tmp_path / "on_exception.ckpt")
    assert again.ledger.num_steps == 9
    assert "a step ended by an error (ModelError)" in again.statement().release


def test_more_steps_lengthen_the_schedule():
    def schedule(num_steps):
        parameter = torch.nn.Parameter(torch.zeros(1))
        return WarmupCosine(torch.optim.SGD([parameter], lr=1.0), num_steps=num_steps)

    first, longer = schedule(10), schedule(20)
    for _ in range(10):
        first.optimizer.step()
        first.step()
    longer.load_state_dict(first.state_dict())
    assert longer.factor(longer.last_epoch) > 0.4


def test_there_is_no_statement_before_a_fit(tmp_path):
    callback = privacy()
    with pytest.raises(ConfigurationError, match=r"before trainer\.fit"):
        callback.statement()


def test_another_data_set_is_refused(tmp_path, interrupted):
    checkpoint, *_ = interrupted
    run = trainer(tmp_path, budgeted(5.0))
    with pytest.raises(ConfigurationError, match="num_train 60, and it is 61 now"):
        run.fit(Plain(), loader(examples(61)), ckpt_path=checkpoint, weights_only=True)


def test_checkpoints_that_have_no_journal_are_refused(tmp_path):
    run = trainer(tmp_path, privacy(), plugins=[AsyncCheckpointIO()])
    with pytest.raises(ConfigurationError, match="AsyncCheckpointIO"):
        run.fit(Plain(), loader())


@pytest.mark.parametrize("again", ["validate", "test"])
def test_to_evaluate_an_earlier_checkpoint_takes_back_no_step(tmp_path, again):
    class Evaluated(Plain):
        def validation_step(self, batch, batch_idx):
            self.log("val", F.cross_entropy(self.net(batch[0]), batch[1]))

        test_step = validation_step

    callback, module = privacy(), Evaluated()
    writer = ModelCheckpoint(dirpath=tmp_path, filename="{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(tmp_path, callback, writer, enable_checkpointing=True)
    run.fit(module, loader())
    getattr(run, again)(module, loader(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
    assert callback.ledger.num_steps == 9
    with pytest.raises(BudgetError, match="budget is spent"):
        run.fit(module, loader())
    with pytest.raises(BudgetError, match="cannot forget"):
        run.fit(module, loader(), ckpt_path=tmp_path / "step=3.ckpt", weights_only=True)
