"""The private mechanism of one training run: the one place where clipping, noise, division and the ledger meet.

For a logical step with the Poisson draw S from N examples, each taken with probability q = B/N:

    release = (sum over i in S of clip(grad l_i)  +  Normal(0, (sigma * sensitivity)^2 I)) / B.

Formal guarantee. Let the parameters and all earlier releases be given. The sum moves by at most ``sensitivity`` when
one example is added or removed (``ClipPlan``), an example's gradient depends on no other example (``model_check``), B
is a constant of the plan, and the step is released whatever the draw is, the empty one included. Each release is then
a Poisson-subsampled Gaussian mechanism with noise multiplier sigma and sampling probability q, for neighbours that
differ by adding or removing one example. The ledger counts the releases, and its accountants give (epsilon, delta) for
all of them together. Everything computed from the releases alone is post-processing.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dp_lightning.errors import BudgetError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.contribution import Contribution
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.plan import PrivacyPlan


class PrivateMechanism:
    """Collects a logical batch in physical batches and releases its privatized gradient.

    Args:
        parameters: trained parameters by name.
        plan: the public numbers of the run.
        clip_plan: how examples are clipped.
        noise: the source of noise, on the parameters' device.
        ledger: where each release is recorded.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        plan: PrivacyPlan,
        clip_plan: ClipPlan,
        noise: GaussianNoise,
        ledger: Ledger,
    ) -> None:
        self.plan, self.clip_plan, self.noise, self.ledger = plan, clip_plan, noise, ledger
        self._sum = ClippedSum(parameters, clip_plan)

    @property
    def noise_standard_deviation(self) -> float:
        """Of the noise on the sum, before the division by B."""
        return self.plan.noise_multiplier * self.clip_plan.sensitivity

    def require_budget(self) -> None:
        """Refuse a step beyond the plan.

        Raises:
            BudgetError: when the plan's steps are all taken.
        """
        if self.ledger.num_steps >= self.plan.num_steps:
            raise BudgetError(
                f"The privacy budget is spent: the plan allows {self.plan.num_steps} logical steps and "
                f"{self.ledger.num_steps} are taken. To train longer, plan more steps before the start "
                "(trainer.max_epochs or trainer.max_steps)."
            )

    def begin(self) -> None:
        """Start a logical batch; what an abandoned one has left is dropped, so that no draw enters two releases.

        Raises:
            BudgetError: when the plan's steps are all taken.
        """
        self.require_budget()
        self._sum.reset()

    def begin_batch(self, batch_size: int, *, count: bool = True) -> None:
        """Start a physical batch; without ``count`` its examples contribute zero."""
        self._sum.begin(batch_size, count=count)

    def take(self, contribution: Contribution) -> None:
        """Take what the physical batch contributes to some parameters."""
        self._sum.take(contribution)

    def end_batch(self) -> Tensor:
        """End the physical batch; returns the norms as ``ClippedSum.end`` does, which are not private."""
        return self._sum.end()

    @property
    def discarded(self) -> Tensor:
        """How many examples of the logical batch have a gradient that is not finite; not private."""
        return self._sum.discarded

    @torch.no_grad()
    def release(self) -> dict[str, Tensor]:
        """Privatized gradients by parameter name, float32; ends the logical step.

        The step is recorded before anything is returned, so that an interruption over-reports rather than
        under-reports.
        """
        self.require_budget()
        self.ledger.record(noise_multiplier=self.plan.noise_multiplier, sample_rate=self.plan.sample_rate)
        released = {
            name: self.noise.add_to(total, self.noise_standard_deviation).div_(self.plan.expected_batch_size)
            for name, total in self._sum.sums.items()
        }
        self._sum.reset()
        return released
