"""Learning-rate schedules are tried for the length of the run before its first step."""

import functools
import re
import warnings

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_run import Plain, loader, privacy, trainer
from torch.optim import lr_scheduler as schedules

from dp_lightning.errors import ConfigurationError
from dp_lightning.lightning_modules.schedules import WarmupCosine

RATE, T = 0.5, 9  # three epochs of three steps


class Scheduled(Plain):
    """A module with a schedule; counts the rates that its steps use."""

    def __init__(self, make, **config):
        super().__init__()
        self.make, self.config, self.rates = make, {"interval": "step", **config}, []

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=RATE, momentum=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.make(optimizer), **self.config}}

    def on_before_optimizer_step(self, optimizer):
        self.rates.append(optimizer.param_groups[0]["lr"])


def one_cycle(steps, **config):
    return lambda: Scheduled(lambda optimizer: schedules.OneCycleLR(optimizer, RATE, total_steps=steps), **config)


def factors(factor, **config):
    return lambda: Scheduled(lambda optimizer: schedules.LambdaLR(optimizer, factor), **config)


def of(kind, *args, **config):
    given = {name: config.pop(name) for name in list(config) if name not in ("interval", "frequency")}
    return lambda: Scheduled(lambda optimizer: kind(optimizer, *args, **given), **config)


def warm_then_cosine(steps):
    def make(optimizer):
        parts = [schedules.LinearLR(optimizer, 0.1, total_iters=3), schedules.CosineAnnealingLR(optimizer, steps - 3)]
        return schedules.SequentialLR(optimizer, parts, [3])

    return lambda: Scheduled(make)


TOO_SHORT = {
    "one cycle": (one_cycle(8), r"its step 9 times, and call 9 raises ValueError: Tried to step 9 times"),
    "one cycle of epochs": (one_cycle(2, interval="epoch"), "its step 3 times, and call 3 raises ValueError"),
    "every second step": (one_cycle(2, frequency=2), "its step 3 times, and call 3 raises ValueError"),
    "a list of factors": (factors([1.0, 0.5, 0.2, 0.1].__getitem__), "its step 9 times, and call 4 raises IndexError"),
}
FAR = {
    "one cycle": one_cycle(16 * T),
    "one cycle of another data set": one_cycle(1400),
    "one cycle by epochs, with a length in steps": one_cycle(T, interval="epoch"),
    "cosine": of(schedules.CosineAnnealingLR, 16 * T),
    "a long cosine": of(schedules.CosineAnnealingLR, 1000),
    "warm-up": of(schedules.LinearLR, 0.01, total_iters=5 * T),
    "warm-up and cosine": warm_then_cosine(6 * T),
    "linear to 0 too soon": factors(lambda step: max(0.0, 1 - step / 4)),
}
RIGHT = {
    "one cycle": one_cycle(T),
    "one cycle of epochs": one_cycle(3, interval="epoch"),
    "every second step": one_cycle(3, frequency=2),
    "cosine": of(schedules.CosineAnnealingLR, T),
    "cosine, not to 0": of(schedules.CosineAnnealingLR, 8 * T, eta_min=0.48),
    "linear": factors(lambda step: 1 - step / T),
    "steps": of(schedules.StepLR, 2, gamma=0.7),
    "exponential": of(schedules.ExponentialLR, 0.8),
    "cyclic": of(schedules.CyclicLR, 0.01, RATE, step_size_up=100),
    "warm restarts": of(schedules.CosineAnnealingWarmRestarts, 50),
    "warm-up and cosine": warm_then_cosine(T),
    "warm-up cosine": of(WarmupCosine, num_steps=T),
}


@pytest.mark.parametrize("name", TOO_SHORT)
def test_one_that_is_too_short_is_an_error_before_anything_is_spent(name, tmp_path):
    make, message = TOO_SHORT[name]
    callback = privacy()
    with pytest.raises(ConfigurationError, match=rf"is too short: .*{message}.*estimated_stepping_batches"):
        trainer(tmp_path, callback).fit(make(), loader())
    assert callback.ledger.num_steps == 0


@pytest.mark.parametrize("name", FAR)
def test_one_that_ends_far_from_the_runs_end_is_named(name, tmp_path):
    by_epoch = '.*needs "interval": "step"' if "by epochs" in name else ""
    said = rf"The schedule \w+ is not as long as the run, which calls its step \d times{by_epoch}"
    with pytest.warns(UserWarning, match=said):
        trainer(tmp_path, privacy()).fit(FAR[name](), loader())


@pytest.mark.parametrize("name", RIGHT)
def test_one_of_the_runs_length_or_without_an_end_is_not(name, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(tmp_path, privacy()).fit(RIGHT[name](), loader())
    assert not [each for each in caught if "The schedule" in str(each.message)]


@pytest.mark.parametrize("name", ["one cycle", "warm-up and cosine", "linear"])
def test_the_trial_leaves_no_trace(name, tmp_path, monkeypatch):
    def rates():
        module = RIGHT[name]()
        trainer(tmp_path, privacy()).fit(module, loader())
        return module.rates

    tried = rates()
    monkeypatch.setattr("dp_lightning.private_run.run.try_schedules", lambda *args: None)
    assert len(tried) == T
    assert tried == rates()


def test_a_run_that_resumes_tries_the_steps_that_are_left(tmp_path):
    saved = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=3, save_last=True)
    trainer(tmp_path, privacy(), saved, enable_checkpointing=True, max_epochs=2).fit(one_cycle(6)(), loader())
    path = str(tmp_path / "checkpoints" / "last.ckpt")
    callback = privacy()
    # The checkpoint brings the length of its own schedule back.
    with pytest.raises(ConfigurationError, match="calls its step 3 times, and call 1 raises ValueError: Tried to step"):
        trainer(tmp_path, callback).fit(one_cycle(T)(), loader(), ckpt_path=path)
    assert callback.ledger.num_steps == 6


def test_one_that_cannot_be_copied_or_that_the_module_steps_is_left_to_the_run(tmp_path):
    class Own(Scheduled):
        def lr_scheduler_step(self, scheduler, metric):
            pass

    trainer(tmp_path, privacy()).fit(Own(functools.partial(schedules.OneCycleLR, max_lr=RATE, total_steps=3)), loader())

    class Locked(schedules.ExponentialLR):
        def __init__(self, optimizer):
            super().__init__(optimizer, 0.9)
            self.lock = re.finditer("", "")

    trainer(tmp_path, privacy()).fit(Scheduled(Locked), loader())
