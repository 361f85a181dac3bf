"""One logical step from the draw to the release: the private mechanism in one place.

For the Poisson draw S from N examples, each taken with probability q = B/N, a step releases

    g = (sum over i in S of clip(grad l_i)  +  Normal(0, (sigma * sensitivity)^2 I)) / B.

Formal guarantee. Let the parameters and all earlier releases be given.

1. S is a Poisson draw with a secret key (``sampling``).
2. Each example is read by itself (``reading``), and its loss l_i is computed under vmap, where no other example can be
   reached (``examples``, ``isolation``), with secret random numbers (``randomness``): l_i is a function of example i,
   the weights, the number of the step, and random numbers that no one knows. ``docs/contract.md`` says what the user
   promises for it: ``__getitem__`` looks at one record, and code around the step feeds no training example back.
3. ``clip`` bounds what one example adds to the sum by ``sensitivity`` (``clipping``, ``gradients``); an example whose
   gradient is not finite adds nothing.
4. B is a constant of the plan, and the step is released whatever the draw is, the empty one included.
5. The noise is independent, and drawn once (``noise``). The step is in the ledger before anything is released, and on
   disk where the record has a journal (``record``).

Each release is then a Poisson-subsampled Gaussian mechanism with noise multiplier sigma and sampling probability q, for
neighbours that differ by adding or removing one example; with noise that is correlated over steps, each round of
releases (``bands``). The ledger counts them, and its accountants give (epsilon, delta) for all of them together.
Everything computed from the releases alone is post-processing.

Where the unit of privacy is a person, read "person" for "example": N counts persons, and l_i is the loss of
``images_per_group`` elements of person i (``groups``), drawn by random numbers that follow from no other person.

Several ranks take one step together: S is one draw, dealt out to them; each rank sums its share, rank 0 adds the noise
to its own sum, and one collective adds up the sums. What is released is the same on every rank, bit for bit.
"""

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dp_lightning.errors import BudgetError, ConfigurationError, DpLightningError
from dp_lightning.privacy.bands import coefficients, deviations
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.disk import DiSK, Extrapolation
from dp_lightning.privacy.examples import Examples, Loss
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.isolation import Isolation, require_own_tensors, with_inner
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.parameters import require_same_trained, trained_parameters
from dp_lightning.privacy.person_ids import warn_of_persons
from dp_lightning.privacy.phases import Phases
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.randomness import TrainingRandomness
from dp_lightning.privacy.ranges import check_step_settings
from dp_lightning.privacy.reading import (
    ExampleBatch,
    ExampleReader,
    Reading,
    Structure,
    require_structure,
)
from dp_lightning.privacy.record import RunRecord, note_earlier_training, released
from dp_lightning.privacy.records import require_single_records
from dp_lightning.privacy.sampling import PhysicalBatch, PoissonSampler, cut, sampling_key
from dp_lightning.privacy.statement import ONE_EXAMPLE, ONE_PERSON, PrivacyStatement, installed
from dp_lightning.privacy.weights import digest_of
from dp_lightning.processors import all_finite
from dp_lightning.ranks import Ranks

# The name of the clipping norm in a state, which is no parameter's.
_CLIP_FACTOR = "clipping norm over that of the plan"


