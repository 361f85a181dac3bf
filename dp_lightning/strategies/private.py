"""Several processes, one private step: the strategy ``dp_ddp``.

Lightning's ``ddp`` wraps the module in DistributedDataParallel for the sake of averaged gradients. A private step adds
up clipped sums itself, so the module stays unwrapped here.
"""

import torch.distributed
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from torch.nn.parameter import is_lazy

from dp_lightning.errors import ConfigurationError
from dp_lightning.ranks import Ranks

NAME = "dp_ddp"


class PrivateStrategy(DDPStrategy):
    """Private training on several devices and nodes, one process each; gloo on CPUs and NCCL on GPUs."""

    def configure_ddp(self) -> None:
        """Copy the parameters and buffers of rank 0 to every rank, without wrapping the module.

        Raises:
            ConfigurationError: on every rank, where the ranks have other parameters or buffers.
        """
        assert self.model is not None
        every = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        tensors = {name: tensor for name, tensor in every.items() if not is_lazy(tensor)}  # a run refuses lazy layers
        kinds = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors.items()]
        if Ranks(self.global_rank, self.world_size).differing_facts({"tensors": kinds}, self.root_device):
            raise ConfigurationError(
                "The ranks' models differ in the names, order, shapes or types of parameters and buffers, or in which "
                "of them are trained. Build and freeze the same model on every rank."
            )
        for tensor in tensors.values():
            same = tensor.detach().contiguous()
            # The tensor goes as bytes, since gloo and NCCL do not know all types.
            torch.distributed.broadcast(same.reshape(-1).view(torch.uint8), src=0)
            tensor.detach().copy_(same)


StrategyRegistry.register(NAME, PrivateStrategy, description="Private training on several devices")
