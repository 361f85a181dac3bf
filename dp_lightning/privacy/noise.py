"""The Gaussian noise of the mechanism, from a generator of its own.

Noise is drawn in float32 on the device of the gradient. Float32 normals have finitely many values, which real-valued
proofs ignore (Mironov 2012; Jin et al. 2021); the guarantee is that of the ideal mechanism.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dp_lightning.privacy.seeds import require_same_seed


class GaussianNoise:
    """Independent normal noise; never drawn twice, and independent of ``seed_everything``.

    Args:
        device: where noise is drawn.
        seed: None seeds from the operating system's entropy. A number makes the noise reproducible: whoever knows it
            can subtract the noise, so the run is not fit for release.
    """

    def __init__(self, *, device: torch.device | str = "cpu", seed: int | None = None) -> None:
        self.seed = seed
        self._generator = torch.Generator(device=device)
        # torch takes seeds of 64 bits; the mt19937 of the CPU and the Philox of CUDA both use all of them.
        self._generator.manual_seed(secrets.randbits(63) if seed is None else seed)

    def add_to(self, tensor: Tensor, standard_deviation: float) -> Tensor:
        """``tensor`` plus noise of the given standard deviation, in float32."""
        if standard_deviation == 0:
            return tensor.to(torch.float32, copy=True)
        noise = torch.randn(tensor.shape, generator=self._generator, device=tensor.device, dtype=torch.float32)
        return noise.mul_(standard_deviation).add_(tensor)

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
