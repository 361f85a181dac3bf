"""Clipped sums of per-example gradients in one backward pass."""
