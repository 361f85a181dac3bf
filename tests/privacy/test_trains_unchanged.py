"""Ordinary training code that a private run takes as it is, each against a loop over single examples."""

import copy

import pytest
import torch
from small_steps import plan_of, released
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from dp_lightning.errors import ModelError
from dp_lightning.privacy import ClipPlan, PrivateStep

N = 6


class Net(nn.Module):
    """A module whose ``loss`` is its training step."""


class Encoder(Net):
    """torch's own, with its default dropout."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True), 2)
        self.head = nn.Linear(8, 3)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.head(self.encoder(x).mean(1)), y)


class Bert(Net):
    """Hugging Face's, with a mask and default dropout."""

    def __init__(self, dropout=0.1, dims=4):
        from transformers import BertConfig, BertForSequenceClassification

        super().__init__()
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        rates = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
        config = BertConfig(vocab_size=30, max_position_embeddings=16, num_labels=3, **sizes, **rates)
        self.bert, self.dims = BertForSequenceClassification(config), dims

    def loss(self, batch):
        tokens, mask, labels = batch
        mask = mask[:, None, None, :].bool() if self.dims == 4 else mask
        return self.bert(input_ids=tokens, attention_mask=mask, labels=labels).loss


class Recurrent(Net):
    def __init__(self, dropout=0.2):
        super().__init__()
        self.lstm = nn.LSTM(5, 6, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(6, 3)

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.head(self.lstm(x)[0][:, -1]), y)


class Temperature(Net):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.net, self.temperature = nn.Linear(5, 8), nn.Parameter(torch.tensor(2.0))
        self.heads = nn.ParameterDict({"weight": nn.Parameter(torch.randn(3, 8)), "bias": nn.Parameter(torch.zeros(3))})

    def loss(self, batch):
        x, y = batch
        logits = F.linear(self.net(x).tanh(), self.heads["weight"], self.heads["bias"])
        return F.cross_entropy(logits / self.temperature.exp(), y)


class SpectralNorm(Net):
    def __init__(self, dropout=0.0):
        super().__init__()
        norm = nn.utils.parametrizations.spectral_norm
        self.net = nn.Sequential(norm(nn.Linear(5, 8)), nn.ReLU(), norm(nn.Linear(8, 3)))

    def loss(self, batch):
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class OldSpectralNorm(SpectralNorm):
    def __init__(self, dropout=0.0):
        super().__init__()
        norm = nn.utils.spectral_norm
        self.net = nn.Sequential(norm(nn.Linear(5, 8)), nn.ReLU(), norm(nn.Linear(8, 3)))


class Teacher(Net):
    """The teacher's weights follow the student's, in the training step."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 4))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def loss(self, batch):
        x, _ = batch
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
            goal = self.teacher(x).softmax(-1)
        return F.cross_entropy(self.student(x.flip(-1)), goal)


class Unet(Net):
    """A segmentation with a Dice loss."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out = nn.Conv2d(12, 2, 1)

    def loss(self, batch):
        x, y = batch
        across = self.down(x)
        logits = self.out(torch.cat([across, self.up(self.deep(across))], dim=1))
        chances, goal = logits.softmax(1), F.one_hot(y, 2).movedim(-1, 1).to(x.dtype)
        overlap = (chances * goal).sum((2, 3))
        dice = (2 * overlap + 1) / (chances.sum((2, 3)) + goal.sum((2, 3)) + 1)
        return 1 - dice.mean()


def draw(*shape):
    return torch.randn(N, *shape, generator=torch.Generator().manual_seed(1))


LABELS = torch.arange(N) % 3
TOKENS = torch.arange(N * 7).view(N, 7) % 29 + 1
CASES = {
    Encoder: (draw(4, 8), LABELS),
    Bert: (TOKENS, (torch.arange(7) < torch.arange(N)[:, None] + 2).long(), LABELS),
    Recurrent: (draw(4, 5), LABELS),
    Temperature: (draw(5), LABELS),
    SpectralNorm: (draw(5), LABELS),
    OldSpectralNorm: (draw(5), LABELS),
    Teacher: (draw(5), LABELS),
    Unet: (draw(3, 8, 8), (draw(8, 8) > 0).long()),
}


def in_double(kind, **kwargs):
    torch.manual_seed(0)
    model = kind(**kwargs).double()
    data = [x.double() if x.is_floating_point() else x for x in CASES[kind]]
    return model, TensorDataset(*data)


def private_step(model, data, **kwargs):
    settings = {"clip_plan": ClipPlan.flat(max_grad_norm=0.5), "max_physical_batch_size": 4, **kwargs}
    return PrivateStep(model, model.loss, data, plan=plan_of(N), **settings)


def sgd(model):
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def clipped_sum_by_hand(model, data):
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters() if p.requires_grad}
    before = copy.deepcopy(model.state_dict())
    for example in DataLoader(data, batch_size=1):
        model.load_state_dict(before)
        loss = model.loss(example)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        norm = torch.stack([g.square().sum() for g in gradients if g is not None]).sum().sqrt()
        for name, gradient in zip(trained, gradients, strict=True):
            if gradient is not None:
                total[name] += gradient * (0.5 / norm).clamp_max(1)
    return total


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", CASES)
def test_the_clipped_sum_is_that_of_single_examples(kind):
    model, data = in_double(kind, dropout=0.0)
    expected = clipped_sum_by_hand(*in_double(kind, dropout=0.0))
    released(private_step(model, data))
    scale = max(float(value.norm()) for value in expected.values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            # The clipped sum is kept in float32.
            torch.testing.assert_close(parameter.grad * N, expected[name], rtol=0, atol=1e-5 * scale)


@pytest.mark.filterwarnings("ignore:.*spectral_norm.*:FutureWarning")
@pytest.mark.parametrize("kind", CASES)
def test_it_trains_as_it_is(kind):
    model, data = in_double(kind)
    before = [p.detach().clone() for p in model.parameters() if p.requires_grad]
    private, optimizer = private_step(model, data), sgd(model)
    for _ in range(3):
        released(private)
        optimizer.step()
    after = [p.detach() for p in model.parameters() if p.requires_grad]
    assert all(bool(value.isfinite().all()) for value in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_mask_that_transformers_reads_is_refused_with_the_setting_that_does_not():
    private = private_step(*in_double(Bert, dims=2))
    with pytest.raises(ModelError, match="mask of four dimensions"):
        private.accumulate(next(iter(private.batches())))
