"""Losses that are functions of a batch: each example gets the function of itself alone."""

import pytest
import torch
from harness import HARMLESS, Attack, Cases, check
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset, default_collate

CASES = Cases(drawn=True)


@CASES.expect(HARMLESS, HARMLESS)
class Plain(Attack):
    """No attack: the ratio of an outlier is one."""


@CASES.expect(HARMLESS, None)
class WeightedMean(Attack):
    def training_step(self, x, y):
        weight = torch.tensor([1.0, 10.0, 100.0])[y] + x[:, 0].abs()
        return (weight * F.cross_entropy(self.net(x), y, reduction="none")).sum() / weight.sum()


@CASES.expect(HARMLESS, None)
class ClassWeights(Attack):
    def training_step(self, x, y):
        return F.cross_entropy(self.net(x), y, weight=torch.tensor([1.0, 10.0, 100.0]))


@CASES.expect(HARMLESS, None)
class ClassWeightsOfTheBatch(Attack):
    def training_step(self, x, y):
        counts = F.one_hot(y, 3).sum(0)
        return F.cross_entropy(self.net(x), y, weight=len(y) / (3.0 * counts + 1))


@CASES.expect(HARMLESS, HARMLESS)
class MaskedMean(Attack):
    """The marker is the outlier's."""

    def training_step(self, x, y):
        mask = 1.0 - (x[:, 0].abs() > 5).float()
        return (mask * F.cross_entropy(self.net(x), y, reduction="none")).sum() / mask.sum().clamp(min=1)


@CASES.expect("shape of a result depends", HARMLESS)
class BooleanMask(Attack):
    def training_step(self, x, y):
        keep = x[:, 0] < 100
        return F.cross_entropy(self.net(x)[keep], y[keep])


@CASES.expect(HARMLESS, None)
class AreaUnderTheCurve(Attack):
    """Pairs of a positive and a negative row."""

    def training_step(self, x, y):
        score = self.net(x)[:, 0]
        pairs = ((y == 0).unsqueeze(1) & (y != 0).unsqueeze(0)).float()
        return (pairs * F.softplus(score.unsqueeze(0) - score.unsqueeze(1))).sum() + score.square().mean()


@CASES.expect(HARMLESS, None)
class CoxPartialLikelihood(Attack):
    def training_step(self, x, y):
        order = x[:, 0].argsort(descending=True)
        risk = self.net(x)[order, 0]
        event = (y[order] != 1).float()
        return -((risk - risk.logcumsumexp(0)) * event).sum() + risk.square().sum()


@CASES.expect(HARMLESS, None)
class InBatchNegatives(Attack):
    def training_step(self, x, y):
        z = F.normalize(self.net(x), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(z))) + z.sum()


@CASES.expect(HARMLESS, None)
class ThresholdByWhere(Attack):
    def training_step(self, x, y):
        loss = super().training_step(x, y)
        return torch.where(loss > 3, 0.01 * loss, loss)


@CASES.expect("numbers of an example are read", HARMLESS)
class ThresholdByIf(Attack):
    def training_step(self, x, y):
        loss = super().training_step(x, y)
        return 0.01 * loss if loss > 3 else loss


