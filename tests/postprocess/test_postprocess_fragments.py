"""Every fragment in configs/fragments/postprocess composes with a base configuration and is the method of its name."""

import functools
from pathlib import Path

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch.cli import instantiate_class

from dp_lightning.callbacks import PostProcessCallback, PrivacyCallback

FRAGMENTS = sorted((Path(__file__).parents[2] / "configs" / "fragments" / "postprocess").glob("*.yaml"))

# Optimizer, learning rate, its momentum and the transforms of matrices: Shanmugam et al. 2026, table of method
# hyperparameters.
TABLE = {
    "dp_sgd": ("SGD", 0.3, 0.9, []),
    "dp_adam": ("Adam", 1e-3, None, []),
    "dp_adamw": ("AdamW", 1e-3, None, []),
    "dp_muon": ("SGD", 0.02, 0.0, ["Momentum", "Orthogonalize"]),
    "dp_muon_s": ("SGD", 0.3, 0.0, ["Momentum", "MagnitudeScale"]),
    "disk_sgd": ("SGD", 0.01, 0.0, ["Kalman"]),
    "disk_muon": ("SGD", 0.02, 0.0, ["Kalman", "Momentum", "Orthogonalize"]),
    "doppler_sgd": ("SGD", 3.0, 0.0, ["LowPass"]),
    "doppler_muon": ("SGD", 0.02, 0.0, ["LowPass", "Orthogonalize"]),
}

# The methods that are not the paper's; the learning rate is their own.
OWN = {
    "normalized": ["Momentum", "Normalize"],
    "noise_normalized": ["Momentum", "NoiseNormalize"],
    "gated_muon": ["Momentum", "GatedOrthogonalize", "Normalize"],
    "shrunk": ["Momentum", "SpectralShrinkage", "Normalize"],
    "selective_muon": ["Momentum", "SelectiveOrthogonalize"],
    "disk_full_sgd": ["Kalman"],
}
METHODS = TABLE | {name: ("SGD", None, 0.0, transforms) for name, transforms in OWN.items()}

BASE = """
privacy: {expected_batch_size: 8, noise_multiplier: 1.0}
optimizer:
  class_path: torch.optim.SGD
  init_args: {lr: 1.0, momentum: 0.9}
postprocess:
  transforms: [{class_path: Scale, init_args: {factor: 2.0}}]
"""


@pytest.fixture(scope="session")
def compose(tmp_path_factory):
    """The chain, the optimizer's configuration and the callback of a fragment, as LightningCLI reads them.

    Each fragment is read once. The chain has state, so it is made anew for each test.
    """
    base = tmp_path_factory.mktemp("fragments") / "base.yaml"
    base.write_text(BASE)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--config", action="config")
    parser.add_subclass_arguments(torch.optim.Optimizer, "optimizer", instantiate=False, skip={"params"})
    parser.add_class_arguments(PrivacyCallback, "privacy")
    parser.add_class_arguments(PostProcessCallback, "postprocess")
    read = functools.cache(lambda fragment: parser.parse_args([f"--config={base}", f"--config={fragment}"]))

    def composed(fragment):
        made = parser.instantiate_classes(read(fragment))
        return made.postprocess.chain, read(fragment).optimizer, made.privacy

    return composed


def test_there_is_one_fragment_per_method():
    assert {path.stem for path in FRAGMENTS} == set(METHODS)


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda path: path.stem)
def test_a_fragment_is_the_method_of_its_name(fragment, compose):
    name, lr, momentum, transforms = METHODS[fragment.stem]
    chain, optimizer, _ = compose(fragment)
    assert optimizer.class_path == f"torch.optim.{name}"
    assert optimizer.init_args.get("momentum") == momentum
    assert [type(t).__name__ for t in chain.transforms if t.applies_to != "vectors"] == transforms
    chain.check({"net.weight": torch.Size((4, 5)), "net.bias": torch.Size((4,))}, noise=1.0)
    if lr is not None:
        assert optimizer.init_args.lr == lr
    elif fragment.stem != "disk_full_sgd":
        # The rate of one-dimensional parameters does not depend on that of the matrices.
        scales = [t.factor for t in chain.transforms if type(t).__name__ == "Scale"]
        assert scales == [pytest.approx(1 / optimizer.init_args.lr)]


def test_disk_in_full_has_one_gain(compose):
    chain, _, privacy = compose(FRAGMENTS[0].with_name("disk_full_sgd.yaml"))
    (kalman,) = chain.transforms
    assert kalman.gain == privacy.disk.gain == 0.7


@pytest.mark.parametrize(
    "fragment", [f for f in FRAGMENTS if f.stem in TABLE and "adam" not in f.stem], ids=lambda path: path.stem
)
def test_one_dimensional_parameters_take_the_steps_of_dp_sgd(fragment, compose):
    chain, optimizer_config, _ = compose(fragment)
    bias, reference = (torch.nn.Parameter(torch.zeros(3, dtype=torch.float64)) for _ in range(2))
    optimizer = instantiate_class([bias], optimizer_config.as_dict())
    dp_sgd = torch.optim.SGD([reference], lr=0.3, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        gradient = torch.randn(3, dtype=torch.float64, generator=generator)
        bias.grad, reference.grad = chain({"bias": gradient})["bias"].clone(), gradient.clone()
        optimizer.step()
        dp_sgd.step()
    # Products of the same numbers in another order, in float64.
    torch.testing.assert_close(bias, reference, rtol=0, atol=1e-12)


def test_disk_and_muon_carry_the_numbers_of_the_table(compose):
    chain, _, _ = compose(FRAGMENTS[0].with_name("disk_muon.yaml"))
    kalman, momentum, orthogonalize, *_ = chain.transforms
    assert kalman.process_to_measurement_ratio == 1.5
    assert (momentum.beta, momentum.kind) == (0.95, "ema_nesterov")
    assert (orthogonalize.steps, orthogonalize.coefficients, orthogonalize.scale_cap) == (5, "muon", 4.0)
