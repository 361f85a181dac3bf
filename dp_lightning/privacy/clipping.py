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
from dataclasses import asdict, dataclass

from torch import Tensor

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.schedules import Schedule

# Bu et al. 2023 use 0.01: small against a norm of one, and it keeps the factor of a vanishing gradient finite.
AUTOMATIC_STABILITY = 0.01
# Factors of gradients up to 1.8e19 are normal float32 numbers then, and squares of small ones do not vanish.
_SMALLEST, _LARGEST = 1e-12, 1e12
# The most that counting for adaptive clipping may add to the noise of the gradient.
_MORE_NOISE = 1.05


@dataclass(frozen=True)
class AdaptiveClipping:
    """C that follows a quantile of the norms of gradients (Andrew et al. 2021), at the epsilon of a fixed C.

    Each step releases how many of its examples have a norm of at most C, as a sum of 1/2 and -1/2, which one example
    moves by at most 1/2, plus N(0, s^2). Together with a sum of sensitivity C and noise of the multiplier a, that is
    one Gaussian mechanism of noise multiplier sigma, where 1 / sigma^2 = 1 / a^2 + 1 / (2 s)^2. C of the next step
    follows from what was released.

    Args:
        quantile: the share of examples whose norm is to be at most C.
        rate: eta: C is multiplied by exp(-eta (share - quantile)) in each step.

    Raises:
        ConfigurationError: a value is outside its range.
    """

    quantile: float = 0.5
    rate: float = 0.2

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1 or not 0 < self.rate <= 2:
            raise ConfigurationError(
                "adaptive_clipping needs a quantile between 0 and 1 and a rate above 0 and at most 2; they are "
                f"{self.quantile} and {self.rate}."
            )

    def noises(self, noise_multiplier: float, expected_batch_size: int) -> tuple[float, float]:
        """a and s; s is a twentieth of B, or so much that a is at most 1.05 sigma. Both are 0 without noise.

        Raises:
            ConfigurationError: where such noise hides the share.
        """
        if noise_multiplier == 0:
            return 0.0, 0.0
        least = noise_multiplier / (2 * math.sqrt(1 - _MORE_NOISE**-2))
        if least > expected_batch_size / 4:
            raise ConfigurationError(
                f"adaptive_clipping counts examples with noise of at least {least:.3g}, and a step has "
                f"{expected_batch_size}. Raise privacy.expected_batch_size, or remove it."
            )
        count_noise = max(expected_batch_size / 20, least)
        return 1 / math.sqrt(noise_multiplier**-2 - (2 * count_noise) ** -2), count_noise

    def next_norm(self, max_grad_norm: float, noised_count: float, expected_batch_size: int) -> float:
        """C of the next step, from that of this one."""
        share = min(max(noised_count / expected_batch_size + 0.5, 0.0), 1.0)
        changed = max_grad_norm * math.exp(-self.rate * (share - self.quantile))
        return min(max(changed, _SMALLEST), _LARGEST)


@dataclass(frozen=True, kw_only=True)
class ClipPlan:
    """The groups, the bound of each group and the clip factor; made by ``flat`` and ``per_layer``.

    With a ``schedule`` or ``adaptive`` clipping, ``max_grad_norm`` is C of the first steps, and all bounds change with
    it.

    Formal guarantee: for every example, with a finite gradient or not, the scaled gradient that enters the sum has an
    L2 norm of at most ``sensitivity``. A group whose norm is not finite, or overflows float32 when squared (above
    1.8e19), has factor zero.
    """

    kind: str
    factor: str
    max_grad_norm: float
    schedule: Schedule | None = None
    adaptive: AdaptiveClipping | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("flat", "per_layer"):
            raise ConfigurationError(f"clipping is {self.kind!r}; choose 'flat' or 'per_layer'.")
        if self.factor not in ("abadi", "automatic"):
            raise ConfigurationError(f"clip_factor is {self.factor!r}; choose 'abadi' or 'automatic'.")
        if self.adaptive is not None and (self.kind != "flat" or self.schedule is not None):
            raise ConfigurationError("adaptive_clipping needs clipping: flat, and no clip_schedule.")
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
        return {name: value for name, value in asdict(self).items() if value is not None}
