"""A run that comes back: from its checkpoint, with what the journal knows, within its budget."""

import shutil

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from plain_run import N, Plain, Stop, examples, flat, loader, parameters_after, privacy, trainer, without_noise, written

from dp_lightning.callbacks import PostProcessCallback
from dp_lightning.commands.verify import verify
from dp_lightning.errors import BudgetError, ConfigurationError, DataError, ModelError
from dp_lightning.postprocess import LowPass, MagnitudeScale, Orthogonalize
from dp_lightning.privacy import GaussianNoise
from dp_lightning.privacy.schedules import Schedule
from dp_lightning.private_run.resume import PRIVATE_RUN, RunHistory, plan_of_fit


class CrashAfter(Stop):
    """Before the next step, or at the end where there is none."""

    def on_train_end(self, trainer, *args):
        self.on_train_batch_start(trainer)


def crash(folder, callback, *others, saved, stopped, module=None, **kwargs):
    """A run of 9 steps (3 epochs) with a checkpoint after each ``saved`` steps that ends after ``stopped``."""
    writer = ModelCheckpoint(folder / "saved", filename="{step}", every_n_train_steps=saved, save_top_k=-1)
    run = trainer(folder, callback, *others, writer, CrashAfter(stopped), enable_checkpointing=True, **kwargs)
    with pytest.raises(RuntimeError, match="stopped"):
        run.fit(module or Plain(), loader())


def resume(folder, callback, step, module=None, dataset=None, **kwargs):
    run = trainer(folder, callback, **kwargs)
    module = module or Plain()
    run.fit(module, loader(dataset), ckpt_path=folder / "saved" / f"step={step}.ckpt", weights_only=True)
    return run


def budgeted(target, **kwargs):
    return privacy(target_epsilon=target, noise_multiplier=None, **kwargs)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs of 9 steps, each until a crash: after step 6 with a checkpoint of 4, and within epsilon 5 after 5."""
    folder = tmp_path_factory.mktemp("runs")
    crash(folder / "lost", privacy(), saved=4, stopped=6)
    crash(folder / "budget", callback := budgeted(5.0), saved=5, stopped=5)
    return folder, callback.private_run.budget.spent(), callback.plan.noise_multiplier


@pytest.fixture
def lost(runs, tmp_path):
    """The folder of a run that has lost steps 5 and 6."""
    return shutil.copytree(runs[0] / "lost", tmp_path / "lost")


@pytest.fixture
def interrupted(runs, tmp_path):
    """The folder of a run that has taken five steps within epsilon 5, what they have spent, and their noise."""
    return shutil.copytree(runs[0] / "budget", tmp_path / "budget"), *runs[1:]


def edited(folder, edit):
    path = folder / "saved" / "step=4.ckpt"
    saved = torch.load(path, weights_only=True)
    edit(saved)
    torch.save(saved, path)


def test_a_checkpoint_that_is_resumed_twice_never_reports_less(interrupted):
    folder, spent, _ = interrupted
    with pytest.raises(BudgetError, match=r"steps taken have spent epsilon .* Raise the target"):
        resume(folder, budgeted(0.999 * spent), 5)
    for taken in (9, 5):
        # The journal beside the checkpoint knows that the steps have been taken.
        run = resume(folder, callback := budgeted(5.0), 5)
        assert (run.global_step, callback.ledger.num_steps) == (taken, 9)
        assert callback.ledger.epsilon(delta=1e-3) <= 5.0
        assert written(callback)["lost_steps"] == 9 - taken
    assert [path.name for path in (folder / "privacy_runs").iterdir()] == ["version_0"]  # it is one run


class Scheduled(Plain):
    """An optimizer and a schedule with state of their own; always the same start."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.7)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize("step", [4, 6])
def test_a_run_resumed_within_an_epoch_equals_one_that_was_not_interrupted(tmp_path, step):
    def callbacks():
        filters = PostProcessCallback([LowPass(bias_correction=True), MagnitudeScale(Orthogonalize())])
        return without_noise(max_physical_batch_size=6), filters

    whole = parameters_after(tmp_path, *callbacks(), module=Scheduled())
    crash(tmp_path, *callbacks(), saved=1, stopped=step, module=Scheduled())
    (callback, filters), module = callbacks(), Scheduled()
    again = trainer(tmp_path, callback, filters)
    again.fit(module, loader(), ckpt_path=tmp_path / "saved" / f"step={step}.ckpt", weights_only=True)
    assert callback.ledger.num_steps == again.global_step == 9
    assert torch.equal(flat(module), whole)


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
    crash(tmp_path, privacy(reproducible=reproducible), saved=4, stopped=6)
    resume(tmp_path, again := privacy(reproducible=reproducible), 4)
    # Six steps, of which two are lost, and three that are left.
    assert again.ledger.num_steps == len(set(drawn)) == len(drawn) == 9


