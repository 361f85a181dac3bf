"""The settings of a private run, stated once: the group ``privacy:`` of a configuration."""

import functools
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, get_args, get_origin, get_type_hints

import lightning.pytorch as pl

from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.accounting import Run
from dp_lightning.privacy.clipping import AdaptiveClipping, ClipPlan
from dp_lightning.privacy.disk import DiSK
from dp_lightning.privacy.groups import Groups
from dp_lightning.privacy.plan import PrivacyPlan, RunShape, best_bands
from dp_lightning.privacy.ranges import check_step_settings
from dp_lightning.privacy.schedules import Schedule
from dp_lightning.privacy.statement import ONE_EXAMPLE, ONE_PERSON

# Solving for the noise can take a second, and is asked for before the data is read and again when the fit starts.
_calibrated = functools.lru_cache(maxsize=4096)(RunShape.calibrate)

#: What a run that resumes has to keep: its statement says it once for all steps.
KEPT = (
    *("examples", "augmult", "unit_of_privacy", "images_per_group", "clipping", "clip_factor", "max_grad_norm"),
    *("disk", "frozen_until", "bands", "noise_schedule", "clip_schedule"),
    *("adaptive_clipping", "seed"),
)


@dataclass(eq=False, repr=False)
class PrivacySettings:
    """What a user sets of a private run.

    Exactly one of ``target_epsilon`` and ``noise_multiplier`` is given.

    Args:
        expected_batch_size: B, the mean number of examples in a logical batch.
        target_epsilon: the epsilon that the whole run may spend; the noise is solved for it.
        noise_multiplier: sigma, the noise's standard deviation over the sensitivity.
        delta: reserve for which epsilon promises nothing; should be at most 0.1/N, and has to be below 1/N.
        max_grad_norm: C, the most that one example can contribute, in L2 norm.
        clipping: one norm over all parameters, or one per layer with C / sqrt(L) each.
        clip_factor: ``abadi`` min(1, C/norm), or ``automatic`` C/(norm + 0.01).
        examples: how ``training_step`` sees one example at a time. ``together``: all of a physical batch at once, under
            torch.func.vmap. ``one_by_one``: one after the other, slower, for code that vmap cannot run.
        max_physical_batch_size: most images that go through the model at once, every view of ``augmult`` counted, not
            those of features, and every image of a person. It bounds memory and changes nothing else.
        accountant: by which epsilon is planned and shown.
        num_train: N; None reads it from the training data set. A number that differs from the data set is refused.
        unit_of_privacy: what one neighbour adds or removes. ``example``: one element of the training set. ``group``:
            one person, all elements with the same id in the data set's ``groups``; N and B then count persons.
        images_per_group: how many images of a person are drawn for each step in which the person takes part; 1 without
            it. They are the rows of one example, whose gradient is clipped once.
        reproducible: fixes sampling, noise, dropout and augmentation by the seed of ``seed_everything`` (0 without
            one), and makes the run not fit for release.
        not_private: must be true to allow ``noise_multiplier: 0``.
        augmult: K, augmentation multiplicity (De et al. 2022): ``training_step`` sees K views of each example, drawn
            anew by the data set's transform, and the gradient of its loss is clipped once. It costs no privacy.
        disk: takes each example's gradient where DiSK does (Zhang et al. 2025); its filter is `Kalman` in the
            post-processing. None is the gradient at the parameters.
        frozen_until: parameters that stay frozen at first, as patterns of their names to shares of the planned steps,
            such as ``{"model.blocks.*": 0.3}``. It costs no privacy, and their noise is left out with them.
        batch_norm: what becomes of BatchNorm layers before the optimizer is made. ``refuse``: nothing, and a step that
            trains one is an error. ``group``: each becomes a GroupNorm with its scale and shift. ``freeze``: each stays
            in evaluation mode with its running statistics, which have to come from public data, and its scale and shift
            are not trained.
        bands: b, over how many steps noise is correlated, so that much of it cancels in the weights at the same epsilon
            (banded matrix factorization, Choquette-Choo et al. 2023); at most N/B. The more steps, the smaller the best
            b. 1 is independent noise, and ``auto`` takes the b that leaves the smallest error in a sum of all
            gradients.
        noise_schedule: how sigma changes over the steps, such as ``{shape: cosine, final: 0.5}``;
            ``noise_multiplier`` is that of the first steps. None keeps it.
        clip_schedule: how C changes likewise; None keeps it.
        adaptive_clipping: lets C follow a quantile of the norms of gradients (Andrew et al. 2021), with flat clipping,
            such as ``{quantile: 0.5}``; ``max_grad_norm`` is that of the first step. It costs no epsilon, and up to 5 %
            more noise. None keeps C.
        earlier_training: on what the weights were trained before the run. ``same_data``: private steps that are known
            count in this run's epsilon, and steps without privacy in this process keep it from release. ``other_data``:
            on other people's data, or public data, by your word; the statement says so.

    Raises:
        ConfigurationError: naming the setting and the fix.
    """

    expected_batch_size: int
    target_epsilon: float | None = None
    noise_multiplier: float | None = None
    delta: float = 1e-5
    max_grad_norm: float = 1.0
    clipping: Literal["flat", "per_layer"] = "flat"
    clip_factor: Literal["abadi", "automatic"] = "abadi"
    examples: Literal["together", "one_by_one"] = "together"
    max_physical_batch_size: int = 128
    accountant: Literal["prv", "rdp", "pld"] = "prv"
    num_train: int | None = None
    unit_of_privacy: Literal["example", "group"] = "example"
    images_per_group: int | None = None
    reproducible: bool = False
    not_private: bool = False
    augmult: int = 1
    disk: DiSK | None = None
    frozen_until: dict[str, float] | None = None
    batch_norm: Literal["refuse", "group", "freeze"] = "refuse"
    bands: int | Literal["auto"] = 1
    noise_schedule: Schedule | None = None
    clip_schedule: Schedule | None = None
    adaptive_clipping: AdaptiveClipping | None = None
    earlier_training: Literal["same_data", "other_data"] = "same_data"

    def __post_init__(self) -> None:
        self._check_noise()
        for name, kind in get_type_hints(PrivacySettings).items():
            if get_origin(kind) is Literal and getattr(self, name) not in (choices := get_args(kind)):
                raise ConfigurationError(
                    f"privacy.{name} is {getattr(self, name)!r}; choose {' or '.join(map(repr, choices))}."
                )
        self._check_images_per_group()
        check_step_settings(
            examples=self.examples,
            max_physical_batch_size=self.max_physical_batch_size,
            augmult=self.augmult,
            images_per_group=self.images_per_group,
        )
        self.clip_plan = ClipPlan(
            kind=self.clipping,
            factor=self.clip_factor,
            max_grad_norm=float(self.max_grad_norm),
            schedule=self.clip_schedule,
            adaptive=self.adaptive_clipping,
        )

    def _check_noise(self) -> None:
        if (self.target_epsilon is None) == (self.noise_multiplier is None):
            raise ConfigurationError(
                "Set exactly one of privacy.target_epsilon (the noise is solved for it) and privacy.noise_multiplier; "
                f"they are {self.target_epsilon} and {self.noise_multiplier}."
            )
        if self.not_private != (self.noise_multiplier == 0):
            raise ConfigurationError(
                f"privacy.noise_multiplier is {self.noise_multiplier} and privacy.not_private is {self.not_private}. "
                "Set noise_multiplier: 0 and not_private: true for a run that is not private, or neither."
            )
        if self.bands == "auto" and self.target_epsilon is None:
            raise ConfigurationError("privacy.bands is auto, which needs privacy.target_epsilon. Set it, or a number.")

    def _check_images_per_group(self) -> None:
        if self.unit_of_privacy == "group":
            self.images_per_group = 1 if self.images_per_group is None else self.images_per_group
        elif self.images_per_group is not None:
            raise ConfigurationError(
                f"privacy.images_per_group is {self.images_per_group}, but each image is an example of its own. Set "
                "privacy.unit_of_privacy: group to protect persons, or remove images_per_group."
            )

    @property
    def unit(self) -> str:
        """What one neighbour adds or removes, in words."""
        return ONE_EXAMPLE if self.images_per_group is None else ONE_PERSON

    @property
    def seed(self) -> int | None:
        """What fixes all random numbers of a reproducible run; None takes secret keys."""
        return int(os.environ.get("PL_GLOBAL_SEED", 0)) if self.reproducible else None

    def num_train_of(self, dataset: Any) -> int:
        """N: the examples of a training set, or its persons."""
        if self.num_train is not None:
            return self.num_train
        return len(dataset if self.images_per_group is None else Groups(dataset, self.images_per_group))

    def shape_for(self, trainer: pl.Trainer, num_train: int) -> RunShape:
        """N, B, T and delta of a run with the trainer's limits, which `RunShape.of_length` takes and may refuse."""
        limits = {name: getattr(trainer, name) for name in ("max_epochs", "max_steps", "limit_train_batches")}
        return self.shape_of(num_train, **limits)

    def shape_of(self, num_train: int, **limits: Any) -> RunShape:
        """The same for ``limits`` as `RunShape.of_length` takes them; ``auto`` bands leave the smallest error."""
        size, delta = self.expected_batch_size, self.delta
        shape = RunShape.of_length(num_train=num_train, expected_batch_size=size, delta=delta, **limits)
        shape = replace(shape, noise_schedule=self.noise_schedule)
        if self.bands != "auto":
            return replace(shape, bands=self.bands)
        return replace(shape, bands=best_bands(shape, self.target_epsilon or 1.0))

    def make_plan(self, shape: RunShape, *, spent: tuple[Run, ...] = (), steps_taken: int = 0) -> PrivacyPlan:
        """The plan of a run of this shape: with the noise that is set, or the noise that the target needs.

        ``spent``, ``steps_taken`` and what it raises are those of `RunShape.calibrate`.
        """
        if self.target_epsilon is None:
            return self.plan_with(shape, self.noise_multiplier or 0.0)
        before = {"spent": spent, "steps_taken": steps_taken}
        return _calibrated(shape, self.target_epsilon, accountant=self.accountant, **before)

    def plan_with(self, shape: RunShape, noise_multiplier: float) -> PrivacyPlan:
        """The plan of a run of this shape and noise, held to the accountant and the target that are set."""
        return shape.with_noise(noise_multiplier, accountant=self.accountant, target_epsilon=self.target_epsilon)

    @property
    def values(self) -> dict[str, Any]:
        """The settings in plain values, with the seed of a reproducible run; ranks need all of them in common."""
        return {**asdict(self), "seed": self.seed}

    def require_same(self, earlier: Mapping[str, Any]) -> None:
        """Refuse to resume with other settings than the ``values`` of the run before, where its statement has one.

        Raises:
            ConfigurationError: naming them.
        """
        now = self.values
        if changed := [name for name in KEPT if earlier.get(name) != now[name]]:
            said = (f"privacy.{name} {earlier.get(name)}, and it is {now[name]} now" for name in changed)
            raise ConfigurationError(
                f"The checkpoint's run has {', '.join(said)}: one statement speaks for all steps. Set it "
                "to the run's value."
            )
