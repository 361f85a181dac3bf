"""Ordinary models that a private step takes as they are: the gradients are those of a loop over single examples."""

import pytest
import torch
from reference import check, record
from torch import nn
from torch.nn import functional as F

from dp_lightning.errors import ModelError

N = 6


def bert_loss(model, tokens, mask, label):
    return model(input_ids=tokens[None], attention_mask=mask[None], labels=label[None]).loss


@pytest.fixture
def bert():
    """Hugging Face's network, without dropout; its tokens, its mask and its labels."""
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = BertConfig(vocab_size=30, max_position_embeddings=16, num_labels=3, **sizes, **rates)
    mask = (torch.arange(7) < torch.arange(N)[:, None] + 2).long()
    tokens = torch.arange(N * 7).view(N, 7) % 29 + 1
    return BertForSequenceClassification(config).double(), tokens, mask, torch.arange(N) % 3


def test_a_text_model_trains_with_a_mask_of_four_dimensions_and_is_refused_with_one_of_two(bert):
    model, tokens, mask, labels = bert
    check(model, bert_loss, tokens, mask[:, None, None, :].bool(), labels)
    with pytest.raises(ModelError, match="mask of four dimensions"):
        record(model, bert_loss, tokens, mask, labels)


class Unet(nn.Module):
    """A segmentation."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(inplace=True))
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(inplace=True))
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.out = nn.Conv2d(12, 2, 1)

    def forward(self, x):
        across = self.down(x)
        return self.out(torch.cat([across, self.up(self.deep(across))], dim=1))


def test_a_segmentation_trains_with_a_dice_loss():
    def dice(model, x, y):
        chances, goal = model(x[None]).softmax(1)[0], F.one_hot(y, 2).movedim(-1, 0).to(x.dtype)
        overlap = (chances * goal).sum((1, 2))
        return 1 - ((2 * overlap + 1) / (chances.sum((1, 2)) + goal.sum((1, 2)) + 1)).mean()

    check(Unet().double(), dice, torch.randn(N, 3, 8, 8).double(), (torch.randn(N, 8, 8) > 0).long())
