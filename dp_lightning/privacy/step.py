"""One logical step from the draw to the release: the private mechanism in one place.

For the Poisson draw S from N examples, each taken with probability q = B/N, a step releases

    g = (sum over i in S of clip(grad l_i)  +  Normal(0, (sigma * sensitivity)^2 I)) / B.

Formal guarantee. Let the parameters and all earlier releases be given.

1. S is a Poisson draw with a secret key (``sampling``).
2. Each example is read by itself (``reading``), and its loss l_i is computed where no other example can be reached
   (``examples``, ``isolation``), with secret random numbers (``randomness``): l_i is a function of example i, the
   weights, the number of the step, and random numbers that no one knows. What is trusted: each element of the data set
   is a separate record (``records`` finds those that are not, as far as it can), its ``__getitem__`` looks at one,
   torch's kernels treat rows separately, and code around the step neither reads the training set nor depends on what a
   training metric or a logger holds. ``docs/sharp_edges.md`` lists what is known to get around this.
3. ``clip`` bounds what one example adds to the sum by ``sensitivity`` (``clipping``, ``gradients``); an example whose
   gradient is not finite adds nothing.
4. B is a constant of the plan, and the step is released whatever the draw is, the empty one included.
5. The noise is independent, and drawn once (``noise``). The step is on disk (``journal``) and in the ledger before
   anything is released.

Each release is then a Poisson-subsampled Gaussian mechanism with noise multiplier sigma and sampling probability q, for
neighbours that differ by adding or removing one example. The ledger counts the releases, and its accountants give
(epsilon, delta) for all of them together. Everything computed from the releases alone is post-processing.

Where the unit of privacy is a person, read "person" for "example": N counts persons, and l_i is the loss of
``images_per_group`` elements of person i (``groups``), drawn by random numbers that follow from no other person.

Several ranks take one step together: S is one draw, dealt out to them; each rank sums its share, rank 0 adds the noise
to its own sum, and one collective adds up the sums. What is released is the same on every rank, bit for bit.
"""

