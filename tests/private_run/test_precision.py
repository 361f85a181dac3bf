"""Lower precision and autocast in a private run."""

import copy

import pytest
import torch
from plain_run import CLASSES, Plain, examples, parameters_after, without_noise
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset


@pytest.mark.parametrize("precision", ["bf16-mixed", "64-true"])
def test_allowed_precisions_train(tmp_path, precision):
    found = parameters_after(tmp_path, without_noise(), precision=precision)
    expected = parameters_after(tmp_path, without_noise())
    # bfloat16 keeps 8 bits.
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=2e-2 if precision == "bf16-mixed" else 1e-5)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.inner(x[:, None], x[:, None], x[:, None])[0][:, 0]


@pytest.mark.parametrize(
    "middle", [nn.PReLU, Attention, lambda: nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))]
)
def test_modules_without_a_rule_train_behind_what_autocast_makes_coarse(tmp_path, middle):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(5, 8), middle(), nn.Linear(8, CLASSES))
    found = parameters_after(tmp_path, without_noise(), module=Plain(copy.deepcopy(net)), precision="bf16-mixed")
    expected = parameters_after(tmp_path, without_noise(), module=Plain(net))
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_that_converts_its_inputs_to_float32_trains(tmp_path, precision):
    class Bytes(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0].float() / 255), batch[1])

    x, y = examples().tensors
    data = TensorDataset((x * 50).clamp(0, 255).to(torch.uint8), y)
    assert (
        parameters_after(tmp_path, without_noise(), module=Bytes(), dataset=data, precision=precision).isfinite().all()
    )
    assert parameters_after(tmp_path, without_noise(), module=Bytes(), precision=precision).isfinite().all()


def test_a_step_that_needs_autocast_trains_with_it_alone(tmp_path):
    class Converts(Plain):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0].bfloat16()), batch[1])

    found = parameters_after(tmp_path, without_noise(), module=Converts(), precision="bf16-mixed")
    expected = parameters_after(tmp_path, without_noise())
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
    with pytest.raises(RuntimeError, match="same dtype"):
        parameters_after(tmp_path, without_noise(), module=Converts(), precision="32-true")
