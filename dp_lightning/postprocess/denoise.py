"""Transforms that use what is known about the noise: which singular values of a matrix are signal, and how large it is.

All get a matrix Y = X + noise * Z, whose noise level the chain knows, and keep the singular vectors of Y:

- `SpectralShrinkage` gives each singular value the size that brings the matrix closest to X;
- `GatedOrthogonalize` sets those above the noise to one and the others to zero;
- `SelectiveOrthogonalize` orthogonalizes a matrix whose signal shows, and applies another transform to the others.
"""

from collections.abc import Callable, Mapping
from typing import Literal, Unpack

import torch
from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.postprocess.matrix import dimension_scale, map_same_shape, map_singular_values, singular_values
from dp_lightning.postprocess.orthogonalize import Orthogonalize
from dp_lightning.postprocess.scale import NoiseNormalize, Normalize
from dp_lightning.postprocess.spectrum import noise_edge, shrunk_values, signal_values
from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform, Where
from dp_lightning.processors import read_at_once

Choice = Callable[[Gradients], Gradients]
"""What a transform makes of some of the gradients."""


class SpectralShrinkage(Transform):
    """The estimate of the noiseless matrix that shrinks singular values best (Gavish and Donoho 2017).

    Applies to matrices. Among functions of the singular values it has the smallest error in the Frobenius norm, for
    large matrices of low rank. A matrix with no singular value above the noise becomes zero. A signal of many weak
    directions lies below the noise, and is removed with it: where no matrix moves, use a larger batch or more momentum,
    or set ``fallback``.

    Args:
        fallback: a transform without memory for a matrix whose largest singular value is below `noise_edge`. None
            shrinks it too, which leaves little or nothing of noise alone.
    """

    needs_noise = True

    def __init__(self, *, fallback: Transform | None = None, **where: Unpack[Where]) -> None:
        super().__init__(applies_to="matrices", **where)
        self.fallback = None if fallback is None else _without_memory("SpectralShrinkage: fallback", fallback)

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        def shrunk(batch: Tensor, level: Tensor) -> Tensor:
            rows, columns = batch.shape[1:]
            edge = 0.0 if self.fallback is None else level.unsqueeze(-1) * noise_edge(rows, columns)

            def shrink(values: Tensor) -> Tensor:
                best = shrunk_values(values, rows, columns, level)
                return torch.where(values[..., -1:] >= edge, best, 0.0)

            return map_singular_values(batch, shrink)

        estimates = map_same_shape(shrunk, gradients, noise)
        if self.fallback is not None:
            return _where_zero(estimates, gradients, self.fallback, noise), {}
        return _in_shape(estimates, gradients), {}


class GatedOrthogonalize(Transform):
    """The polar factor of the singular directions above the noise, times the dimension scale. Applies to matrices.

    Direction i of Y = sum_i s_i u_i v_i^T is kept if s_i is above `noise_edge`, which noise alone exceeds once in a
    hundred matrices. The Frobenius norm is the root of the number of directions, times the dimension scale: put
    `Normalize` after it for the norm that `Orthogonalize` gives.

    Args:
        scale_cap: upper bound of the dimension scale.
        fallback: a transform without memory for a matrix that has no such direction. None is `Normalize(norm=1)`, a
            step as long as that along a single direction where the dimension scale is 1.
    """

    needs_noise = True

    def __init__(self, *, scale_cap: float = 4.0, fallback: Transform | None = None, **where: Unpack[Where]) -> None:
        super().__init__(applies_to="matrices", **where)
        self.scale_cap = scale_cap
        self.fallback = _without_memory("GatedOrthogonalize: fallback", fallback or Normalize(norm=1.0))

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        def gated(batch: Tensor, level: Tensor) -> Tensor:
            shape = batch.shape[1:]
            edge = level.unsqueeze(-1) * noise_edge(*shape)
            scale = dimension_scale(shape, cap=self.scale_cap)
            return map_singular_values(batch, lambda values: scale * (values > edge).to(values.dtype))

        return _where_zero(map_same_shape(gated, gradients, noise), gradients, self.fallback, noise), {}


