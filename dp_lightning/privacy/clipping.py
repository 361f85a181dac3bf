"""How each example's gradient is bounded, and the L2 sensitivity that follows from it.

The gradient of one example is cut into groups g_1, ..., g_L. Each group is scaled by a factor of its own norm, so that
the scaled group is at most C_l long. Adding or removing one example then moves the sum of the scaled gradients by at
most sqrt(C_1^2 + ... + C_L^2), whatever the example is. That number sets the noise.

* ``flat``: one group of all parameters, C_1 = C.
* ``per_layer``: one group per layer (the parameters of one module), C_l = C / sqrt(L).
* ``abadi``: factor min(1, C_l / ||g_l||) (Abadi et al. 2016).
* ``automatic``: factor C_l / (||g_l|| + 0.01) (Bu et al. 2023), which normalises instead of clipping.
"""

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import Tensor

from dp_lightning.errors import ConfigurationError

# Bu et al. 2023 use 0.01: small against a norm of one, and it keeps the factor of a vanishing gradient finite.
AUTOMATIC_STABILITY = 0.01
# Factors of gradients up to 1.8e19 are normal float32 numbers then, and squares of small ones do not vanish.
_SMALLEST, _LARGEST = 1e-12, 1e12


@dataclass(frozen=True, kw_only=True)
class ClipPlan:
    """The groups, the bound of each group and the clip factor; made by ``flat`` and ``per_layer``.

    Formal guarantee: for every example, with a finite gradient or not, the scaled gradient that enters the sum has an
    L2 norm of at most ``sensitivity``. A group whose norm is not finite, or overflows float32 when squared (above
    1.8e19), has factor zero.
    """

    kind: str
    factor: str
    max_grad_norm: float

    def __post_init__(self) -> None:
        if self.kind not in ("flat", "per_layer"):
            raise ConfigurationError(f"clipping is {self.kind!r}; choose 'flat' or 'per_layer'.")
        if self.factor not in ("abadi", "automatic"):
            raise ConfigurationError(f"clip_factor is {self.factor!r}; choose 'abadi' or 'automatic'.")
        if not _SMALLEST <= self.max_grad_norm <= _LARGEST:
            raise ConfigurationError(
                f"max_grad_norm is {self.max_grad_norm:g}; it must be a number from {_SMALLEST:g} to {_LARGEST:g}, "
                "where float32 arithmetic keeps the bound."
            )

    @classmethod
    def flat(cls, *, max_grad_norm: float = 1.0, factor: str = "abadi") -> "ClipPlan":
        """One norm over all parameters, bounded by ``max_grad_norm``."""
        return cls(kind="flat", factor=factor, max_grad_norm=float(max_grad_norm))

    @classmethod
    def per_layer(cls, *, max_grad_norm: float = 1.0, factor: str = "abadi") -> "ClipPlan":
        """One norm per layer: each of L layers is bounded by ``max_grad_norm`` / sqrt(L)."""
        return cls(kind="per_layer", factor=factor, max_grad_norm=float(max_grad_norm))

    @property
    def sensitivity(self) -> float:
        """The most, in L2 norm, that adding or removing one example moves the sum of clipped gradients.

        It is the root of the sum of the squares of `bounds`.
        """
        return self.max_grad_norm

    def groups(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Parameter names by group, in the order of ``names``; a layer's group bears its module's name."""
        groups: dict[str, list[str]] = {}
        for name in names:
            label = "all" if self.kind == "flat" else name.rpartition(".")[0]
            groups.setdefault(label, []).append(name)
        return groups

    def bounds(self, labels: Collection[str]) -> list[float]:
        """C_l for each group label."""
        return [self.max_grad_norm / math.sqrt(len(labels))] * len(labels)

    def factors(self, norms: Tensor, bounds: Tensor) -> Tensor:
        """Scale of each example's gradient in each group.

        Args:
            norms: (b, L) norms, or (b,) of one group; one that is not finite gives the factor zero.
            bounds: (L,), the C_l, or () of one group.
        """
        abadi = self.factor == "abadi"
        factors = (bounds / norms).clamp_max_(1.0) if abadi else bounds / (norms + AUTOMATIC_STABILITY)
        # An infinite norm has given zero already.
        return factors.nan_to_num_(nan=0.0)

    def describe(self) -> dict[str, object]:
        """The plan in plain values, for the privacy statement."""
        return {"kind": self.kind, "factor": self.factor, "max_grad_norm": self.max_grad_norm}
