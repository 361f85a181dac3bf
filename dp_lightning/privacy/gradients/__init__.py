"""Clipped sums of per-example gradients in one backward pass."""

from dp_lightning.privacy.gradients.clipped_sum import ClippedSum, clipped_gradient_sum
from dp_lightning.privacy.gradients.engine import GradientEngine

__all__ = ["ClippedSum", "GradientEngine", "clipped_gradient_sum"]
