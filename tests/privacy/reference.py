"""A float64 loop over single examples: the reference for everything that the gradient engine does."""

import copy

import torch
from clipped_sums import fails
from torch import nn
from torch.nn import functional as F

from dp_lightning.privacy.gradients.recording import Recording
from dp_lightning.privacy.gradients.refusals import explaining


def clipped_sum_by_loop(model, inputs, targets, clip_plan, loss_fn=F.cross_entropy, *, augmult=1):
    """Sums and (B, L) norms in float64, one example of ``augmult`` rows at a time, by ordinary autograd.

    The gradients of the rows are taken one by one and averaged.
    """
    model = copy.deepcopy(model).double()
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = clip_plan.groups(parameters)
    bounds = clip_plan.bounds(groups)
    sums = {name: torch.zeros_like(p) for name, p in parameters.items()}
    norms = []
    for views, labels in zip(inputs.split(augmult), targets.split(augmult), strict=True):
        gradients = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for x, y in zip(views, labels, strict=True):
            loss = loss_fn(model(x[None].double()), y[None])
            for name, gradient in zip(gradients, torch.autograd.grad(loss, list(parameters.values())), strict=True):
                gradients[name] += gradient / augmult
        row = []
        for names, bound in zip(groups.values(), bounds, strict=True):
            norm = torch.sqrt(sum(gradients[name].square().sum() for name in names))
            factor = min(1.0, bound / norm) if clip_plan.factor == "abadi" else bound / (norm + 0.01)
            for name in names:
                sums[name] += factor * gradients[name]
            row.append(norm)
        norms.append(torch.stack(row))
    return sums, torch.stack(norms)


def relative_error(sums, reference):
    """L2 distance of all parameters together over the reference's L2 norm."""
    difference = sum((sums[name].double() - reference[name]).square().sum() for name in reference)
    return float((difference / sum(r.square().sum() for r in reference.values())).sqrt())


def gradients_by_loop(model, loss, *examples):
    """Per-example gradients (b, *shape) by name, None where a parameter is not used; one example after the other.

    ``loss``: from the model and one example's part of each of ``examples`` (b, ...) to a scalar.
    """
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = [
        torch.autograd.grad(loss(model, *example), list(parameters.values()), allow_unused=True)
        for example in zip(*examples, strict=True)
    ]
    columns = zip(*rows, strict=True)
    return {
        name: None if column[0] is None else torch.stack([row.to_dense() for row in column])
        for name, column in zip(parameters, columns, strict=True)
    }


def record(model, loss, *examples, **options):
    """Per-example gradients by name, and the recording."""
    found = {}
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def take(contribution):
        for name, gradients in contribution.formed().gradients.items():
            assert name not in found
            found[name] = gradients

    recording = Recording(trained, len(examples[0]), take, **options)
    with explaining(fails, lambda: "a batch of one example", together=True):
        recording.backward(recording.run(lambda *example: loss(model, *example), *examples))
    return found, recording


def check(model, loss, *examples, rtol=1e-9, **options):
    """The gradients are those of the loop; ``examples``: (b, ...) each."""
    found, recording = record(model, loss, *examples, **options)
    expected = gradients_by_loop(model, lambda model, *example: loss(model, *example), *examples)
    assert set(found) == {name for name, gradients in expected.items() if gradients is not None}
    for name, gradients in found.items():
        torch.testing.assert_close(gradients, expected[name], rtol=rtol, atol=rtol / 1000, msg=name)
    return recording


class Module(nn.Module):
    """With parameters and a forward function that are given."""

    def __init__(self, function, **parameters):
        super().__init__()
        for name, value in parameters.items():
            setattr(self, name, value if isinstance(value, nn.Module) else nn.Parameter(value))
        self.function = function

    def forward(self, *inputs):
        return self.function(self, *inputs)
