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
    """Independent normal noise; never drawn twice, and independent of ``seed_everything``.

    Args:
        seed: None takes ``secret_normals``. A number makes the noise a function of it and of the number of the step,
            which the ledger never gives twice: whoever knows it can subtract the noise, so the run is not for release.
    """

    def __init__(self, *, seed: int | None = None) -> None:
        self.seed = seed

    def add_to(self, tensor: Tensor, standard_deviation: float, *, step: int) -> Tensor:
        """``tensor`` plus the noise of logical step ``step``, of the given standard deviation, in float32."""
        if standard_deviation == 0:
            return tensor.to(torch.float32, copy=True)
        return self._normals(tensor.shape, tensor.device, step).mul_(standard_deviation).add_(tensor)

    def _normals(self, shape: Sequence[int], device: torch.device, step: int) -> Tensor:
        if self.seed is None:
            return secret_normals(shape, device)
        word = np.random.SeedSequence(self.seed, spawn_key=(step,)).generate_state(1, np.uint64)
        generator = torch.Generator(device=device).manual_seed(int(word[0]))
        return torch.randn(tuple(shape), generator=generator, device=device, dtype=torch.float32)
