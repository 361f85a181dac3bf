"""ChaCha20 against the test vectors of RFC 8439."""

import secrets

import pytest
import torch

from dp_lightning.privacy.chacha import key_stream

CPU = torch.device("cpu")


def in_bytes(words):
    return words.numpy().astype("<i4").tobytes()


@pytest.mark.parametrize(
    ("key", "counter", "nonce", "expected"),
    [
        (  # section 2.3.2
            bytes(range(32)),
            1,
            "000000090000004a00000000",
            "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
            "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
        ),
        (  # appendix A.1, test vector 1
            bytes(32),
            0,
            "000000000000000000000000",
            "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
            "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586",
        ),
    ],
)
def test_vectors_of_the_rfc(key, counter, nonce, expected):
    words = key_stream(key, 1, CPU, counter=counter, nonce=bytes.fromhex(nonce))
    assert in_bytes(words).hex() == expected


def test_every_block_is_that_of_its_counter():
    key, nonce = secrets.token_bytes(32), secrets.token_bytes(12)
    words = key_stream(key, 9, CPU, counter=2**32 - 9, nonce=nonce)
    assert (words.shape, words.dtype) == ((9, 16), torch.int32)
    for place in range(9):
        assert torch.equal(words[place], key_stream(key, 1, CPU, counter=2**32 - 9 + place, nonce=nonce)[0])


@pytest.mark.gpu
def test_a_gpu_computes_the_same_stream():
    key = secrets.token_bytes(32)
    found = key_stream(key, 1000, torch.device("cuda"), counter=5)
    assert torch.equal(found.cpu(), key_stream(key, 1000, CPU, counter=5))
