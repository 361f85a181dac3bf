"""Transforms of the privatized gradient between the noise and the optimizer, and their matrix functions."""

from dp_lightning.postprocess.chain import Chain
from dp_lightning.postprocess.filters import Kalman, LowPass
from dp_lightning.postprocess.matrix import (
    as_matrix,
    dimension_scale,
    newton_schulz,
    polar_factor,
    spectral_norm,
)
from dp_lightning.postprocess.momentum import Momentum
from dp_lightning.postprocess.orthogonalize import MagnitudeScale, Orthogonalize
from dp_lightning.postprocess.scale import Scale
from dp_lightning.postprocess.transform import Gradients, State, Transform

__all__ = [
    "Chain",
    "Gradients",
    "Kalman",
    "LowPass",
    "MagnitudeScale",
    "Momentum",
    "Orthogonalize",
    "Scale",
    "State",
    "Transform",
    "as_matrix",
    "dimension_scale",
    "newton_schulz",
    "polar_factor",
    "spectral_norm",
]
