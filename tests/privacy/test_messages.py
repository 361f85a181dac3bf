"""A loss sends nothing to other processes, whichever way of torch.distributed it takes, and receives nothing."""

import threading

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
import torch.distributed.rpc as rpc
from privacy.small_steps import private_step
from torch import nn
from torch.utils.data import TensorDataset, default_collate

from dp_lightning.errors import ModelError
from dp_lightning.privacy.isolation.messages import no_messages
from dp_lightning.privacy.reading import ExampleReader
from dp_lightning.privacy.sampling import PhysicalBatch


@pytest.fixture
def group():
    """The group of all ranks, of which there is one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def operator(x, group):
    reduced = torch.ops._c10d_functional.all_reduce(x.detach(), "sum", group.group_name)
    return torch.ops._c10d_functional.wait_tensor(reduced)


WAYS = {
    "dist.all_reduce": lambda x, group: dist.all_reduce(x.detach().clone()),
    "dist.all_gather": lambda x, group: dist.all_gather([torch.zeros_like(x)], x.detach()),
    "dist.broadcast": lambda x, group: dist.broadcast(x.detach().clone(), 0),
    "dist.barrier": lambda x, group: dist.barrier(),
    "dist.all_gather_object": lambda x, group: dist.all_gather_object([None], 3),
    "dist.nn.functional": lambda x, group: differentiable.all_reduce(x),
    "functional collective": lambda x, group: functional.all_reduce(x.detach(), "sum", group).wait(),
    "operator": operator,
    "method of the group": lambda x, group: group.allreduce([x.detach().clone()]).wait(),
    "method of its backend": lambda x, group: group._get_backend(torch.device("cpu")).allreduce([x.detach().clone()]),
    "store": lambda x, group: group.get_group_store().set("key", "value"),
    "new group": lambda x, group: dist.new_group([0]),
}


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_sent_until_the_loss_has_ended(group, way):
    x = torch.ones(2)
    with no_messages(), pytest.raises((ModelError, RuntimeError), match=r"torch\.distributed|process group"):
        WAYS[way](x, group)
    WAYS[way](x, group)


# Under vmap these fail before they send: one makes a tensor from bytes, the other is no function that vmap knows.
BEFORE = {
    ("dist.all_gather_object", "together"): "uses a tensor of shape",
    ("dist.nn.functional", "together"): "not supported",
}


@pytest.mark.parametrize("examples", ["together", "one_by_one"])
@pytest.mark.parametrize("way", WAYS)
def test_a_loss_that_sends_is_refused_by_name(group, way, examples):
    model = nn.Linear(3, 2)

    def loss(batch):
        outputs = model(batch[0])
        WAYS[way](outputs, group)
        return outputs.sum()

    step = private_step(model, (3,), loss=loss, examples=examples)
    reason = BEFORE.get((way, examples))
    with pytest.raises(
        RuntimeError if reason == "not supported" else ModelError,
        match=reason or r"training_step uses torch\.distributed \(\w+\)",
    ):
        step.accumulate(next(iter(step.batches())))


def test_a_loss_may_ask_for_its_rank_and_other_threads_may_use_stores(group):
    store, read = group.get_group_store(), []
    store.set("key", "value")
    with no_messages():
        assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
        thread = threading.Thread(target=lambda: read.append(store.get("key")))
        thread.start()
        thread.join()
    assert read == [b"value"]


@pytest.mark.parametrize("examples", ["together", "one_by_one"])
def test_a_method_that_was_taken_from_a_group_before_is_found(group, examples):
    model, taken, sent = nn.Linear(3, 2), group.allreduce, torch.zeros(2)

    def loss(batch):
        taken([sent]).wait()
        return model(batch[0]).sum()

    step = private_step(model, (3,), loss=loss, examples=examples)
    with pytest.raises(ModelError, match="was used while training_step ran"):
        step.accumulate(next(iter(step.batches())))


@pytest.mark.parametrize("reads", ["collate_fn", "data set"])
def test_what_reads_an_example_sends_nothing(group, reads):
    class Examples(TensorDataset):
        def __getitem__(self, index):
            if reads == "data set":
                dist.barrier()
            return super().__getitem__(index)

    def collate(examples):
        if reads == "collate_fn":
            dist.barrier()
        return default_collate(examples)

    reader = ExampleReader(Examples(torch.zeros(4, 3)), collate)
    with pytest.raises(ModelError, match=r"data set, collate_fn or a batch hook uses torch\.distributed \(barrier\)"):
        reader[PhysicalBatch(step=0, piece=0, pieces=1, indices=(0, 1))]
    dist.barrier()


def test_one_context_within_another_opens_nothing(group):
    with no_messages():
        with no_messages():
            pass
        for send in (lambda: dist.barrier(), lambda: operator(torch.ones(2), group)):
            with pytest.raises((ModelError, RuntimeError), match=r"torch\.distributed|process group"):
                send()
    operator(torch.ones(2), group)


def test_rpc_has_to_end_before(tmp_path):
    rpc.init_rpc(
        "alone",
        rank=0,
        world_size=1,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=f"file://{tmp_path}/ranks"),
    )
    try:
        with pytest.raises(ModelError, match=r"rpc\.shutdown\(\) before the fit"), no_messages():
            pass
    finally:
        rpc.shutdown()
    with no_messages():
        pass


def test_without_other_ranks_there_is_nothing_to_close():
    assert not dist.is_initialized()
    with no_messages():
        store = dist.HashStore()
        store.set("key", "value")
        assert store.get("key") == b"value"
