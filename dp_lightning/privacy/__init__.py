"""The private mechanism: sampling, clipped gradients, noise, accounting and the statement, without Lightning."""

from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients import GradientEngine, clipped_gradient_sum
from dp_lightning.privacy.mechanism import PrivateMechanism
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.sampling import PoissonSampler
from dp_lightning.privacy.statement import PrivacyStatement

__all__ = [
    "ClipPlan",
    "GaussianNoise",
    "GradientEngine",
    "Ledger",
    "PoissonSampler",
    "PrivacyPlan",
    "PrivacyStatement",
    "PrivateMechanism",
    "clipped_gradient_sum",
]
