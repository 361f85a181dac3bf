"""What a user reads where the loss fails: the line, the reason, and what the step sees; in both modes."""

import pytest
import torch
import torchmetrics
from small_steps import plan_of, released
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from dp_lightning.errors import ModelError
from dp_lightning.privacy import PrivateStep
from dp_lightning.privacy.gradients.refusals import ONE_BY_ONE

N = 4
MODES = ["together", "one_by_one"]


class Head(nn.Module):
    """A layer, and a loss that is given."""

    def __init__(self, loss_of):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.loss_of = nn.Linear(5, 3), loss_of
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, batch):
        return self.loss_of(self, *batch)


def step_of(loss_of, mode="together", labels=(0, 1, 2, 1)):
    model = Head(loss_of)
    data = TensorDataset(torch.arange(N * 5.0).view(N, 5).sin(), torch.tensor(labels))
    return PrivateStep(model, model, data, plan=plan_of(N), examples=mode)


def told_of(loss_of, mode="together", **options):
    """The message of the error that a loss gives."""
    with pytest.raises(ModelError) as caught:
        released(step_of(loss_of, mode, **options))
    return str(caught.value)


def squeezed(m, x, y):
    return F.cross_entropy(m.layer(x).squeeze(), y)


def fixed_size(m, x, y):
    return F.cross_entropy(m.layer(x).view(2, -1), y)


def asserted(m, x, y):
    assert len(x) > 1
    return F.cross_entropy(m.layer(x), y)


def statistics(m, x, y):
    return F.batch_norm(m.layer(x), None, None, training=True).square().sum()


def own_check(m, x, y):
    if x.shape[0] < 2:
        raise ValueError("at least two samples are needed")
    return F.cross_entropy(m.layer(x), y)


def metric(m, x, y):
    return torchmetrics.functional.r2_score(m.layer(x)[:, 0], y.double())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_of", [squeezed, fixed_size, asserted, statistics, own_check, metric])
def test_code_that_needs_more_rows_is_told_its_line_and_what_the_step_sees(loss_of, mode):
    told = told_of(loss_of, mode)
    assert told.startswith("Backward pass" if (loss_of, mode) == (squeezed, "one_by_one") else __file__)
    assert "The step sees a batch of one example, of shape (1, 5), (1,)." in told
    assert told.endswith("The same code runs on two examples: let it take a single one.")
    assert ONE_BY_ONE not in told


def of_pairs(m, x, y):
    """A constant where the batch has no pair."""
    z = m.layer(x)
    return sum((z[i] - z[j]).square().sum() for i in range(len(z)) for j in range(i)) + torch.zeros(())


@pytest.mark.parametrize("mode", MODES)
def test_a_loss_of_pairs_depends_on_no_parameter_where_there_is_no_pair(mode):
    told = told_of(of_pairs, mode)
    assert "does not depend on any trained parameter" in told
    assert told.endswith("runs on two examples: let it take a single one.")
    assert "two examples" not in told_of(lambda m, x, y: m.layer(x).detach().sum(), mode)


def wrong_shape(m, x, y):
    return F.cross_entropy(m.layer(x.mT), y)


def no_attribute(m, x, y):
    return m.head(x).sum()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss_of", [wrong_shape, no_attribute])
def test_a_mistake_that_two_rows_share_is_told_its_line_alone(loss_of, mode):
    told = told_of(loss_of, mode)
    assert told.startswith(__file__)
    assert "Error: " in told
    assert told.endswith("of shape (1, 5), (1,).)")


@pytest.mark.parametrize("mode", MODES)
def test_an_example_that_fails_is_not_taken_for_code_that_needs_two_rows(mode):
    told = told_of(lambda m, x, y: F.cross_entropy(m.layer(x), y), mode, labels=(0, 1, 7, 1))
    assert "7 is out of bounds" in told
    assert "two examples" not in told


def read_and_squeezed(m, x, y):
    return squeezed(m, x, y) if x.sum() > 0 else squeezed(m, -x, y)


def backward_in_the_step(m, x, y):
    loss = F.cross_entropy(m.layer(x), y)
    torch.autograd.backward(loss)
    return loss


@pytest.mark.parametrize("loss_of", [read_and_squeezed, backward_in_the_step])
def test_one_by_one_is_offered_only_where_the_loss_of_one_example_runs(loss_of):
    assert ONE_BY_ONE not in told_of(loss_of)
    step = step_of(loss_of)
    with pytest.raises(ModelError):
        released(step)
    assert all(parameter.grad is None for parameter in step.parameters.values())


def test_what_is_tried_for_the_words_of_an_error_leaves_nothing():
    def loss_of(m, x, y):
        scale = float(x.sum())
        with torch.no_grad():
            m.calls += scale
            m.layer.bias += scale
        torch.autograd.backward(m.layer(x).sum())
        return F.cross_entropy(m.layer(x), y)

    step = step_of(loss_of)
    for parameter in step.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in step.module.state_dict().items()}
    with pytest.raises(ModelError, match=r"numbers of an example are read.*one_by_one"):
        released(step)
    for name, value in step.module.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(bool((parameter.grad == 1).all()) for parameter in step.parameters.values())
