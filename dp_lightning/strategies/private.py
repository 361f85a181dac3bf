"""Several processes, one private step: the strategy ``dp_ddp``.

Lightning's own ``ddp`` wraps the module in DistributedDataParallel, which averages the ranks' raw gradients during the
backward pass. A private step adds up clipped sums instead, once per logical step, and ``PrivateMechanism`` does that.
What is left for the strategy is to start the processes, to let them begin with the same parameters, and to leave the
module as it is.
"""

import lightning.pytorch as pl
import torch.distributed
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

from dp_lightning.ranks import Ranks

NAME = "dp_ddp"


class PrivateStrategy(DDPStrategy):
    """Private training on several devices and nodes, one process each; gloo on CPUs and NCCL on GPUs.

    Takes the arguments of ``DDPStrategy`` that concern processes, such as ``timeout`` and ``process_group_backend``.
    """

    def configure_ddp(self) -> None:
        """Give every rank the parameters and buffers of rank 0; there is no wrapper."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            same = tensor.detach().contiguous()
            torch.distributed.broadcast(same, src=0)
            tensor.detach().copy_(same)


def trainer_ranks(trainer: pl.Trainer) -> Ranks:
    """The processes of a trainer's run."""
    return Ranks(trainer.global_rank, trainer.world_size)


StrategyRegistry.register(NAME, PrivateStrategy, description="Private training on several devices")
