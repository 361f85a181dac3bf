"""The Gaussian noise of the mechanism: secret, or from a seed.

Noise is added in float32 on the device of the gradient. Float32 normals have finitely many values, which real-valued
proofs ignore (Mironov 2012; Jin et al. 2021); the guarantee is that of the ideal mechanism.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dp_lightning.privacy.secret_normals import secret_normals
from dp_lightning.privacy.seeds import require_same_seed


class GaussianNoise:
    """Independent normal noise; never drawn twice, and independent of ``seed_everything``.

    Args:
        device: where noise is drawn.
        seed: None takes ``secret_normals``. A number makes the noise reproducible: whoever knows it can subtract the
            noise, so the run is not fit for release.
    """

    def __init__(self, *, device: torch.device | str = "cpu", seed: int | None = None) -> None:
        self.seed = seed
        # Used with a seed alone.
        self._generator = torch.Generator(device=device)
        if seed is not None:
            self._generator.manual_seed(seed)

    def add_to(self, tensor: Tensor, standard_deviation: float) -> Tensor:
        """``tensor`` plus noise of the given standard deviation, in float32."""
        if standard_deviation == 0:
            return tensor.to(torch.float32, copy=True)
        return self._normals(tensor.shape, tensor.device).mul_(standard_deviation).add_(tensor)

    def _normals(self, shape: Sequence[int], device: torch.device) -> Tensor:
        if self.seed is None:
            return secret_normals(shape, device)
        return torch.randn(tuple(shape), generator=self._generator, device=device, dtype=torch.float32)

    def skip(self, shape: Sequence[int], count: int) -> None:
        """Pass by ``count`` draws of this shape, so that a reproducible generator does not give them again."""
        for _ in range(count):
            torch.randn(shape, generator=self._generator, device=self._generator.device, dtype=torch.float32)

    def state_dict(self) -> dict[str, Any]:
        """The generator's state where the noise is reproducible; a secret state is never written."""
        state = self._generator.get_state() if self.seed is not None else None
        return {"seed": self.seed, "generator": state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after a checkpoint: reproducible noise from where it stood, secret noise from fresh entropy.

        Raises:
            ConfigurationError: when the checkpoint's seed is another one.
        """
        require_same_seed("noise_seed", self.seed, state["seed"])
        if self.seed is not None:
            self._generator.set_state(state["generator"])