def test_a_second_reproducible_fit_draws_other_noise(tmp_path, drawn):
    callback, module = privacy(reproducible=True), Plain()
    crash(tmp_path, callback, saved=9, stopped=3, module=module)
    trainer(tmp_path, callback).fit(module, loader())
    assert len(drawn) == len(set(drawn)) == callback.ledger.num_steps == 9


@pytest.mark.parametrize(
    ("changed", "dataset", "message"),
    [
        ({"examples": "one_by_one"}, None, "privacy.examples together, and it is one_by_one now"),
        ({"max_grad_norm": 7.0}, None, r"privacy\.max_grad_norm 1\.0, and it is 7\.0 now"),
        ({"expected_batch_size": 10}, None, "expected_batch_size 20, and it is 10 now"),
        ({}, examples(61), "num_train 60, and it is 61 now"),
    ],
    ids=["examples", "clipping", "batch size", "data set"],
)
def test_what_a_run_keeps_cannot_change(interrupted, changed, dataset, message):
    with pytest.raises(ConfigurationError, match=message):
        resume(interrupted[0], budgeted(5.0, **changed), 5, dataset=dataset)


def test_a_checkpoint_whose_steps_no_ledger_counts_is_refused(lost):
    edited(lost, lambda saved: saved.pop(PRIVATE_RUN))
    with pytest.raises(ConfigurationError, match="has taken 4 steps and its ledger holds 0"):
        resume(lost, privacy(), 4)


def test_a_checkpoint_in_a_folder_of_its_own_has_its_journal(lost, tmp_path):
    (lost / "privacy_runs").rename(tmp_path / "gone")
    run = resume(lost, again := privacy(), 4)
    # Steps five and six are lost and spent.
    assert (again.ledger.num_steps, run.global_step) == (9, 7)
    assert (written(again)["num_steps"], written(again)["lost_steps"]) == (9, 2)


@pytest.mark.parametrize(
    ("lines", "message"), [(None, "unknown how many steps ran"), (3, r"privacy_journal_\w+.jsonl is older than")]
)
def test_a_checkpoint_without_its_whole_journal_is_refused(lost, lines, message):
    (path,) = (lost / "saved").glob("privacy_journal_*")
    if lines is None:
        path.unlink()
    else:
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:lines]))
    with pytest.raises(DataError, match=message):
        resume(lost, privacy(num_train=N), 4)


class Evaluated(Plain):
    def validation_step(self, batch):
        return None


def evaluate(folder, callback, step, module=None):
    run = trainer(folder, callback)
    path = folder / "saved" / f"step={step}.ckpt"
    run.validate(module or Evaluated(), loader(), ckpt_path=path, weights_only=True)
    return run


def test_a_checkpoint_of_another_version_is_refused_with_the_cure(lost):
    edited(lost, lambda saved: saved[PRIVATE_RUN]["statement"].pop("weights"))
    with pytest.raises(DataError, match=r"cannot be read by dp-lightning .*weights.*Resume and export it with the"):
        resume(lost, privacy(), 4)


def test_a_checkpoint_that_is_saved_again_keeps_its_ledger(lost):
    evaluate(lost, privacy(), 4).save_checkpoint(lost / "saved" / "step=again.ckpt")
    went_on = resume(lost, again := privacy(), "again")
    # The weights hold four steps already and two are lost, whatever Lightning counts.
    assert (again.ledger.num_steps, went_on.global_step) == (9, 3)


def test_a_fit_after_the_evaluation_of_a_checkpoint_counts_its_steps_and_those_after_it(lost):
    callback, module = privacy(), Evaluated()
    evaluate(lost, callback, 4, module)
    run = trainer(lost / "another", callback)  # where no other folder has its journal
    run.fit(module, loader())
    assert (callback.ledger.num_steps, run.global_step) == (9, 3)
    assert callback.statement().lost_steps == 2


