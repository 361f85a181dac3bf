"""What noise-aware transforms decide on a device is what they decide on a CPU, and no transform reads the device."""

import pytest
import torch

from dp_lightning.postprocess import (
    Chain,
    GatedOrthogonalize,
    Kalman,
    LowPass,
    MagnitudeScale,
    Momentum,
    NoiseNormalize,
    Normalize,
    Orthogonalize,
    Scale,
    SelectiveOrthogonalize,
    SpectralShrinkage,
    denoise,
)

DECIDING = {
    "selective": lambda: SelectiveOrthogonalize(),
    "selective, recovery": lambda: SelectiveOrthogonalize(threshold="recovery"),
    "gated": lambda: GatedOrthogonalize(),
    "shrinkage": lambda: SpectralShrinkage(),
    "shrinkage with a fallback": lambda: SpectralShrinkage(fallback=Normalize(norm=1.0)),
}
OTHERS = {
    "orthogonalize": lambda: Orthogonalize(),
    "magnitude": lambda: MagnitudeScale(Orthogonalize()),
    "momentum": lambda: Momentum(),
    "low pass": lambda: LowPass(),
    "Kalman": lambda: Kalman(gain=0.5),
    "noise norm": lambda: NoiseNormalize(),
    "norm": lambda: Normalize(norm=1.0),
    "scale": lambda: Scale(2.0),
}


def gradients():
    """Matrices with a strong signal, with a weak one and of noise alone, and a vector."""
    torch.manual_seed(0)
    noise = {"strong": torch.randn(16, 24), "weak": torch.randn(16, 24), "noise": torch.randn(16, 24)}
    direction = torch.outer(torch.randn(16), torch.randn(24))
    noise["strong"] += 5 * direction
    noise["weak"] += 0.3 * direction
    return noise | {"image": torch.randn(8, 4, 3, 3), "bias": torch.randn(16)}


@pytest.mark.parametrize("name", DECIDING)
def test_a_device_decides_as_a_cpu_does(monkeypatch, name):
    here = Chain([DECIDING[name]()])(gradients(), noise=1.0)
    monkeypatch.setattr(denoise, "read_at_once", lambda device: False)
    there = Chain([DECIDING[name]()])(gradients(), noise=1.0)
    assert here.keys() == there.keys()
    for key, value in here.items():
        torch.testing.assert_close(there[key], value)


@pytest.mark.parametrize("name", [*DECIDING, *OTHERS])
def test_no_transform_reads_the_device(name):
    """Tensors without memory raise where a number is read."""
    chain = Chain([(DECIDING | OTHERS)[name]()])
    for _ in range(2):
        found = chain({key: value.to("meta") for key, value in gradients().items()}, noise=1.0)
    assert all(value.device.type == "meta" for value in found.values())
