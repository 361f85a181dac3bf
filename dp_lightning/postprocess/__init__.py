"""Transforms of the privatized gradient between the noise and the optimizer, and their matrix functions."""

from dp_lightning.postprocess.chain import Chain
from dp_lightning.postprocess.denoise import GatedOrthogonalize, SelectiveOrthogonalize, SpectralShrinkage
from dp_lightning.postprocess.entrywise_linear import EntrywiseLinear, Memory
from dp_lightning.postprocess.filters import Kalman, LowPass, Momentum
from dp_lightning.postprocess.matrix import (
    as_matrix,
    dimension_scale,
    map_singular_values,
    polar_factor,
    singular_values,
    spectral_norm,
)
from dp_lightning.postprocess.newton_schulz import newton_schulz
from dp_lightning.postprocess.orthogonalize import MagnitudeScale, Orthogonalize
from dp_lightning.postprocess.scale import NoiseNormalize, Normalize, Scale
from dp_lightning.postprocess.spectrum import noise_edge, shrunk_values, signal_values
from dp_lightning.postprocess.transform import Gradients, Noise, State, Transform, Where

__all__ = [
    "Chain",
    "EntrywiseLinear",
    "GatedOrthogonalize",
    "Gradients",
    "Kalman",
    "LowPass",
    "MagnitudeScale",
    "Memory",
    "Momentum",
    "Noise",
    "NoiseNormalize",
    "Normalize",
    "Orthogonalize",
    "Scale",
    "SelectiveOrthogonalize",
    "SpectralShrinkage",
    "State",
    "Transform",
    "Where",
    "as_matrix",
    "dimension_scale",
    "map_singular_values",
    "newton_schulz",
    "noise_edge",
    "polar_factor",
    "shrunk_values",
    "signal_values",
    "singular_values",
    "spectral_norm",
]
