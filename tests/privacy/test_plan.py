"""The plan reproduces the paper's two tables of noise; calibration never exceeds its target."""

import dataclasses
import math

import pytest

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.accounting import compose
from dp_lightning.privacy.plan import PrivacyPlan, RunShape

BATCH_SIZES = (256, 512, 1024, 2048, 4096, 8192)
# Noise multipliers of tab:privacy_params: epsilon 4, delta 1e-5, 50 epochs, by number of training examples.
PRIVACY_PARAMS = {
    50_000: (0.85, 1.04, 1.32, 1.74, 2.35, 3.25),  # CIFAR-10 and CIFAR-100
    73_257: (0.77, 0.92, 1.15, 1.48, 1.99, 2.71),  # SVHN
    100_000: (0.72, 0.85, 1.04, 1.32, 1.74, 2.35),  # Tiny-ImageNet
}
# tab:snr: batch size, noise multiplier, norm of the noise.
SNR = ((256, 0.88, 5.71), (512, 1.08, 3.50), (1024, 1.38, 2.23), (2048, 1.83, 1.48), (4096, 2.49, 1.01))
WRN_16_4_PARAMETERS = 2_748_890

SETTINGS = {"num_train": 50_000, "expected_batch_size": 512, "num_steps": 1000, "delta": 1e-5}
PLAN = PrivacyPlan(**SETTINGS, noise_multiplier=1.0)


@pytest.mark.parametrize(
    ("num_train", "batch_size", "published"),
    [(n, b, sigma) for n, row in PRIVACY_PARAMS.items() for b, sigma in zip(BATCH_SIZES, row, strict=True)],
)
def test_table_of_privacy_parameters_is_prv(num_train: int, batch_size: int, published: float) -> None:
    """Epsilon 4 needs the published noise, to 0.01, with q = B/N and T = floor(50 N/B)."""

    def spent(sigma: float) -> float:
        return compose([(sigma, batch_size / num_train, 50 * num_train // batch_size)], delta=1e-5)

    assert spent(published + 0.01) <= 4 < spent(published - 0.01)


@pytest.mark.parametrize(("batch_size", "sigma", "noise_norm"), SNR)
def test_table_of_signal_to_noise_is_rdp(batch_size: int, sigma: float, noise_norm: float) -> None:
    plan = RunShape(
        delta=1e-5, num_train=50_000, expected_batch_size=batch_size, num_steps=50 * (50_000 // batch_size)
    ).calibrate(4.0, accountant="rdp")
    assert plan.noise_multiplier == pytest.approx(sigma, abs=0.01)
    # The table rounds the norm to 0.01 after an unrounded sigma.
    norm = plan.noise_level(sensitivity=1.0) * math.sqrt(WRN_16_4_PARAMETERS)
    assert norm == pytest.approx(noise_norm, abs=0.012)


@pytest.mark.parametrize(
    ("limits", "num_steps"),
    [
        ({"max_epochs": 3}, 3 * 98),  # round(50,000 / 512) = round(97.66)
        ({"max_epochs": 3, "max_steps": 100}, 100),
        ({"max_epochs": -1, "max_steps": 4882}, 4882),
        ({"max_epochs": None, "max_steps": 5}, 5),
        ({"max_epochs": 3, "limit_train_batches": 10}, 30),
        ({"max_epochs": 3, "limit_train_batches": 1000}, 3 * 98),
        ({"max_epochs": 3, "limit_train_batches": 0.5}, 3 * 49),
    ],
)
def test_steps_are_those_of_the_limits_of_a_trainer(limits: dict, num_steps: int) -> None:
    assert RunShape.of_length(num_train=50_000, expected_batch_size=512, delta=1e-5, **limits).num_steps == num_steps


@pytest.mark.parametrize(
    "limits",
    [{"max_epochs": -1}, {"max_epochs": None}, {"max_epochs": 0}, {"max_epochs": 1, "limit_train_batches": 0.001}],
)
def test_a_run_without_a_number_of_steps_or_without_a_step_is_refused(limits: dict) -> None:
    with pytest.raises(ConfigurationError, match=r"trainer\.max_epochs"):
        RunShape.of_length(num_train=50_000, expected_batch_size=512, delta=1e-5, **limits)


@pytest.mark.parametrize(
    ("accountant", "target", "batch_size", "num_steps"),
    [
        ("prv", 1.0, 50_000, 1),
        ("prv", 8.0, 1024, 100),
        ("rdp", 0.1, 256, 500),
        ("rdp", 60.0, 64, 100),
        ("pld", 1.0, 50_000, 1),
    ],
)
def test_calibration_meets_its_target_and_barely(
    accountant: str, target: float, batch_size: int, num_steps: int
) -> None:
    plan = RunShape(delta=1e-5, num_train=50_000, expected_batch_size=batch_size, num_steps=num_steps).calibrate(
        target, accountant=accountant
    )
    assert plan.epsilon() <= target
    assert plan.target_epsilon == target
    less_noise = dataclasses.replace(plan, noise_multiplier=plan.noise_multiplier * (1 - 2e-4))
    assert less_noise.epsilon() > target


def test_calibration_names_a_target_out_of_reach() -> None:
    with pytest.raises(ConfigurationError, match="target_epsilon = 1e-06 cannot be reached"):
        RunShape(**SETTINGS).calibrate(1e-6, accountant="rdp")


@pytest.mark.parametrize("target", [0.0, math.inf, math.nan, "4"])
def test_calibration_refuses_a_target_that_is_not_positive_and_finite(target: object) -> None:
    with pytest.raises(ConfigurationError, match="target_epsilon"):
        RunShape(**SETTINGS).calibrate(target)


def test_sample_rate_is_the_quotient_for_every_batch_size() -> None:
    """Opacus takes one over the loader's length instead: 4096 of 50,000 becomes 3846 or 4166."""
    for batch_size in range(1, 50_001, 97):
        plan = dataclasses.replace(PLAN, expected_batch_size=batch_size)
        assert plan.sample_rate == batch_size / 50_000
        assert plan.sample_rate * 50_000 == pytest.approx(batch_size, rel=1e-15)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"delta": 1.0}, "delta"),
        ({"delta": 2e-5}, r"delta must be below 1/num_train = 2e-05"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"expected_batch_size": 50_001}, "expected_batch_size must be at most num_train = 50000"),
        ({"expected_batch_size": 512.0}, "expected_batch_size"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": True}, "num_steps"),
        ({"num_train": 0}, r"The training set is empty \(num_train is 0\)"),
        ({"noise_multiplier": -0.1}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"accountant": "gdp"}, "accountant"),
        ({"target_epsilon": 0.0}, "target_epsilon"),
    ],
)
def test_settings_that_break_the_guarantee_are_refused(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        dataclasses.replace(PLAN, **wrong)
