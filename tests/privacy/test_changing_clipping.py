"""Noise multipliers and clipping norms that change over the steps of a run, by a schedule or by a quantile."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.accounting import compose
from dp_lightning.privacy.clipping import AdaptiveClipping, ClipPlan
from dp_lightning.privacy.plan import RunShape
from dp_lightning.privacy.schedules import Schedule
from dp_lightning.privacy.step import PrivateStep

N, B = 1000, 200


def run(*, steps, noise_multiplier=2.0, bands=1, noise_schedule=None, load=None, **clip):
    """A private linear regression at fixed weights, the true sum of halves and C at each step."""
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(N, 10, generator=generator), torch.randn(N, generator=generator))
    model = nn.Linear(10, 1)
    shape = RunShape(
        num_train=N, expected_batch_size=B, num_steps=steps, delta=1e-4, bands=bands, noise_schedule=noise_schedule
    )
    clip_plan = ClipPlan(kind="flat", factor="abadi", **{"max_grad_norm": 1.0, **clip})
    private = PrivateStep(
        model,
        lambda batch: F.mse_loss(model(batch[0])[:, 0], batch[1]),
        data,
        plan=shape.with_noise(noise_multiplier),
        clip_plan=clip_plan,
    )
    private.load_state_dict(load or {})
    halves, norms = [], [private.max_grad_norm]
    for _ in range(steps):
        for batch in private.batches():
            private.accumulate(batch)
        halves.append(private._sum.within.item())
        private.release()
        norms.append(private.max_grad_norm)
    return private, halves, norms


@pytest.mark.parametrize("start", [100.0, 0.01])
def test_c_finds_the_quantile_from_far_away_and_a_resumed_run_goes_on_from_there(start):
    adaptive = AdaptiveClipping(quantile=0.7)
    private, _, _ = run(steps=120, max_grad_norm=start, adaptive=adaptive)
    x, y = private.reader.dataset.tensors
    residuals = private.module(x)[:, 0] - y
    lengths = 2 * residuals.abs() * (x.square().sum(1) + 1).sqrt()
    assert private.max_grad_norm == pytest.approx(lengths.quantile(0.7).item(), rel=0.1)
    assert private.record.ledger.runs == ((2.0, B / N, 120),)
    again, _, norms = run(steps=1, max_grad_norm=start, adaptive=adaptive, load=private.state_dict())
    assert norms[0] == private.max_grad_norm
    assert again.noise_level > 2.0 * norms[0] / B


@pytest.mark.parametrize(("start", "count", "expected"), [(2e-12, B / 2, 1e-12), (9e11, -B / 2, 1e12), (1.0, 0, 1.0)])
def test_c_stays_within_what_a_clipping_norm_may_be(start, count, expected):
    assert AdaptiveClipping(rate=2.0).next_norm(start, count, B) == expected


@pytest.mark.parametrize(("noise_multiplier", "expected_batch_size"), [(1.0, 4096), (2.0, 200), (30.0, 500)])
def test_gradient_and_count_together_are_one_gaussian_mechanism(noise_multiplier, expected_batch_size):
    gradient, count = AdaptiveClipping().noises(noise_multiplier, expected_batch_size)
    assert math.hypot(1 / gradient, 0.5 / count) == pytest.approx(1 / noise_multiplier, rel=1e-12)
    assert noise_multiplier < gradient <= 1.05 * noise_multiplier * (1 + 1e-12)
    assert count >= expected_batch_size / 20


def test_the_count_that_moves_c_has_its_noise():
    steps, adaptive = 400, AdaptiveClipping(rate=0.5)
    _, halves, norms = run(steps=steps, adaptive=adaptive)
    moved = torch.tensor(norms).log().diff()
    noised = B * (adaptive.quantile - moved / adaptive.rate - 0.5)
    noise = noised - torch.tensor(halves)
    _, expected = adaptive.noises(2.0, B)
    assert noise.std().item() == pytest.approx(expected, rel=5 / (2 * steps) ** 0.5)
    assert abs(noise.mean().item()) < 5 * expected / steps**0.5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "per_layer", "adaptive": AdaptiveClipping()}, "adaptive_clipping needs clipping: flat"),
        ({"adaptive": AdaptiveClipping(), "schedule": Schedule("linear", 0.5)}, "and no clip_schedule"),
    ],
)
def test_what_cannot_adapt_is_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        ClipPlan(**{"kind": "flat", "factor": "abadi", "max_grad_norm": 1.0, **settings})
    with pytest.raises(ConfigurationError, match=r"Raise privacy\.expected_batch_size"):
        AdaptiveClipping().noises(2.0, 10)
    with pytest.raises(ConfigurationError, match=r"Raise privacy\.expected_batch_size"):  # of the last steps
        run(steps=10, noise_schedule=Schedule("linear", 50.0), adaptive=AdaptiveClipping())
    with pytest.raises(ConfigurationError, match="quantile between 0 and 1"):
        AdaptiveClipping(quantile=1.0)


@pytest.mark.parametrize(
    ("shape", "middle"), [("linear", 0.625), ("cosine", 0.625), ("exponential", 0.5)], ids=lambda value: str(value)
)
def test_a_schedule_goes_from_one_to_its_final_value_in_few_parts(shape, middle):
    factors = [Schedule(shape, 0.25).factor(step, 160) for step in range(160)]
    assert (factors[0], factors[-1], len(set(factors))) == (1, pytest.approx(0.25), 8)
    assert factors == sorted(factors, reverse=True)
    assert (factors[79] + factors[80]) / 2 == pytest.approx(middle, abs=0.02)


@pytest.mark.parametrize("bands", [1, 3])
def test_noise_and_clipping_follow_their_schedules_and_the_ledger_has_each_round(bands):
    schedule = Schedule("linear", 3.0)
    private, _, norms = run(
        steps=16, bands=bands, noise_schedule=schedule, schedule=Schedule("exponential", 0.1), max_grad_norm=2.0
    )
    assert norms[:-1] == pytest.approx([2.0 * 0.1 ** (step // 2 / 7) for step in range(16)])
    rounds = [(2.0 * schedule.factor(step, 16), bands * B / N, 1) for step in range(0, 16, bands)]
    ledger = private.record.ledger
    assert ledger.num_steps == 16
    assert ledger.epsilon(delta=1e-4) == pytest.approx(compose(rounds, delta=1e-4), rel=1e-9)
    assert ledger.epsilon(delta=1e-4) == private.plan.epsilon()
    assert private.noise_level == pytest.approx(rounds[-1][0] * 0.2 / B)
    assert "noise was changed" not in private.statement().to_markdown()


def test_noise_with_a_schedule_is_solved_for_its_target():
    numbers = {"num_train": N, "expected_batch_size": B, "num_steps": 40, "delta": 1e-4}
    plan = RunShape(**numbers, noise_schedule=Schedule("cosine", 0.5)).calibrate(3.0)
    assert 2.97 < plan.epsilon() <= 3.0
    assert plan.noise_multiplier > RunShape(**numbers).calibrate(3.0).noise_multiplier
    with pytest.raises(ConfigurationError, match="shape 'step'"):
        Schedule("step", 0.5)
    with pytest.raises(ConfigurationError, match=r"between 0\.01 and 100"):
        Schedule("linear", 0.0)