@CASES.expect(HARMLESS, None)
class HardExamplesOnly(Attack):
    def training_step(self, x, y):
        loss = F.cross_entropy(self.net(x), y, reduction="none")
        return loss.topk(max(1, len(loss) // 2)).values.mean()


@CASES.expect(HARMLESS, None)
class LoadBalancing(Attack):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(5, 4)

    def training_step(self, x, y):
        load = self.router(x).softmax(1).mean(0)
        return super().training_step(x, y) + 4 * load.square().sum()


@CASES.expect(HARMLESS, None)
class ExpertCapacity(Attack):
    """Each expert takes its two best rows."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(5, 3) for _ in range(2)])

    def training_step(self, x, y):
        out = self.net(x)
        for expert in self.experts:
            best = x[:, 0].topk(min(2, len(x))).indices
            out = out.index_add(0, best, expert(x[best]))
        return F.cross_entropy(out, y)


@CASES.expect(HARMLESS, HARMLESS)
class VariancePenalty(Attack):
    def training_step(self, x, y):
        return super().training_step(x, y) + x.square().mean() * self.net(x).var(0, unbiased=False).sum()


@CASES.expect(HARMLESS, None)
class SortedRows(Attack):
    def training_step(self, x, y):
        h = self.net[1](self.net[0](x)).sort(0).values
        return F.cross_entropy(self.net[2](h), y)


@CASES.expect(HARMLESS, None)
class RolledRows(Attack):
    def training_step(self, x, y):
        return F.cross_entropy(self.net(x + x.roll(1, 0)), y)


@CASES.expect(HARMLESS, None)
class NormalizedByTheBatch(Attack):
    def training_step(self, x, y):
        return F.cross_entropy(self.net((x - x.mean(0)) / (x.std(0, unbiased=False) + 1)), y)


@CASES.expect(HARMLESS, None)
class FunctionalBatchNorm(Attack):
    def training_step(self, x, y):
        return F.cross_entropy(
            self.net(F.batch_norm(x.unsqueeze(-1).expand(-1, -1, 2), None, None, training=True)[..., 0]), y
        )


@CASES.expect("BatchNorm", "BatchNorm")
class BatchNorm(Attack):
    def __init__(self):
        super().__init__()
        self.net.insert(1, nn.BatchNorm1d(6))


@CASES.expect(None, "running_var")
class BatchNormOverPositions(Attack):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def training_step(self, x, y):
        return super().training_step(self.norm(x.unsqueeze(-1).expand(-1, -1, 2))[..., 0], y)


@CASES.expect(HARMLESS, None)
class Padding(Attack):
    """Collation pads to the longest of the batch, and pooling looks at the padding."""

    @staticmethod
    def dataset(x, y):
        return [(row.repeat(2), label) for row, label in zip(x, y, strict=True)]

    def collate_fn(self, examples):
        rows = nn.utils.rnn.pad_sequence([row for row, _ in examples], batch_first=True)
        return rows, torch.stack([label for _, label in examples])

    def training_step(self, x, y):
        return F.cross_entropy(self.net(x.unflatten(1, (-1, 5)).mean(1)), y)


@CASES.expect("different shapes", "different shapes")
class RaggedPadding(Padding):
    """One example is longer."""

    @staticmethod
    def dataset(x, y):
        return [(row.repeat(2 + int(row.norm() > 20)), label) for row, label in zip(x, y, strict=True)]


@CASES.expect(HARMLESS, HARMLESS)
class DropsUnreadableExamples(Attack):
    """Collation leaves nothing of the outlier."""

    def collate_fn(self, examples):
        readable = [example for example in examples if example[0].norm() < 20]
        return default_collate(readable) if readable else None


@CASES.expect(HARMLESS, HARMLESS)
class NotFinite(Attack):
    """The outlier's gradient is nan, also where others are multiplied by zero."""

    @staticmethod
    def dataset(x, y):
        return TensorDataset(torch.where(x.norm(dim=1, keepdim=True) > 20, torch.nan, x), y)


@CASES.expect(HARMLESS, None)
class NotFiniteInCopies(NotFinite):
    """The same where parameters go in as copies, and where weights are computed."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))

    def training_step(self, x, y):
        weight = self.net[0].weight / self.net[0].weight.norm()
        return F.cross_entropy(self.net[2](F.linear(x * self.scale, weight)), y)


@CASES.expect(HARMLESS, None)
class Overflow(Attack):
    """Squares of the outlier's gradient are above all floats."""

    def training_step(self, x, y):
        return super().training_step(x, y) * torch.where(x.norm() > 20, 1e30, 1.0)


@CASES.expect(HARMLESS, None)
class HugeSum(Attack):
    def training_step(self, x, y):
        return super().training_step(x * torch.where(x.norm() > 20, 1e18, 1.0), y)


@CASES.expect(HARMLESS, HARMLESS)
class InPlaceOnInputs(Attack):
    def training_step(self, x, y):
        x.mul_(0.5).add_(1)
        return super().training_step(x, y)


@CASES.expect(HARMLESS, None)
class Reshaped(Attack):
    """Views that would reach the rows beside it, were there any."""

    def training_step(self, x, y):
        return super().training_step(x.flatten().view(-1, 5), y.reshape(-1)) + self.net(x.T.T).std(unbiased=False)


@CASES.expect(HARMLESS, None)
class GatheredOverRanks(Attack):
    """all_gather is what a loss with negatives calls; one rank has nothing to gather."""

    def training_step(self, x, y):
        z = self.net(x)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            z = torch.cat(torch.distributed.nn.all_gather(z))
        return F.cross_entropy(z, y)


HOLES: set[str] = set()


@pytest.mark.parametrize("case", CASES.parameters(HOLES))
def test_each_example_gets_the_function_of_itself(case):
    check(case)
