"""The mathematics of Shanmugam et al. 2026, Section 4: signal and noise of privatized gradients, and spectra."""

from dp_lightning.analysis.recovery import (
    detection_batch_size,
    detection_norm,
    direction_recovery,
    recovery_batch_size,
    recovery_gap,
)
from dp_lightning.analysis.signal_to_noise import signal_to_noise
from dp_lightning.analysis.spectra import (
    bulk_density,
    bulk_edges,
    entropy_rank,
    newton_schulz_cosines,
    participation_ratio,
)

__all__ = [
    "bulk_density",
    "bulk_edges",
    "detection_batch_size",
    "detection_norm",
    "direction_recovery",
    "entropy_rank",
    "newton_schulz_cosines",
    "participation_ratio",
    "recovery_batch_size",
    "recovery_gap",
    "signal_to_noise",
]
