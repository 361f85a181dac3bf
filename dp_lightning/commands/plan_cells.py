"""The cells of a plan's table: a run for each combination of batch size, length and epsilon."""

from collections.abc import Sequence
from dataclasses import dataclass

from dp_lightning.analysis import detection_norm, recovery_gap
from dp_lightning.errors import ConfigurationError
from dp_lightning.privacy.clipping import ClipPlan
from dp_lightning.privacy.plan import PrivacyPlan, RunShape


@dataclass(frozen=True)
class Matrices:
    """Trained matrices of one shape.

    Attributes:
        rows, columns: m and n of a parameter viewed as a matrix.
        count: how many there are.
        bound: the most, in L2 norm, that clipping leaves of an example's gradient of one of them.
    """

    rows: int
    columns: int
    count: int
    bound: float


@dataclass(frozen=True, kw_only=True)
class Basis:
    """What all cells have in common.

    Attributes:
        name: of the model and the data.
        num_train, delta, accountant, clip_plan: of the run.
        unit: what N and B count, in the plural.
        batch_size: B of the configuration.
        max_epochs, max_steps, limit_train_batches: the length of the configuration's run, as in `RunShape.of_length`.
        epsilon, noise_multiplier: of the configuration; one of them is None.
        num_parameters: d, the number of trained parameters; None if it is not known.
        matrices: the trained matrices by shape.
        seconds_per_example: of a private step on this machine, for each of its examples; None if it was not measured.
        device: on which it was measured.
    """

    name: str
    num_train: int
    delta: float
    accountant: str
    clip_plan: ClipPlan
    unit: str = "examples"
    batch_size: int | None = None
    max_epochs: int | None = None
    max_steps: int = -1
    limit_train_batches: float = 1.0
    epsilon: float | None = None
    noise_multiplier: float | None = None
    num_parameters: int | None = None
    matrices: tuple[Matrices, ...] = ()
    seconds_per_example: float | None = None
    device: str | None = None

    @property
    def batch_sizes(self) -> list[int]:
        """B from a quarter to four times the configuration's; or powers of two with q from 0.5 % to 20 %."""
        if self.batch_size is None:
            powers = [2**power for power in range(40) if 0.005 <= 2**power / self.num_train <= 0.2]
            return powers or [1]
        return sorted({min(max(self.batch_size * 2**power // 4, 1), self.num_train) for power in range(5)})


@dataclass(frozen=True)
class Cell:
    """A run of the table.

    Attributes:
        basis: what it has in common with the others.
        plan: its public numbers.
        epsilon: what it may spend; with a noise multiplier that is set, what it spends.
        length: what limits its steps, in words.
    """

    basis: Basis
    plan: PrivacyPlan
    epsilon: float
    length: str

    @property
    def epochs(self) -> float:
        """T B / N, the expected number of times that an example is drawn."""
        return self.plan.num_steps * self.plan.sample_rate

    @property
    def noise_level(self) -> float:
        """Standard deviation of the noise in each coordinate of the privatized gradient, sigma S / B."""
        return self.plan.noise_level(self.basis.clip_plan.sensitivity)

    @property
    def noise_over_clipping(self) -> float | None:
        """The norm of the noise over C, sigma S sqrt(d) / (B C); None if d is not known."""
        if self.basis.num_parameters is None:
            return None
        clip_plan = self.basis.clip_plan
        norm = self.plan.noise_norm(num_parameters=self.basis.num_parameters, sensitivity=clip_plan.sensitivity)
        return norm / clip_plan.max_grad_norm

    @property
    def seconds(self) -> float | None:
        """An estimate for all steps of the run on this machine; None if nothing was measured."""
        if self.basis.seconds_per_example is None:
            return None
        return self.basis.seconds_per_example * self.plan.num_steps * self.plan.expected_batch_size

    def recovery(self, matrices: Matrices) -> float:
        """The s1 - s2 above which Wedin's bound is informative, over the most that clipping leaves."""
        return recovery_gap(matrices.rows, matrices.columns, noise_level=self.noise_level) / matrices.bound

    def detection(self, matrices: Matrices) -> float:
        """The s1 of the spiked-matrix threshold, over the most that clipping leaves."""
        return detection_norm(matrices.rows, matrices.columns, noise_level=self.noise_level) / matrices.bound


def cells_of(
    basis: Basis,
    *,
    batch_sizes: Sequence[int] | None = None,
    epochs: Sequence[int] | None = None,
    epsilons: Sequence[float] | None = None,
) -> list[Cell]:
    """Every combination, in the order epsilon, length, batch size; None takes the configuration's.

    Raises:
        ConfigurationError: for a batch size out of range, or an epsilon that cannot be reached.
    """
    sizes = basis.batch_sizes if batch_sizes is None else sorted(set(batch_sizes))
    if wrong := [size for size in sizes if not 1 <= size <= basis.num_train]:
        raise ConfigurationError(
            f"--batch-size has {', '.join(map(str, wrong))}; choose from 1 to the number of training {basis.unit}, "
            f"{basis.num_train}."
        )
    limits = [(basis.max_epochs, basis.max_steps)] if epochs is None else [(each, -1) for each in sorted(set(epochs))]
    targets = [basis.epsilon] if epsilons is None else sorted(set(epsilons))
    found = []
    for target in targets:
        for max_epochs, max_steps in limits:
            length = f"{max_epochs} epochs" if max_steps == -1 else f"at most {max_steps} steps"
            for size in sizes:
                shape = RunShape.of_length(
                    num_train=basis.num_train,
                    expected_batch_size=size,
                    delta=basis.delta,
                    max_epochs=max_epochs,
                    max_steps=max_steps,
                    limit_train_batches=basis.limit_train_batches,
                )
                if target is not None:
                    plan = shape.calibrate(target, accountant=basis.accountant)
                else:
                    assert basis.noise_multiplier is not None
                    plan = shape.with_noise(basis.noise_multiplier, accountant=basis.accountant)
                found.append(Cell(basis, plan, plan.epsilon() if target is None else target, length))
    return found