import math
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dp_lightning.errors import BudgetError, ConfigurationError, DpLightningError, ModelError
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.disk import DiSK, Extrapolation
from dp_lightning.privacy.examples import (
    MODES,
    Examples,
    Loss,
    OneByOne,
    Together,
    require_same_trained,
    trained_parameters,
)
from dp_lightning.privacy.gradients.clipped_sum import ClippedSum
from dp_lightning.privacy.groups import Groups
from dp_lightning.privacy.isolation.between_examples import Isolation
from dp_lightning.privacy.isolation.later import Later
from dp_lightning.privacy.isolation.reachable import Ignored, NamesOf, no_names, nothing_ignored
from dp_lightning.privacy.isolation.sealed_data import SealedData
from dp_lightning.privacy.noise import GaussianNoise
from dp_lightning.privacy.phases import Phases
from dp_lightning.privacy.plan import PrivacyPlan
from dp_lightning.privacy.randomness import TrainingRandomness
from dp_lightning.privacy.reading import (
    ExampleBatch,
    ExampleReader,
    Structure,
    form_of,
    require_shapes,
    require_structure,
)
from dp_lightning.privacy.record import RunRecord, origin_of, released
from dp_lightning.privacy.records import require_single_records
from dp_lightning.privacy.sampling import Key, PhysicalBatch, PoissonSampler, cut, sampling_key
from dp_lightning.privacy.statement import ONE_EXAMPLE, ONE_PERSON, PrivacyStatement, installed
from dp_lightning.privacy.weights import digest_of
from dp_lightning.processors import all_finite
from dp_lightning.ranks import Ranks


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
        module: parameters that require a gradient now are the trained ones.
        loss: from a batch of one example, as ``collate_fn`` makes it, to its loss, a scalar tensor. What it leads to
            is compared like the module.
        dataset: a map-style data set of the plan's number of examples, or of persons.
        plan: the public numbers of the run.
        clip_plan: how examples are clipped.
        collate_fn: makes a batch of one example from a list of its views.
        examples: ``together`` under vmap, or ``one_by_one``, which is slower and takes any code.
        max_physical_batch_size: most rows, every view of an example counted, that go through the model at once. It
            bounds memory and changes nothing else.
        constant_shapes: fill each physical batch up to that size by synthetic examples that do not count; under
            ``one_by_one`` it changes nothing.
        augmult: K, the views of each element in its batch of one.
        images_per_group: k, where an example is a person: how many elements of a group of the data set are drawn for
            each step, the rows of one example. None where each element is an example.
        disk: takes gradients where DiSK does; None is at the parameters.
        frozen_until: parameters that are frozen at first, as in `Phases`.
        record: of the run, where each release is counted before it is made; None is a new one, which counts what is
            known to have trained the module before.
        ranks: the processes that take each step together.
        sampling_key: of the draws, the same on all ranks; None makes a secret one.
        seed: fixes sampling, noise and all that is random in a step; whoever knows it can subtract the noise. None
            takes secret keys from the operating system.
        prepare: applied to the batch of one example after collation, before examples are stacked.
        ignored: asked with an object and the name of one of its attributes, whether it is no state of the module.
        by_identity: names of an object's ignored attributes that a loss must leave as they are.
        raw: further objects that hold training data.
        also: further objects, by name, that the loss may change.

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
        collate_fn: Callable[[list[Any]], Any] = default_collate,
        examples: str = "together",
        max_physical_batch_size: int = 128,
        constant_shapes: bool = False,
        augmult: int = 1,
        images_per_group: int | None = None,
        disk: DiSK | None = None,
        frozen_until: Mapping[str, float] = types.MappingProxyType({}),
        record: RunRecord | None = None,
        ranks: Ranks | None = None,
        sampling_key: Key | None = None,
        seed: int | None = None,
        prepare: Callable[[Any], Any] | None = None,
        ignored: Ignored = nothing_ignored,
        by_identity: NamesOf = no_names,
        raw: tuple[object, ...] = (),
        also: Mapping[str, object] = types.MappingProxyType({}),
    ) -> None:
        check_step_settings(
            examples=examples,
            max_physical_batch_size=max_physical_batch_size,
            augmult=augmult,
            images_per_group=images_per_group,
        )
        self.module, self.plan, self.clip_plan = module, plan, clip_plan or ClipPlan.flat()
        unit = ONE_EXAMPLE if images_per_group is None else ONE_PERSON
        self.record = record or RunRecord(unit=unit, reproducible=seed is not None)
        self.ranks = ranks or Ranks()
        #: What a GPU finds out between two releases, which is read once, before the second.
        self.later = Later(partial(_note_error, self.record.faults))
        self.parameters = trained_parameters(module)
        self._every = dict(module.named_parameters())
        self.phases = Phases(frozen_until, self.parameters, plan.num_steps)
        groups = _checked_groups(dataset, images_per_group, seed, plan.num_train)
        if record is None:  # counted after all that may refuse the run
            self.record.origin = origin_of(module, self.record, other_data=False)
        self.record.faults.update(self.record.origin.faults)
        self.noise = GaussianNoise(seed=seed)
        self.seed, self.randomness = seed, TrainingRandomness(seed, rank=self.ranks.rank)
        self._max_examples = max_physical_batch_size // (augmult * (images_per_group or 1))
        together = examples == "together"
        self.reader = ExampleReader(
            dataset,
            collate_fn,
            augmult=augmult,
            groups=groups,
            prepare=prepare,
            before=self.randomness.before_reading,
            ignored=ignored,
            synthetic_first=not together,
            filled_to=self._max_examples if constant_shapes and together else None,
        )
        self._loss = loss
        self._sampler = PoissonSampler(
            num_train=plan.num_train, sample_rate=plan.sample_rate, key=_sampling_key(sampling_key, seed)
        )
        self.examples, self.disk = examples, disk
        self._ignored, self._by_identity, self._raw, self._also = ignored, by_identity, (dataset, *raw), also
        self._sum = ClippedSum(self.parameters, self.clip_plan)
        self._extrapolation = None if disk is None else Extrapolation(self.parameters, disk.length)
        self._form: tuple[Structure, list[tuple[int, ...]]] | None = None
        self._taken: PhysicalBatch | None = None
        self._stops = False  # whether a rank has asked to stop after the last step

    # One logical step

    @cached_property
    def _mode(self) -> Examples:
        self.randomness.start()
        roots = {"self": self.module, "the data set": self.reader.dataset, "collate_fn": self.reader.collate_fn}
        also = {"loss": self._loss, **self._also}
        self.randomness.rekey({**roots, **also}, self._ignored)
        isolation = Isolation(
            self.module,
            self.parameters,
            sealed=SealedData(self._raw, self.plan.num_train, self.module, self._ignored),
            later=self.later,
            generators=self.randomness.generators,
            ignored=self._ignored,
            by_identity=self._by_identity,
            also=also,
        )
        mode = Together if self.examples == "together" else OneByOne
        return mode(self.parameters, self.phases, isolation, self.randomness)

    def start(self) -> None:
        """Take secret keys, and note which constants the losses may use; otherwise the first batch does."""
        _ = self._mode

    def nothing_kept(self) -> AbstractContextManager[None]:
        """Around losses that are no step, such as those of a trial: what they leave behind is put back.

        Raises:
            ModelError: naming what cannot be.
        """
        return self.isolation.nothing_kept()

    def physical_batches(self, step: int) -> Iterator[PhysicalBatch]:
        """This rank's share of the draw of a logical step."""
        draw, ranks = self._sampler.draw(step), self.ranks
        return cut(draw, self._max_examples, step=step, rank=ranks.rank, num_ranks=ranks.size)

    def batches(self) -> Iterator[ExampleBatch]:
        """The physical batches of the next logical step, read one after the other."""
        self.start()
        return map(self.reader.__getitem__, self.physical_batches(self.record.ledger.num_steps))

    def accumulate(self, batch: ExampleBatch) -> None:
        """Add the clipped gradients of a physical batch's examples to the sum of its logical step.

        The first one of a logical batch drops what an abandoned one has left, so that no draw enters two releases.

        Raises:
            BudgetError: when the plan's steps are all taken.
            ModelError: naming what of the module's code cannot be taken example by example, or a parameter that was
                frozen or unfrozen since the run began.
            DataError: when an example has another shape or structure than those before, or no tensor.
        """
        require_same_trained(self._every, self.parameters)
        place, batch = batch.place, batch.to(self._device)
        if place.piece == 0:
            self._begin()
        elif self._taken is None or (place.step, place.piece) != (self._taken.step, self._taken.piece + 1):
            raise DpLightningError(f"{place} does not follow {self._taken}: the physical batches were reordered.")
        self._require_one_form(batch)
        if self._extrapolation is not None:
            self._extrapolation.away()
        try:
            self._mode.add(self._loss, batch, self._sum)
        except Exception as error:
            _note_error(self.record.faults, error)
            raise
        finally:
            if self._extrapolation is not None:
                self._extrapolation.back()
        self._taken = place

    @torch.no_grad()
    def release(self, *, stop: bool = False) -> bool:
        """Privatize the logical batch into the ``.grad`` of the parameters; every rank has to call it.

        The step is recorded before anything is released, so that an interruption over-reports rather than
        under-reports.

        Args:
            stop: whether this rank asks all ranks to stop after this step.

        Returns:
            Whether some rank asks to.

        Raises:
            BudgetError: when the plan's steps are all taken.
            ModelError: where a GPU has found a reason for which ``accumulate`` raises it on a CPU. The step is counted
                then, and neither it nor a later one is released.
        """
        self.require_budget()
        require_same_trained(self._every, self.parameters)
        if self._taken is None or not self._taken.last:
            raise DpLightningError("The logical batch is not complete: accumulate all of its physical batches first.")
        self._taken, number = None, self.record.ledger.num_steps
        self.record.count(noise_multiplier=self.plan.noise_multiplier, sample_rate=self.plan.sample_rate)
        total, noised, self._stops = self._sum.flat, self.ranks.rank == 0, stop
        if noised:
            total = self.noise.add_to(total, self.noise_standard_deviation, step=number)
        if self.ranks.size > 1:
            total = self._over_ranks(total, noised=noised, stop=stop)
        self.later.settle()
        self._sum.reset()
        frozen = self.phases.frozen(number)
        for name, gradient in self._sum.views(total.div_(self.plan.expected_batch_size)).items():
            self.parameters[name].grad = None if name in frozen else gradient.to(self.parameters[name].dtype)
        released([p for name, p in self.parameters.items() if name not in frozen], self.record)
        self.isolation.advance()
        return self._stops

    def stepped(self) -> None:
        """The optimizer has stepped, and what belongs to its step is done: until the next loss nothing else changes the
        model.

        A loop without Lightning need not say so: there, an optimizer's step ends where torch says it does, and the
        trained parameters alone are compared.
        """
        self.isolation.stepped()

    # Public numbers

    @property
    def noise_standard_deviation(self) -> float:
        """Of the noise on the sum, before the division by B."""
        return self.plan.noise_on_sum(self.clip_plan.sensitivity)

    @property
    def noise_level(self) -> float:
        """Standard deviation of the noise in each entry of the privatized gradient, sigma S / B."""
        return self.plan.noise_level(self.clip_plan.sensitivity)

    @property
    def methods(self) -> dict[str, str]:
        """How the gradients of each parameter were taken in the last physical batch; without those not used."""
        return self._mode.methods

    @property
    def isolation(self) -> Isolation:
        """What the module keeps from example to example, and from step to step."""
        return self._mode.isolation

    @property
    def discarded(self) -> Tensor:
        """How many examples of the logical batch have a gradient that is not finite; not private."""
        return self._sum.discarded

    def require_budget(self) -> None:
        """Refuse a step beyond the plan.

        Raises:
            BudgetError: when the plan's steps are all taken.
        """
        if (taken := self.record.ledger.num_steps) >= self.plan.num_steps:
            raise BudgetError(
                f"The privacy budget is spent: the plan allows {self.plan.num_steps} logical steps and "
                f"{taken} are taken. To train longer, plan more steps before the start: num_steps of a "
                "PrivacyPlan, or trainer.max_epochs or trainer.max_steps. Another module needs a PrivateStep of its "
                "own, or a PrivacyCallback and a Trainer."
            )

    def statement(self, **more: Any) -> PrivacyStatement:
        """The privacy statement of the steps in the ledger.

        Args:
            more: further fields of ``PrivacyStatement``, such as ``postprocessing`` and ``unprotected``.
        """
        record, clipping, groups = self.record, self.clip_plan.describe(), self.reader.groups
        one = "example" if groups is None else "person"
        if groups is not None:
            clipping["images_per_group"] = f"{groups.images_per_group} images of each person, drawn anew in each step"
        if self.reader.augmult > 1:
            clipping["augmult"] = f"{self.reader.augmult} views of each {'example' if groups is None else 'image'}"
        if phases := self.phases.describe():
            clipping["parameters"] = phases
        if self.disk is not None:
            clipping["gradients"] = self.disk.describe()
        fields = {
            "plan": self.plan,
            "ledger": record.ledger,
            "clipping": clipping,
            "examples": self.examples,
            "sensitivity": self.clip_plan.sensitivity,
            "sampler": f"Poisson, each {one} independently with probability q in every logical step",
            "unit_of_privacy": record.unit,
            "reproducible": record.reproducible,
            "num_ranks": self.ranks.size,
            "faults": tuple(self.all_faults),
            "run": record.run,
            "earlier_training": tuple(record.origin.words),
            "journal_heads": () if record.journal is None else record.journal.heads,
            "versions": {name: installed(name) for name in ("dp-lightning", "torch", "opacus")},
        }
        if "weights" not in more:
            fields["weights"] = digest_of(self.module.state_dict())
        return PrivacyStatement(**{**fields, **more})

    @property
    def all_faults(self) -> list[str]:
        """What keeps the model, as it is now, from release."""
        self.later.look()
        found = set(self.record.faults)
        if not all(map(all_finite, self.parameters.values())):
            found.add("weights are not finite")
        if touched := self.isolation.touched():
            found.add(f"other code than the optimizer has changed {', '.join(touched[:5])} after the last step")
        return sorted(found)

    # Resuming

    def state_dict(self) -> dict[str, Tensor]:
        """What the next step needs of the steps before: empty without DiSK and without frozen parameters."""
        disk = {} if self._extrapolation is None else self._extrapolation.state_dict()
        return {**disk, **self.phases.state_dict()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Continue from ``state_dict``."""
        self.phases.load_state_dict(state)
        if self._extrapolation is not None:
            self._extrapolation.load_state_dict(state)

    @property
    def _device(self) -> torch.device:
        return next(iter(self.parameters.values())).device

    def _begin(self) -> None:
        self.require_budget()
        self._sum.reset()
        if self._extrapolation is not None:
            self.isolation.begin_elsewhere()
            self._extrapolation.advance()

    def _require_one_form(self, batch: ExampleBatch) -> None:
        structure, shapes = form_of(batch)
        if self._form is None:
            self._form = structure, shapes
        require_structure(structure, self._form[0])
        require_shapes(shapes, self._form[1])

    def _over_ranks(self, total: Tensor, *, noised: bool, stop: bool) -> Tensor:
        """The sum over ranks, in which one has added noise."""
        facts = total.new_tensor([float(noised), float(stop)])
        total = torch.cat([total, facts, self.later.wrong(total.device).view(1)])
        self.ranks.add_up(total)
        self.later.read(total[-3:].clone(), self._agree)
        return total[:-3]

    def _agree(self, flags: Tensor) -> None:
        """How many ranks have added noise, ask to stop, and have found something wrong."""
        with_noise, stopping, wrong = flags.tolist()
        self._stops = stopping > 0
        if wrong:
            raise ModelError(
                f"{wrong:g} of {self.ranks.size} processes found on their GPU that training_step or other code changed "
                "what it must not; they say what."
            )
        if with_noise != 1:
            raise DpLightningError(
                f"{with_noise:g} of {self.ranks.size} ranks added noise, but exactly one has to: the processes do not "
                "agree on their ranks. Start all of them with the same launcher, and only once."
            )


def _note_error(faults: set[str], error: Exception) -> None:
    """In words; it refers to no step, since what knows the run's faults outlives it."""
    faults.add(f"a step ended by an error ({type(error).__name__})")


def check_step_settings(
    *, examples: str, max_physical_batch_size: int, augmult: int, images_per_group: int | None = None
) -> None:
    """Refuse values outside of their ranges.

    Raises:
        ConfigurationError: naming the setting.
    """
    if examples not in MODES:
        raise ConfigurationError(f"privacy.examples is {examples!r}; choose 'together' or 'one_by_one'.")
    counts = {"augmult": augmult, "images_per_group": 1 if images_per_group is None else images_per_group}
    for name, count in counts.items():
        if count < 1:
            raise ConfigurationError(f"privacy.{name} is {count}; it must be at least 1.")
    if max_physical_batch_size < (rows := math.prod(counts.values())):
        names = " times ".join(f"privacy.{name}" for name, count in counts.items() if count > 1)
        raise ConfigurationError(
            f"privacy.max_physical_batch_size is {max_physical_batch_size}; it must be at least {rows}"
            + (f", {names}: all rows of an example go through the model at once." if names else ".")
        )


def _checked_groups(dataset: Any, images_per_group: int | None, seed: int | None, num_train: int) -> Groups | None:
    """The persons of a data set that has as many as the plan, and no record twice; None where elements are examples."""
    groups = None if images_per_group is None else Groups(dataset, images_per_group, seed=seed)
    if (size := len(dataset if groups is None else groups)) != num_train:
        raise ConfigurationError(
            f"The training data set has {size} {'examples' if groups is None else 'persons'}, but the plan was made "
            f"for num_train {num_train}. Remove num_train, or correct it."
        )
    require_single_records(dataset)
    return groups


def _sampling_key(key: Key | None, seed: int | None) -> Key:
    return sampling_key(seed) if key is None else key
