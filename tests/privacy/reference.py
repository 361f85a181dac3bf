"""A float64 loop over single examples: the reference for everything that the gradient engine does."""

import copy

import torch
from torch.nn import functional as F


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
