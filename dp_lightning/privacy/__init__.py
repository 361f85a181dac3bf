"""The private mechanism: sampling, clipped gradients, noise, accounting and the statement, without Lightning."""

from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.gradients.gradient_sum import clipped_gradient_sum
from dp_lightning.privacy.gradients.rules import Rule, per_example, register_rule
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.plan import PrivacyPlan, RunShape
from dp_lightning.privacy.sampling import PoissonSampler
from dp_lightning.privacy.statement import PrivacyStatement
from dp_lightning.privacy.step import PrivateStep

__all__ = [
    "ClipPlan",
    "DiSK",
    "GaussianNoise",
    "Ledger",
    "PoissonSampler",
    "PrivacyPlan",
    "PrivacyStatement",
    "PrivateStep",
    "Rule",
    "RunShape",
    "clipped_gradient_sum",
    "per_example",
    "register_rule",
]
