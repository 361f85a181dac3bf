"""Lower precision and autocast in a private run."""

import copy

import pytest
import torch
from plain_run import CLASSES, Plain, parameters_after, without_noise
from torch import nn
from torch.nn import functional as F

from dp_lightning.errors import ModelError


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x[:, None], x[:, None], x[:, None])[0][:, 0]


@pytest.mark.parametrize(
    ("precision", "middle"),
    [
        ("64-true", nn.Tanh),
        ("bf16-mixed", Attention),
        ("bf16-mixed", lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    ],
    ids=["64", "attention", "weight norm"],
)
def test_precisions_end_near_float32_also_behind_what_autocast_makes_coarse(tmp_path, precision, middle):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), middle(), nn.Linear(8, CLASSES))
    expected = parameters_after(tmp_path, without_noise(), module=Plain(copy.deepcopy(net)))
    found = parameters_after(tmp_path, without_noise(), module=Plain(net), precision=precision)
    # bfloat16 keeps 8 bits.
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=1e-5 if precision == "64-true" else 3e-2)


def test_a_step_that_needs_autocast_trains_with_it_alone(tmp_path):
    class Converts(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0].bfloat16()), batch[1])

    assert parameters_after(tmp_path, without_noise(), module=Converts(), precision="bf16-mixed").isfinite().all()
    with pytest.raises(ModelError, match="same dtype"):
        parameters_after(tmp_path, without_noise(), module=Converts(), precision="32-true")
