"""The mathematics of Shanmugam et al. 2026, Section 4: signal and noise of privatized gradients, and spectra."""

from dp_lightning.analysis.recovery import detection_norm, direction_recovery, recovery_gap
from dp_lightning.analysis.spectra import bulk_density, bulk_edges, participation_ratio, signal_to_noise

__all__ = [
    "bulk_density",
    "bulk_edges",
    "detection_norm",
    "direction_recovery",
    "participation_ratio",
    "recovery_gap",
    "signal_to_noise",
]
