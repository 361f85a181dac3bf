"""The private mechanism of one training run: the one place where clipping, noise, division and the ledger meet.

For a logical step with the Poisson draw S from N examples, each taken with probability q = B/N:

    release = (sum over i in S of clip(grad l_i)  +  Normal(0, (sigma * sensitivity)^2 I)) / B.

Formal guarantee. Let the parameters and all earlier releases be given. The sum moves by at most ``sensitivity`` when
one example is added or removed (``ClipPlan``), an example's gradient depends on no other example (``checks``), B
is a constant of the plan, and the step is released whatever the draw is, the empty one included. Each release is then
a Poisson-subsampled Gaussian mechanism with noise multiplier sigma and sampling probability q, for neighbours that
differ by adding or removing one example. The ledger counts the releases, and its accountants give (epsilon, delta) for
all of them together. Everything computed from the releases alone is post-processing.

Several ranks take one step together: S is one draw, dealt out to them; each rank sums its share, rank 0 adds the noise
to its own sum, and one collective adds up the sums. What is released is the same on every rank, bit for bit.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from dp_lightning.errors import BudgetError, DpLightningError
from dp_lightning.privacy.accounting import Ledger
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.gradients.contribution import Contribution
from dp_lightning.privacy.journal import Journal
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.ranks import Ranks


class Release(NamedTuple):
    """What one logical step gives out."""

    gradients: dict[str, Tensor]
    """Privatized gradients by parameter name, float32."""
    stop: bool
    """Whether some rank asked to stop after this step."""


class PrivateMechanism:
    """Collects a logical batch in physical batches and releases its privatized gradient.

    Args:
        parameters: trained parameters by name.
        plan: the public numbers of the run.
        clip_plan: how examples are clipped.
        noise: the source of noise, on the parameters' device.
        ledger: where each release is recorded.
        ranks: the processes that take each step together.
        journal: where each release is brought to disk before it is made, on rank 0.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        *,
        plan: PrivacyPlan,
        clip_plan: ClipPlan,
        noise: GaussianNoise,
        ledger: Ledger,
        ranks: Ranks | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.plan, self.clip_plan, self.noise, self.ledger = plan, clip_plan, noise, ledger
        self.ranks, self.journal = ranks or Ranks(), journal
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

    def skip_noise(self, steps: int) -> None:
        """Pass by the noise of steps that were taken and lost, so that a fixed seed does not give it again."""
        self.noise.skip(self._sum.flat.shape, steps)

    @torch.no_grad()
    def release(self, *, stop: bool = False) -> Release:
        """Privatize the logical batch; ends the logical step. Every rank has to call it.

        The step is recorded before anything is returned, so that an interruption over-reports rather than
        under-reports.

        Args:
            stop: whether this rank asks all ranks to stop after this step.
        """
        self.require_budget()
        step = {"noise_multiplier": self.plan.noise_multiplier, "sample_rate": self.plan.sample_rate}
        if self.journal is not None:
            self.journal.record(**step)
        self.ledger.record(**step)
        total, noised = self._sum.flat, self.ranks.rank == 0
        if noised:
            total = self.noise.add_to(total, self.noise_standard_deviation)
        if self.ranks.size > 1:
            total, stop = self._over_ranks(total, noised=noised, stop=stop)
        self._sum.reset()
        return Release(self._sum.views(total.div_(self.plan.expected_batch_size)), stop)

    def _over_ranks(self, total: Tensor, *, noised: bool, stop: bool) -> tuple[Tensor, bool]:
        """The sum over ranks, in which one has added noise, and whether one of them asks to stop."""
        total = torch.cat([total, total.new_tensor([float(noised), float(stop)])])
        self.ranks.add_up(total)
        with_noise, stopping = total[-2:].tolist()
        if with_noise != 1:
            raise DpLightningError(
                f"{with_noise:g} of {self.ranks.size} ranks added noise, and exactly one has to: the processes do not "
                "agree on their ranks. Start all of them by the same launcher, and only once."
            )
        return total[:-2], stopping > 0