def test_to_evaluate_an_earlier_checkpoint_takes_back_no_step(tmp_path):
    callback, module = privacy(), Evaluated()
    writer = ModelCheckpoint(tmp_path / "saved", filename="{step}", every_n_train_steps=3, save_top_k=-1)
    run = trainer(tmp_path, callback, writer, enable_checkpointing=True)
    run.fit(module, loader())
    path = tmp_path / "saved" / "step=3.ckpt"
    run.validate(module, loader(), ckpt_path=path, weights_only=True)
    assert callback.ledger.num_steps == 9
    with pytest.raises(BudgetError, match="budget is spent"):
        run.fit(module, loader())
    with pytest.raises(BudgetError, match="cannot forget"):
        run.fit(module, loader(), ckpt_path=path, weights_only=True)


@pytest.mark.timeout(60)
def test_a_run_with_lost_steps_ends_with_its_plan(lost):
    """Lightning's own counter never reaches max_steps; the run has to end without it."""
    run = resume(lost, again := privacy(), 4, max_epochs=-1, max_steps=9)
    assert (again.ledger.num_steps, run.global_step) == (9, 7)


@pytest.mark.parametrize("target", [4.5, 8.0])
def test_another_target_changes_the_noise_of_the_steps_that_are_left(interrupted, target):
    folder, _, sigma = interrupted
    resume(folder, again := budgeted(target), 5)
    (_, _, before), (changed, _, after) = again.ledger.runs
    assert (before, after) == (5, 4)
    assert (changed > sigma) == (target == 4.5)
    # The whole of the new target, and not more.
    assert 0.99 * target < again.ledger.epsilon(delta=1e-3, accountant="rdp") <= target
    assert (written(again)["target_epsilon"], written(again)["release"]) == (target, "ok")


def test_the_same_target_keeps_the_noise(interrupted, monkeypatch):
    folder, _, sigma = interrupted

    def solver_that_rounds_differently(shape, target, **others):
        return shape.with_noise(sigma * 1.0001, target_epsilon=target)

    monkeypatch.setattr("dp_lightning.private_run.settings._calibrated", solver_that_rounds_differently)
    resume(folder, again := budgeted(5.0), 5)
    assert again.ledger.runs == ((sigma, 20 / N, 9),)


def test_fewer_steps_get_less_noise_and_none_left_is_refused(interrupted):
    folder, _, sigma = interrupted
    with pytest.raises(BudgetError, match="num_steps is 3 and 5 are taken"):
        resume(folder, budgeted(5.0), 5, max_epochs=1)
    resume(folder, again := budgeted(5.0), 5, max_epochs=2)
    assert again.ledger.num_steps == 6
    assert again.ledger.runs[1][0] < sigma
    assert 4.95 < again.ledger.epsilon(delta=1e-3, accountant="rdp") <= 5.0


def test_what_kept_a_checkpoint_from_release_keeps_the_run_that_goes_on_from_it(tmp_path):
    class Fails(Plain):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) if self.global_step < 4 else None

    writer = OnExceptionCheckpoint(tmp_path / "saved", filename="step=fault")
    with pytest.raises(ModelError, match="no loss"):
        trainer(tmp_path, privacy(), writer, enable_checkpointing=True).fit(Fails(), loader())
    resume(tmp_path, again := privacy(), "fault")
    assert again.ledger.num_steps == 9
    assert "a step ended by an error (ModelError)" in again.statement().release


# A run whose steps are all taken ends without another one, with its statement


@pytest.mark.parametrize(("saved", "lost", "target"), [(9, 0, None), (4, 1, 5.0)])
def test_a_run_that_died_behind_its_last_step_is_stated(tmp_path, saved, lost, target, capsys):
    def settings():
        return privacy() if target is None else budgeted(target)

    crash(tmp_path, settings(), stopped=9, saved=saved)
    weights = torch.load(tmp_path / "saved" / f"step={9 - lost}.ckpt", weights_only=True)["state_dict"]
    for _ in range(2):  # as often as one likes
        run = resume(tmp_path, callback := settings(), 9 - lost)
        assert "9 steps of the plan are taken: this fit writes the statement" in capsys.readouterr().out
        assert run.global_step == 9 - lost
        assert all(torch.equal(weights[name], value) for name, value in run.lightning_module.state_dict().items())
        found = written(callback)
        assert (found["num_steps"], found["num_steps_planned"], found["lost_steps"]) == (9, 9, lost)
        assert found["release"] == "ok"
        assert [finding for finding in verify(tmp_path, []) if finding[1] is not None] == []


