"""The Gaussian noise of the mechanism: secret, or from a seed.

Noise is added in float32 on the device of the gradient. Float32 normals have finitely many values, which real-valued
proofs ignore (Mironov 2012; Jin et al. 2021); the guarantee is that of the ideal mechanism.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dp_lightning.privacy.secret_normals import secret_normals


class GaussianNoise:
    """Normal noise, independent or correlated over steps; never drawn twice, and independent of ``seed_everything``.

    The noise of the last b - 1 steps, of unit scale, stays in memory and is never written: whoever has it can subtract
    a part of the next.

    Args:
        seed: None takes ``secret_normals``. A number makes the noise a function of it and of the number of the step,
            which the ledger never gives twice: whoever knows it can subtract the noise, so the run is not for release.
        coefficients: c of ``bands``, of Euclidean norm one; ``(1,)`` is independent noise.
    """

    def __init__(self, *, seed: int | None = None, coefficients: Sequence[float] = (1.0,)) -> None:
        self.seed, self.coefficients = seed, tuple(coefficients)
        self._next: int | None = None  # number of the step whose noise comes next
        self._past = torch.empty(0)  # (b - 1, ...) noise of unit scale: that of step t in row t mod (b - 1)

    def add_to(self, tensor: Tensor, standard_deviation: float, *, step: int) -> Tensor:
        """``tensor`` plus the noise of logical step ``step``, of the given scale, in float32.

        Args:
            standard_deviation: of independent noise; correlated noise is so many times noise of unit scale.
            step: number of the step. Where steps were left out since the last call, their noise is drawn and dropped.
        """
        if standard_deviation == 0:
            return tensor.to(torch.float32, copy=True)
        for left_out in range(step if self._next is None else self._next, step):
            self._unit(tensor, left_out)
        self._next = step + 1
        return self._unit(tensor, step).mul_(standard_deviation).add_(tensor)

    def _unit(self, like: Tensor, step: int) -> Tensor:
        """The noise y of a step, of unit scale; it becomes part of the past."""
        noise, reach = self._normals(like.shape, like.device, step), len(self.coefficients) - 1
        if reach == 0:
            return noise
        if len(self._past) == 0:
            self._past = noise.new_zeros(reach, noise.numel())
        weights = noise.new_tensor([self.coefficients[1 + (step - 1 - row) % reach] for row in range(reach)])
        noise.view(-1).addmv_(self._past.t(), weights, alpha=-1.0).div_(self.coefficients[0])
        self._past[step % reach] = noise.view(-1)
        return noise

    def _normals(self, shape: Sequence[int], device: torch.device, step: int) -> Tensor:
        if self.seed is None:
            return secret_normals(shape, device)
        word = np.random.SeedSequence(self.seed, spawn_key=(step,)).generate_state(1, np.uint64)
        generator = torch.Generator(device=device).manual_seed(int(word[0]))
        return torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32)
