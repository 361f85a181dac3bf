"""The ways of jax_privacy: wide residual networks in Flax, layer by layer those of ``dp_lightning.models``.

A step is what it is in ``training_steps.py``: the forward pass, the backward pass and the clipped sum.
"""

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax_privacy.clipping import clipped_grad

Step = Callable[[], Any]

DEPTH_AND_WIDTH = {"wrn16-4": (16, 4), "wrn28-10": (28, 10)}


def _norm(name: str) -> nn.GroupNorm:
    return nn.GroupNorm(num_groups=16, epsilon=1e-5, name=name)


def _convolution(channels: int, size: int, stride: int, name: str) -> nn.Conv:
    padding = [(size // 2, size // 2)] * 2
    return nn.Conv(channels, (size, size), (stride, stride), padding=padding, use_bias=False, name=name)


class PreActivationBlock(nn.Module):
    """(N, H, W, in) to (N, H / stride, W / stride, channels)."""

    channels: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        activated = nn.relu(_norm("norm1")(x))
        inner = nn.relu(_norm("norm2")(_convolution(self.channels, 3, self.stride, "conv1")(activated)))
        if self.stride != 1 or x.shape[-1] != self.channels:
            x = _convolution(self.channels, 1, self.stride, "shortcut")(activated)
        return _convolution(self.channels, 3, 1, "conv2")(inner) + x


class WideResNet(nn.Module):
    """Images (N, H, W, 3) to logits (N, 10)."""

    depth: int
    width: int

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x, index = _convolution(16, 3, 1, "stem")(images), 0
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            for place in range((self.depth - 4) // 6):
                x = PreActivationBlock(channels * self.width, stride if place == 0 else 1, name=f"blocks_{index}")(x)
                index += 1
        return nn.Dense(10, name="classifier")(nn.relu(_norm("norm")(x)).mean(axis=(1, 2)))


def _loss(network: nn.Module) -> Callable[..., jax.Array]:
    def loss(parameters: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        logits = nn.log_softmax(network.apply({"params": parameters}, images))
        return -jnp.take_along_axis(logits, labels[:, None], axis=1).mean()

    return loss


def _ordinary(network: nn.Module) -> Callable[..., Any]:
    return jax.grad(_loss(network))


def clipped(examples: int | None) -> Callable[[nn.Module], Callable[..., Any]]:
    """The sum of gradients clipped to norm 1, of so many examples at once; None takes all of them at once."""

    def make(network: nn.Module) -> Callable[..., Any]:
        return clipped_grad(_loss(network), l2_clip_norm=1.0, batch_argnums=(1, 2), microbatch_size=examples)

    return make


WAYS: dict[str, Callable[[nn.Module], Callable[..., Any]]] = {
    "jax ordinary": _ordinary,
    "jax_privacy": clipped(None),
    "jax_privacy, 8 at once": clipped(8),
}


def step(model: str, way: str, batch_size: int, threads: int) -> Step:
    """A step on random images of 32 x 32 pixels, which ends when its result is there."""
    # XLA has a thread for each processor that the process may use.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])
    network = WideResNet(*DEPTH_AND_WIDTH[model])
    keys = jax.random.split(jax.random.key(0), 3)
    images = jax.random.normal(keys[0], (batch_size, 32, 32, 3))
    labels = jax.random.randint(keys[1], (batch_size,), 0, 10)
    parameters = network.init(keys[2], images[:1])["params"]
    gradient = jax.jit(WAYS[way](network))
    return lambda: jax.block_until_ready(gradient(parameters, images, labels))
