"""Order, refusals and state of a chain."""

import pytest
import torch

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess import Chain, Kalman, LowPass, MagnitudeScale, Momentum, Orthogonalize, Scale


def test_transforms_act_in_the_given_order():
    matrix = torch.tensor([[3.0, 0.0], [0.0, 1.0]])
    scaled_last = Chain([Orthogonalize(), Scale(10.0)])({"w": matrix})["w"]
    scaled_first = Chain([Scale(10.0), Orthogonalize()])({"w": matrix})["w"]
    # Orthogonalization forgets a scale before it; float32 rounding.
    torch.testing.assert_close(scaled_last, 10 * scaled_first, rtol=1e-5, atol=1e-5)


def test_a_state_dict_is_a_snapshot():
    chain = Chain([Momentum()])
    chain({"w": torch.ones(2, 2)})
    snapshot = chain.state_dict()
    chain({"w": torch.ones(2, 2)})
    ((_, state),) = snapshot["transforms"].items()
    assert torch.equal(state["w"]["momentum"], torch.ones(2, 2))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (Momentum(0.9), Kalman(gain=0.7)),
        (Kalman(gain=0.7), Kalman(process_to_measurement_ratio=1.5)),
        (LowPass(), LowPass(bias_correction=True)),
        (Momentum(0.9), Momentum(0.9, kind="ema_nesterov")),
        (Momentum(0.9), Momentum(0.9, exclude=["head.*"])),
        (MagnitudeScale(Momentum(0.9)), MagnitudeScale(Momentum(0.8))),
    ],
)
def test_a_state_under_other_settings_is_refused(before, after):
    saved = Chain([before])
    saved({"w": torch.ones(2, 2)})
    with pytest.raises(ConfigurationError, match="resume with the transforms"):
        Chain([after]).load_state_dict(saved.state_dict())


def test_settings_of_a_transform_without_memory_may_change():
    saved = Chain([Momentum(0.9), Scale(2.0)])
    saved({"w": torch.ones(2, 2)})
    Chain([Momentum(0.9), Scale(3.0)]).load_state_dict(saved.state_dict())
