"""The private mechanism: sampling, clipped gradients, noise, accounting and the statement, without Lightning.

Names are imported when they are asked for: accounting needs no torch, which takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dp_lightning.privacy.accounting import Ledger
    from dp_lightning.privacy.clipping import ClipPlan
    from dp_lightning.privacy.disk import DiSK
    from dp_lightning.privacy.gradients.rules import Rule, per_example, register_rule
    from dp_lightning.privacy.noise import GaussianNoise
    from dp_lightning.privacy.plan import PrivacyPlan, RunShape
    from dp_lightning.privacy.reading import Reading
    from dp_lightning.privacy.record import RunRecord
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
    "Reading",
    "Rule",
    "RunRecord",
    "RunShape",
    "per_example",
    "register_rule",
]

_PLACES = {
    "ClipPlan": "clipping",
    "DiSK": "disk",
    "GaussianNoise": "noise",
    "Ledger": "accounting",
    "PoissonSampler": "sampling",
    "PrivacyPlan": "plan",
    "PrivacyStatement": "statement",
    "PrivateStep": "step",
    "Reading": "reading",
    "Rule": "gradients.rules",
    "RunRecord": "record",
    "RunShape": "plan",
    "per_example": "gradients.rules",
    "register_rule": "gradients.rules",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value = getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    return value
