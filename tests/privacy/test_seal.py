"""A seal is another one whatever value was changed, and the same for what was saved and read again."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch

from dp_lightning.privacy.seal import seal_of

VALUES = [
    None,
    True,
    1,
    2,
    0.5,
    float("inf"),
    "text",
    b"bytes",
    1j,
    2j,
    Path("a"),
    Path("b"),
    {1, 2},
    {1, 3},
    [1, 2],
    [2, 1],
    {"a": 1},
    {"b": 1},
    torch.float32,
    torch.float64,
    torch.device("cpu"),
    torch.zeros(2),
    torch.ones(2),
    torch.zeros(2, dtype=torch.float64),
    torch.eye(2).to_sparse(),
    2 * torch.eye(2).to_sparse(),
    np.int64(3),
    np.int64(8),
    np.longlong(4),
    np.ulonglong(5),
    np.float32(6.5),
    np.float32(8.5),
    np.float64(7.5),
    np.float64(9.5),
    np.bool_(False),
]


def test_no_two_values_have_one_seal():
    assert len({seal_of({"value": value}) for value in VALUES}) == len(VALUES)
    assert len({seal_of({"deep": [{"value": value}]}) for value in VALUES}) == len(VALUES)


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_what_was_saved_and_read_again_has_the_same_seal(value):
    file = io.BytesIO()
    torch.save({"value": value}, file)
    file.seek(0)
    assert seal_of(torch.load(file, weights_only=False)) == seal_of({"value": value})
