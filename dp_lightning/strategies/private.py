"""Several processes, one private step: the strategy ``dp_ddp``.

Lightning's own ``ddp`` wraps the module in DistributedDataParallel, which averages the ranks' raw gradients during the
backward pass. A private step adds up clipped sums instead, once per logical step, in ``PrivateStep``. The strategy only
starts the processes, gives them the same initial parameters, and leaves the module unwrapped.
"""

import traceback
from datetime import timedelta
from typing import Any, Literal

import lightning.pytorch as pl
import torch.distributed
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.constants import default_pg_timeout
from torch.nn.parameter import is_lazy
from torch.utils.data import DistributedSampler

from dp_lightning.errors import ConfigurationError
from dp_lightning.ranks import Ranks
from dp_lightning.strategies.launcher import be_starter, end_with, starter_of

NAME = "dp_ddp"


class PrivateStrategy(DDPStrategy):
    """Private training on several devices and nodes, one process each; gloo on CPUs and NCCL on GPUs.

    Takes the arguments of ``DDPStrategy`` that concern processes.

    Raises:
        ConfigurationError: for those that concern DistributedDataParallel.
    """

    def __init__(
        self,
        accelerator: pl.accelerators.Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: Literal["popen", "spawn", "fork", "forkserver"] = "popen",
        **others: Any,
    ) -> None:
        if others:
            raise ConfigurationError(
                f"The strategy {NAME} takes no {', '.join(others)}: no DistributedDataParallel averages gradients. "
                "Remove it."
            )
        be_starter()
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )

    def setup_environment(self) -> None:
        """Connect to the other ranks."""
        if (starter := starter_of(self.local_rank)) is not None:
            end_with(starter)
        super().setup_environment()

    def process_dataloader(self, dataloader: object) -> object:
        """Let the ranks evaluate each example once.

        Lightning's sampler repeats some, so that all ranks have as many; the accuracy would count them twice. Where the
        ranks would have different numbers of batches it still does, with a warning: they may wait for each other in
        each batch.
        """
        batches: Any = getattr(dataloader, "batch_sampler", None) or dataloader
        sampler = getattr(batches, "sampler", None)
        if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
            _cut(sampler, getattr(batches, "batch_size", None) or 1, drop_last=getattr(batches, "drop_last", False))
        return super().process_dataloader(dataloader)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Lightning's, but the mean of whole numbers, by which it divides what is logged, is not cut to one."""
        is_whole = isinstance(tensor, Tensor) and not (tensor.is_floating_point() or tensor.is_complex())
        return super().reduce(tensor.double() if is_whole and reduce_op == "mean" else tensor, group, reduce_op)

    def on_exception(self, exception: BaseException) -> None:
        """Say of an error in a collective that its cause is another rank's."""
        super().on_exception(exception)
        frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
        if frames and str(frames[-1].f_globals.get("__name__")).startswith("torch.distributed"):
            exception.add_note(
                f"Rank {self.global_rank} of {self.world_size} waited for another rank, which has ended or does "
                "something else. What that rank said of it, perhaps above or in another log, is the cause."
            )

    def configure_ddp(self) -> None:
        """Copy the parameters and buffers of rank 0 to every rank, without wrapping the module.

        Raises:
            ConfigurationError: on every rank, where they are not the same ones.
        """
        assert self.model is not None
        every = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        tensors = {name: tensor for name, tensor in every.items() if not is_lazy(tensor)}  # a run refuses those
        kinds = [(name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in tensors.items()]
        if Ranks(self.global_rank, self.world_size).differing_facts({"tensors": kinds}, self.root_device):
            raise ConfigurationError(
                "The ranks' models differ in the names, order, shapes or types of parameters and buffers, or in which "
                f"of them are trained; rank {self.global_rank} has {len(kinds)} of them and trains "
                f"{sum(trained for *_, trained in kinds)}. Build and freeze the same model on every rank."
            )
        for tensor in tensors.values():
            same = tensor.detach().contiguous()
            # As bytes: gloo and NCCL do not know all types.
            torch.distributed.broadcast(same.reshape(-1).view(torch.uint8), src=0)
            tensor.detach().copy_(same)


def _cut(sampler: "DistributedSampler[Any]", at_once: int, *, drop_last: bool) -> None:
    """Let a sampler give each rank its share of a data set, without repeating examples.

    Args:
        at_once: examples of a batch.
        drop_last: whether a batch of fewer is left out.
    """
    count, ranks = len(sampler.dataset), sampler.num_replicas  # type: ignore[arg-type]
    least, most = count // ranks, -(-count // ranks)
    if least == most:
        return
    batches = {share // at_once if drop_last else -(-share // at_once) for share in (least, most)}
    if len(batches) == 1:
        sampler.total_size, sampler.num_samples = count, len(range(sampler.rank, count, ranks))
        return
    rank_zero_warn(
        f"{count} examples are evaluated on {ranks} ranks in batches of {at_once}. So that all have as many batches, "
        f"{most * ranks - count} of them are evaluated twice, and count twice in what is shown. With another batch "
        "size of this loader, each counts once."
    )


# Operations per gathered byte and per collective. CPU: measured by benchmarks/ranks.py over gloo on one machine. GPUs:
# 30 TFLOP/s in float32 over 300 GB/s within a node (NVLink) and 30 GB/s between nodes, and 40 and 80 microseconds.
_CPU = (100.0, 5e7)
_GPUS_OF_ONE_NODE = (100.0, 1.2e9)
_GPUS_OF_SEVERAL_NODES = (1000.0, 2.4e9)


def trainer_ranks(trainer: pl.Trainer) -> Ranks:
    """The processes of a trainer's run."""
    if trainer.strategy.root_device.type == "cpu":
        per_byte, per_call = _CPU
    else:
        per_byte, per_call = _GPUS_OF_ONE_NODE if trainer.num_nodes == 1 else _GPUS_OF_SEVERAL_NODES
    return Ranks(trainer.global_rank, trainer.world_size, per_byte, per_call)


StrategyRegistry.register(NAME, PrivateStrategy, description="Private training on several devices")