@pytest.mark.parametrize("schedule", [None, Schedule("cosine", 0.5)], ids=str)
def test_ten_resumes_with_correlated_noise_keep_the_target(schedule):
    settings, steps = budgeted(4.0, bands=4, noise_schedule=schedule), 200
    shape = settings.shape_of(800, max_epochs=None, max_steps=steps)
    history, fits, noise = RunHistory(), [7, 11, 1, 20, 33, 2, 3, 45, 6, 30, 42], []
    for taken in fits:
        history.plan, ends = plan_of_fit(settings, shape, history)
        assert not ends
        noise.append(history.plan.noise_multiplier)
        first = history.ledger.num_steps
        for number in range(first, first + taken):
            place = (number - first) % 4
            sigma = history.plan.noise_at(noise[-1], number - place)
            history.ledger.record(noise_multiplier=sigma, sample_rate=0.1, place=place)
        assert history.ledger.epsilon(delta=1e-3, accountant="rdp") <= 4.0
    assert history.ledger.epsilon(delta=1e-3, accountant="rdp") > 3.96
    assert history.ledger.num_steps == sum(fits) == steps
    assert history.ledger.totals.total() == sum(-(-taken // 4) for taken in fits)
    assert noise == sorted(noise)
    assert noise[-1] < 1.3 * noise[0]


def test_a_run_with_correlated_noise_ends_where_the_budget_has_no_further_round():
    settings = budgeted(4.0, bands=4)
    shape, history = settings.shape_of(800, max_epochs=None, max_steps=2000), RunHistory()
    history.plan, _ = plan_of_fit(settings, shape, history)
    for number in range(1989):  # eleven steps before the end, in three rounds more
        history.ledger.record(noise_multiplier=history.plan.noise_multiplier, sample_rate=0.1, place=number % 4)
    with pytest.warns(UserWarning, match="ends after 1989 of 2000 steps"):
        assert plan_of_fit(settings, shape, history) == (history.plan, True)
    with pytest.raises(BudgetError, match="too little is left"):
        plan_of_fit(budgeted(3.9, bands=4), shape, history)


def test_a_longer_run_keeps_the_bands_that_auto_has_chosen():
    settings, history = budgeted(4.0, bands="auto"), RunHistory()
    history.plan, _ = plan_of_fit(settings, settings.shape_of(800, max_epochs=None, max_steps=20), history)
    history.ledger.record(noise_multiplier=history.plan.noise_multiplier, sample_rate=history.plan.sample_rate)
    longer = settings.shape_of(800, max_epochs=None, max_steps=4000)
    assert longer.bands != history.plan.bands
    assert plan_of_fit(settings, longer, history)[0].bands == history.plan.bands


def test_a_run_with_correlated_noise_that_stops_again_and_again_keeps_its_target(tmp_path, capsys):
    """Each fit begins a new round, and no checkpoint has the noise of its steps."""
    callback = budgeted(5.0, bands=3)
    crash(tmp_path, callback, saved=1, stopped=1)
    noise = [callback.plan.noise_multiplier]
    for step in range(1, 7):
        callback = budgeted(5.0, bands=3)
        run = trainer(tmp_path, callback, Stop(step + 1))
        with pytest.raises(RuntimeError, match="stopped"):
            run.fit(Plain(), loader(), ckpt_path=tmp_path / "saved" / f"step={step}.ckpt", weights_only=True)
        run.save_checkpoint(tmp_path / "saved" / f"step={step + 1}.ckpt")
        noise.append(callback.plan.noise_multiplier)
        assert (callback.ledger.num_steps, callback.ledger.totals.total()) == (step + 1, step + 1)
        assert callback.ledger.epsilon(delta=1e-3) <= 5.0
        assert "a round that was cut short counts whole" in capsys.readouterr().out
    assert noise == sorted(noise)
    # Three steps were left when the last round began; of its other two nothing can be paid.
    with pytest.warns(UserWarning, match="ends after 7 of 9 steps"):
        resume(tmp_path, callback := budgeted(5.0, bands=3), 7)
    assert callback.ledger.num_steps == 7
    assert 4.4 < callback.ledger.epsilon(delta=1e-3) <= 5.0
    assert [each for each in verify(tmp_path) if each[1] is not None] == []
    saved = torch.load(tmp_path / "saved" / "step=7.ckpt", weights_only=True)
    assert not saved["private_run"]["step"]
    with pytest.raises(ConfigurationError, match=r"privacy\.bands 3, and it is 1 now"):
        resume(tmp_path, budgeted(5.0), 7)