class SelectiveOrthogonalize(Transform):
    """Orthogonalize the matrices whose signal shows above the noise, and let the others take linear steps.

    Args:
        threshold: when a matrix is orthogonalized. "detection": its largest singular value is above `noise_edge`, so
            its first direction carries signal (the spiked-matrix threshold, (m n)^(1/4)). "recovery": the gap between
            the two largest singular values of the signal is above noise * (sqrt(m) + sqrt(n)), so its first direction
            is recovered (Wedin's bound, B* in Shanmugam et al. 2026); this is stricter.
        orthogonalize: a transform without memory for these matrices. None is `Orthogonalize()`.
        otherwise: a transform without memory for the others. None is `NoiseNormalize()`, the step of DP-SGD at the same
            size as that of an orthogonalized matrix of noise.
    """

    needs_noise = True

    def __init__(
        self,
        *,
        threshold: Literal["detection", "recovery"] = "detection",
        orthogonalize: Transform | None = None,
        otherwise: Transform | None = None,
        **where: Unpack[Where],
    ) -> None:
        super().__init__(applies_to="matrices", **where)
        if threshold not in ("detection", "recovery"):
            raise ConfigurationError(
                f"SelectiveOrthogonalize: threshold must be 'detection' or 'recovery', got {threshold!r}"
            )
        self.threshold = threshold
        self.orthogonalize = _without_memory("SelectiveOrthogonalize: orthogonalize", orthogonalize or Orthogonalize())
        self.otherwise = _without_memory("SelectiveOrthogonalize: otherwise", otherwise or NoiseNormalize())

    def update(self, gradients: Gradients, state: State, noise: Noise) -> tuple[Gradients, State]:
        shows = map_same_shape(self._shows, gradients, noise)

        def by(transform: Transform) -> Choice:
            return lambda some: transform.update(some, {}, noise)[0]

        return _either(shows, gradients, by(self.orthogonalize), by(self.otherwise)), {}

    def _shows(self, batch: Tensor, level: Tensor) -> Tensor:
        rows, columns = batch.shape[1:]
        values = singular_values(batch)
        if self.threshold == "detection":
            return values[:, -1] >= level * noise_edge(rows, columns)
        signal = signal_values(values, rows, columns, level)
        second = signal[:, -2] if signal.shape[1] > 1 else 0.0
        return signal[:, -1] - second >= level * (rows**0.5 + columns**0.5)


def _in_shape(matrices: Mapping[str, Tensor], gradients: Gradients) -> Gradients:
    """The matrices in the shapes of their parameters."""
    return {name: matrices[name].reshape(gradient.shape) for name, gradient in gradients.items()}


def _where_zero(matrices: Mapping[str, Tensor], gradients: Gradients, fallback: Transform, noise: Noise) -> Gradients:
    """The matrices in the shapes of their parameters, and what ``fallback`` makes of gradients whose matrix is zero."""
    flags = {name: ~matrix.any() for name, matrix in matrices.items()}
    return _either(
        flags, gradients, lambda some: fallback.update(some, {}, noise)[0], lambda some: _in_shape(matrices, some)
    )


def _either(flags: Mapping[str, Tensor], gradients: Gradients, first: Choice, second: Choice) -> Gradients:
    """What ``first`` makes of the gradients whose flag is true, and ``second`` of the others.

    A GPU computes both and chooses, so that nothing waits for it.
    """
    if all(read_at_once(flag.device) for flag in flags.values()):
        chosen = {name: gradients[name] for name, flag in flags.items() if flag}
        others = {name: gradient for name, gradient in gradients.items() if name not in chosen}
        return gradients | first(chosen) | second(others)
    ours, theirs = first(gradients), second(gradients)
    return {name: torch.where(flags[name], ours[name], theirs[name]) for name in gradients}


def _without_memory(title: str, transform: Transform) -> Transform:
    if transform.has_memory or transform.applies_to != "matrices" or transform.include or transform.exclude:
        raise ConfigurationError(
            f"{title} must be a transform of matrices without memory, include and exclude: which matrices it gets "
            f"changes from step to step. {type(transform).__name__} is not one"
        )
    return transform