class PrivateStep:
    """Takes the logical steps of one run.

    Use::

        private = PrivateStep(model, loss, dataset, plan=plan)
        for _ in range(plan.num_steps):
            for batch in private.batches():
                private.accumulate(batch)
            private.release()               # the privatized gradient is in .grad
            optimizer.step()

    Args:
        module: the module whose parameters that require a gradient now are trained.
        loss: maps a batch of one example, as ``reading`` makes it, to the example's loss, a scalar tensor.
        dataset: a map-style data set of the plan's number of examples, or of persons.
        plan: the public numbers of the run.
        clip_plan: how examples are clipped.
        reading: how an example is read.
        examples: ``together`` under vmap, or ``one_by_one``, which is slower and takes any code.
        max_physical_batch_size: most rows, every view of an example counted, that go through the model at once. It
            bounds memory and changes nothing else.
        disk: takes gradients at DiSK's extrapolated point; None takes them at the parameters.
        frozen_until: parameters that are frozen at first, as in `Phases`.
        record: counts each step, and writes the step to disk, before it is released; None makes a new record without
            a journal, which counts the private steps that are known of the weights.
        ranks: the processes that take each step together; all of them make a step at once.
        seed: fixes sampling, noise and all that is random in a step; whoever knows it can subtract the noise. None
            takes secret keys from the operating system.

    Raises:
        ConfigurationError: naming the setting, or a record that stands in the data set twice.
        ModelError: where nothing is trained.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        dataset: Any,
        *,
        plan: PrivacyPlan,
        clip_plan: ClipPlan | None = None,
        reading: Reading | None = None,
        examples: str = "together",
        max_physical_batch_size: int = 128,
        disk: DiSK | None = None,
        frozen_until: Mapping[str, float] = types.MappingProxyType({}),
        record: RunRecord | None = None,
        ranks: Ranks | None = None,
        seed: int | None = None,
    ) -> None:
        reading = reading or Reading()
        check_step_settings(
            examples=examples,
            max_physical_batch_size=max_physical_batch_size,
            augmult=reading.augmult,
            images_per_group=reading.images_per_group,
        )
        self.module, self.plan, self.clip_plan = module, plan, clip_plan or ClipPlan.flat()
        self.ranks, self.seed, self.disk, self.examples = ranks or Ranks(), seed, disk, examples
        self.parameters = trained_parameters(module)
        self._every = dict(module.named_parameters())
        self.phases = Phases(frozen_until, self.parameters, plan.num_steps)
        owners = (*with_inner(dataset), reading.collate_fn, reading.prepare)
        self.reader = ExampleReader(
            dataset,
            reading,
            seed=seed,
            before=TrainingRandomness(seed, rank=self.ranks.rank, owners=owners).before_reading,
            synthetic_first=examples == "one_by_one",
        )
        if (size := len(self.reader)) != plan.num_train:
            raise ConfigurationError(
                f"The training data set has {size} {'examples' if self.reader.groups is None else 'persons'}, but the "
                f"plan was made for num_train {plan.num_train}. Remove num_train, or correct it."
            )
        if reading.images_per_group is None and self.ranks.rank == 0:
            warn_of_persons(dataset)
        require_single_records(dataset)
        require_own_tensors(module, dataset)
        self.record = record or RunRecord()
        self.record.unit = ONE_EXAMPLE if reading.images_per_group is None else ONE_PERSON
        self.record.reproducible |= seed is not None
        if record is None:
            note_earlier_training(module, self.record)
        #: Number of the first step of this block of correlated noise.
        self.block = self.record.ledger.num_steps
        self._noise_of_count = GaussianNoise(seed=None if seed is None else seed + 2**32)
        self._clip_factor = 1.0  # C over that of the plan, where it adapts
        self._noise_on_sum = plan.noise_multiplier * self.clip_plan.sensitivity
        if self.clip_plan.adaptive is not None:
            for step in (0, plan.num_steps - 1):
                self.clip_plan.adaptive.noises(plan.noise_at(plan.noise_multiplier, step), plan.expected_batch_size)
        self.choose_noise()
        # All ranks draw the same examples.
        self._sampler = PoissonSampler(
            num_train=plan.num_train,
            sample_rate=plan.sample_rate,
            bands=plan.bands,
            key=self.ranks.of_rank_0(sampling_key(seed)),
        )
        self._max_examples = max_physical_batch_size // (reading.augmult * (reading.images_per_group or 1))
        self._isolation = Isolation(module, self.parameters)
        randomness = TrainingRandomness(seed, rank=self.ranks.rank, owners=module.modules())
        self._examples = Examples(examples, self.parameters, self.phases, self._isolation, randomness)
        self._loss, self._sum = loss, ClippedSum(self.parameters, self.clip_plan)
        self._extrapolation = Extrapolation(self.parameters, disk)
        self._structure: Structure | None = None  # of every example
        self._taken: PhysicalBatch | None = None

    def choose_noise(self, response: Sequence[float] = (1.0,)) -> None:
        """Choose the correlation of the noise, before the first step.

        Args:
            response: what the weights get of a gradient in its own step and in those after it, as ``bands`` takes it.
        """
        left = max(self.plan.num_steps - self.block, 1)
        chosen: tuple[float, ...] = (1.0,)
        if self.plan.bands > 1:  # those of one processor for all ranks
            chosen = self.ranks.of_rank_0(coefficients(self.plan.bands, left, tuple(response)))
        self.noise = GaussianNoise(seed=self.seed, coefficients=chosen)
        self._deviations = deviations(chosen, left)

    # One logical step

    def physical_batches(self, step: int) -> Iterator[PhysicalBatch]:
        """This rank's share of the draw of a logical step."""
        draw, ranks = self._sampler.draw(step), self.ranks
        return cut(draw, self._max_examples, step=step, rank=ranks.rank, num_ranks=ranks.size)

    def batches(self) -> Iterator[ExampleBatch]:
        """The physical batches of the next logical step, read one after the other."""
        return map(self.reader.__getitem__, self.physical_batches(self.record.ledger.num_steps))

    def accumulate(self, batch: ExampleBatch) -> None:
        """Add the clipped gradients of a physical batch's examples to the sum of its logical step.

        The first physical batch drops what an abandoned logical batch has left, so that no draw enters two releases.

        Raises:
            BudgetError: when the plan's steps are all taken.
            ModelError: naming what of the module's code cannot be taken example by example, or a parameter that was
                frozen or unfrozen since the run began.
            DataError: when an example has another shape or structure than those before.
        """
        require_same_trained(self._every, self.parameters)
        place, before = batch.place, self._taken
        if place.piece == 0:
            self.require_budget()
            follows = place.step == self.record.ledger.num_steps
        else:
            follows = before is not None and (place.step, place.piece) == (before.step, before.piece + 1)
        if not follows:
            raise DpLightningError(
                f"Physical batch {place.piece} of step {place.step} does not come next: "
                f"{self.record.ledger.num_steps} steps are taken. Ask for the batches() of each step anew: one draw "
                "may enter one release, and each physical batch once."
            )
        self._structure = self._structure or batch.structure
        require_structure(batch.structure, self._structure)
        self._taken = None  # a batch that fails has added some of its examples
        if place.piece == 0:
            self._sum.reset(self._clip_scale(place.step))
            self._extrapolation.advance()
        try:
            with self._extrapolation.away():
                self._examples.add(self._loss, batch.to(self._sum.flat.device), self._sum)
        except Exception as error:
            self.record.faults.add(f"a step ended by an error ({type(error).__name__})")
            raise
        self._taken = place

    @torch.no_grad()
    def release(self, *, stop: bool = False) -> bool:
        """Privatize the logical batch into the ``.grad`` of the parameters; every rank has to call it.

        The step is recorded before anything is released, so that an interruption over-reports rather than
        under-reports.

        Args:
            stop: whether this rank asks all ranks to stop after this step.

        Returns:
            Whether some rank asks to stop.

        Raises:
            BudgetError: when the plan's steps are all taken.
            ModelError: where the module still keeps a tensor of an example that the step before has made.
        """
        self.require_budget()
        require_same_trained(self._every, self.parameters)
        if self._taken is None or not self._taken.last:
            raise DpLightningError("The logical batch is not complete: accumulate all of its physical batches first.")
        self._taken, number, plan = None, self.record.ledger.num_steps, self.plan
        self._isolation.end()
        place = (number - self.block) % plan.bands
        noise_multiplier = plan.noise_at(plan.noise_multiplier, number - place)
        self.record.count(noise_multiplier=noise_multiplier, sample_rate=plan.sample_rate, place=place)
        adaptive, size, count = self.clip_plan.adaptive, plan.expected_batch_size, self._sum.within
        of_gradient, of_count = (noise_multiplier, 0.0) if adaptive is None else adaptive.noises(noise_multiplier, size)
        self._noise_on_sum = of_gradient * self.clip_plan.sensitivity * self._clip_scale(number)
        self.record.noise_coefficients = self.noise.coefficients
        total, noised = self._sum.flat, self.ranks.rank == 0 or self.ranks.size == 1
        if noised:
            total = self.noise.add_to(total, self._noise_on_sum, step=number)
            count = self._noise_of_count.add_to(count, of_count, step=number)
        if self.ranks.size > 1:
            total, count, stop = self._over_ranks(total, count, noised=noised, stop=stop)
        if adaptive is not None:
            following = adaptive.next_norm(self.max_grad_norm, count.item(), size)
            self._clip_factor = following / self.clip_plan.max_grad_norm
        self._sum.reset()
        frozen = self.phases.frozen(number)
        for name, gradient in self._sum.views(total.div_(plan.expected_batch_size)).items():
            self.parameters[name].grad = None if name in frozen else gradient.to(self.parameters[name].dtype)
        released([parameter for name, parameter in self.parameters.items() if name not in frozen], self.record)
        return stop

    def _clip_scale(self, step: int) -> float:
        """C of a step, over that of the first steps."""
        schedule = self.clip_plan.schedule
        return self._clip_factor if schedule is None else schedule.factor(step, self.plan.num_steps)

    def _over_ranks(self, total: Tensor, count: Tensor, *, noised: bool, stop: bool) -> tuple[Tensor, Tensor, bool]:
        """The sums over ranks, in which exactly one has added noise, and whether some rank asks to stop."""
        total = torch.cat([total, count[None], total.new_tensor([float(noised), float(stop)])])
        self.ranks.add_up(total)
        with_noise, stopping = total[-2:].tolist()
        if with_noise != 1:
            raise DpLightningError(
                f"{with_noise:g} of {self.ranks.size} ranks added noise, but exactly one has to: the processes do not "
                "agree on their ranks. Start all of them with the same launcher, and only once."
            )
        return total[:-3], total[-3], stopping > 0

    # Public numbers

    @property
    def noise_level(self) -> float:
        """Standard deviation of independent noise in each entry of the last privatized gradient, sigma S / B.

        Correlated noise is so many times noise of unit scale, as ``bands`` has it.
        """
        return self._noise_on_sum / self.plan.expected_batch_size

    @property
    def max_grad_norm(self) -> float:
        """C of the next step."""
        return self.clip_plan.max_grad_norm * self._clip_scale(self.record.ledger.num_steps)

    @property
    def noise_deviation(self) -> float:
        """Standard deviation of the noise in each entry of the last privatized gradient."""
        return self.noise_level * self._deviations[max(self.record.ledger.num_steps - self.block - 1, 0)]

    @property
    def discarded(self) -> Tensor:
        """How many examples of the logical batch have a gradient that is not finite; not private."""
        return self._sum.discarded

    @property
    def has_gradient(self) -> Tensor:
        """Whether the sum of the logical batch is other than zero on this rank; not private."""
        return self._sum.flat.any()

    def require_budget(self) -> None:
        """Refuse a step beyond the plan.

        Raises:
            BudgetError: when the plan's steps are all taken.
        """
        taken = self.record.ledger.num_steps
        if taken >= self.plan.num_steps:
            raise BudgetError(
                f"The privacy budget is spent: the plan allows {self.plan.num_steps} logical steps and {taken} are "
                "taken. To train longer, plan more steps before the start: num_steps of a PrivacyPlan, or "
                "trainer.max_epochs or trainer.max_steps. Another module needs a run of its own."
            )

    def statement(self, **more: Any) -> PrivacyStatement:
        """The privacy statement of the steps in the record.

        Args:
            more: further fields of ``PrivacyStatement``, such as ``postprocessing`` and ``unprotected``.
        """
        record, reading, persons = self.record, self.reader.reading, self.reader.groups is not None
        clipping = self.clip_plan.describe()
        if not clipping.keys().isdisjoint(("schedule", "adaptive")):
            clipping["latest_max_grad_norm"] = self.max_grad_norm
        if persons:
            clipping["images_per_group"] = f"{reading.images_per_group} images of each person, drawn anew in each step"
        if reading.augmult > 1:
            clipping["augmult"] = f"{reading.augmult} views of each {'image' if persons else 'example'}"
        if phases := self.phases.describe():
            clipping["parameters"] = phases
        if self.disk is not None:
            clipping["gradients"] = f"at DiSK's extrapolated point (gain {self.disk.gain:g})"
        unit = "person" if persons else "example"
        sampler = f"Poisson, each {unit} independently with probability q in every logical step"
        if self.plan.bands > 1:
            sampler += f" of its group, one of {self.plan.bands} in turn"
        faults = set(record.faults)
        if not all(map(all_finite, self.parameters.values())):
            faults.add("weights are not finite")
        fields = {
            "plan": self.plan,
            "ledger": record.ledger,
            "clipping": clipping,
            "examples": self.examples,
            "sensitivity": self.clip_plan.sensitivity,
            "sampler": sampler,
            "noise_coefficients": record.noise_coefficients,
            "unit_of_privacy": record.unit,
            "reproducible": record.reproducible,
            "num_ranks": self.ranks.size,
            "faults": tuple(sorted(faults)),
            "run": record.run,
            "earlier_training": tuple(record.earlier_training),
            "journal_head": "" if record.journal is None else record.journal.head,
            "versions": {name: installed(name) for name in ("dp-lightning", "torch", "lightning", "opacus")},
        }
        if "weights" not in more:
            more["weights"] = digest_of(self.module.state_dict())
        return PrivacyStatement(**{**fields, **more})

    # Resuming

    def state_dict(self) -> dict[str, Tensor]:
        """What the next step needs of the steps before: empty without DiSK, frozen parameters and adaptive clipping."""
        state = self._extrapolation.state_dict() | self.phases.state_dict()
        if self.clip_plan.adaptive is not None:
            state[_CLIP_FACTOR] = torch.tensor(self._clip_factor, dtype=torch.float64)
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from ``state_dict``."""
        if _CLIP_FACTOR in state:
            self._clip_factor = state[_CLIP_FACTOR].item()
        self.phases.load_state_dict(state)
        self._extrapolation.load_state_dict(state)
