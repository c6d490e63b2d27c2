"""Make every call of distributed.comm, in one process or on any number of ranks. Prints one line of facts."""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, TensorDataset

import distributed
from distributed import (
    DistributedDataParallel,
    DistributedSampler,
    ReduceOp,
    all_gather,
    all_reduce,
    barrier,
    broadcast,
    checkpoint_scope,
    destroy_process_group,
    get_distributed_info,
    get_rank,
    get_world_size,
    init_process_group,
    is_initialized,
    no_sync,
    reduce_scatter,
)


def refused(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except distributed.DistributedError as error:
        return str(error)
    raise AssertionError(f"{call} took {args} {kwargs}")


def check_before_joining(world, rank):
    assert not is_initialized() and (get_rank(), get_world_size()) == (rank, world)
    if world > 1:
        assert "call init_process_group() first" in refused(all_reduce, torch.ones(1))
    else:
        assert all_reduce(torch.ones(1)).item() == 1
    assert "trains a model" in refused(init_process_group, "pytorch-ddp")
    assert "MASTER_ADDR" in refused(init_process_group, init_method="tcp://localhost:1")
    if "RANK" in os.environ:
        assert "the launcher set" in refused(init_process_group, world_size=world + 1)


def check_collectives(world, rank):
    ranks = range(world)
    mine = torch.tensor([1.0, 2.0, 3.0]) * (rank + 1)
    total = torch.tensor([1.0, 2.0, 3.0]) * sum(r + 1 for r in ranks)
    kept = mine.clone()
    assert all_reduce(kept, ReduceOp.SUM) is kept and torch.equal(kept, total)  # in place and returned
    assert torch.allclose(all_reduce(mine.clone(), ReduceOp.AVERAGE), total / world)
    assert torch.equal(all_reduce(mine.clone(), "max"), torch.tensor([1.0, 2.0, 3.0]) * world)
    assert torch.equal(all_reduce(mine.clone(), ReduceOp.MIN), torch.tensor([1.0, 2.0, 3.0]))
    product = torch.tensor(float(rank + 2)).clone()
    assert all_reduce(product, ReduceOp.PRODUCT).item() == torch.prod(torch.tensor([r + 2.0 for r in ranks])).item()
    sliced = torch.zeros(3, 4)
    sliced[:, ::2] = rank + 1.0
    all_reduce(sliced.t()[::2])  # a tensor that is not contiguous changes in place
    assert sliced[:, ::2].eq(sum(r + 1 for r in ranks)).all() and sliced[:, 1::2].eq(0).all()
    large = all_reduce(torch.full((2,), 60000.0, dtype=torch.float16), ReduceOp.AVERAGE)
    assert large.dtype == torch.float16 and large.tolist() == [60000.0] * 2
    weight = torch.nn.Parameter(torch.full((2,), float(rank)))
    assert broadcast(weight, src=world - 1) is weight and weight.tolist() == [world - 1.0] * 2
    gathered = all_gather(torch.tensor([rank]))
    assert [each.item() for each in gathered] == list(ranks)
    uneven = all_gather(torch.full((rank, 2), rank))
    assert [tuple(each.shape) for each in uneven] == [(r, 2) for r in ranks]
    assert all(each.eq(r).all() for r, each in enumerate(uneven))
    if world > 1:
        kind = torch.int32 if rank else torch.float32
        assert "int32 on rank 1 and torch.float32 on rank 0" in refused(all_gather, torch.ones(2, dtype=kind))
    barrier()


def check_reduce_scatter(world, rank):
    for rows in (world * 2, world * 2 + 1, 1):
        whole = torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)
        parts = torch.tensor_split(whole, world)
        mean = reduce_scatter(whole * (rank + 1), ReduceOp.AVERAGE)
        assert torch.allclose(mean, parts[rank] * sum(r + 1 for r in range(world)) / world), (rows, mean)
    sizes = [0] * (world - 1) + [4]
    mine = reduce_scatter(torch.ones(4), sizes=sizes)
    assert mine.tolist() == [float(world)] * sizes[rank]
    assert "one size for each" in refused(reduce_scatter, torch.ones(4), sizes=[3] * world)
    assert "not a rank" in refused(broadcast, torch.ones(1), src=world)
    assert "floating-point" in refused(all_reduce, torch.ones(1, dtype=torch.int64), ReduceOp.AVERAGE)
    assert "pass a torch.Tensor" in refused(all_reduce, [1.0])
    assert "SUM, AVERAGE" in refused(all_reduce, torch.ones(1), "median")


def network():
    torch.manual_seed(get_rank())  # differs between ranks, as all ranks must get the parameters of rank 0
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()


def check_gradients(world, rank):
    """Check that each way of accumulating four micro-batches yields the gradient of the whole batch."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(4, world * 3, 4, generator=generator, dtype=torch.float64)
    model = DistributedDataParallel(network(), bucket_size_mb=25, find_unused_parameters=False)
    assert list(model.state_dict()) == [f"module.{name}" for name in model.module.state_dict()]
    start = broadcast(model.module[0].weight.detach().clone())
    assert torch.equal(start, model.module[0].weight)
    model(inputs.reshape(-1, 4)).pow(2).mean().backward()  # everything on every rank
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    def loss(step):
        return model(inputs[step, rank * 3 : rank * 3 + 3]).pow(2).mean() / 4

    def agrees():
        same = all(torch.allclose(p.grad, e, atol=1e-14) for p, e in zip(model.parameters(), expected, strict=True))
        model.zero_grad()
        return same

    for step in range(4):
        loss(step).backward()
    model.sync_gradients()  # does nothing, as the gradients are averaged already
    assert agrees()
    with no_sync():
        for step in range(3):
            loss(step).backward()
    loss(3).backward()
    assert agrees()
    with model.no_sync():
        for step in range(4):
            loss(step).backward()
    if world > 1:
        assert not torch.allclose(model.module[0].weight.grad, expected[0], atol=1e-14)
    model.sync_gradients()
    model.sync_gradients()
    assert agrees()
    with checkpoint_scope(model.module[0]):
        for step in range(4):
            loss(step).backward()
    assert agrees()
    sum(p.sum() * 0 for p in model.parameters()).backward()  # what a rank without a batch does
    model.zero_grad()
    static = DistributedDataParallel(network(), static_graph=True)
    for _ in range(2):
        static.zero_grad()
        with no_sync(static):
            static(inputs[0, :3]).sum().backward()
        static(inputs[1, :3]).sum().backward()
    assert "drop one of them" in refused(DistributedDataParallel, network(), bucket_cap_mb=1, bucket_size_mb=2)
    assert "the model is on cpu" in refused(DistributedDataParallel, network(), device_ids=[0])
    assert DistributedDataParallel(torch.nn.Flatten())(torch.ones(2, 2)).shape == (2, 2)
    if torch.distributed.is_initialized():
        table = torch.nn.Sequential(torch.nn.Embedding(4, 4, sparse=True), torch.nn.Linear(4, 1))
        assert "0.weight has sparse gradients" in refused(DistributedDataParallel, table)
    return model


def check_samplers(world, rank):
    size = 7
    orders = []
    for epoch in range(2):
        sampler = DistributedSampler(dataset_size=size)
        sampler.set_epoch(epoch)
        part = torch.tensor(list(sampler))
        everyone = torch.stack(all_gather(part)).t().reshape(-1).tolist()
        assert len(sampler) == -(-size // world) and set(everyone) == set(range(size))
        orders.append(everyone)
    assert orders[0] != orders[1]
    data = TensorDataset(torch.arange(size))
    loader = DataLoader(
        data, sampler=DistributedSampler(data, num_replicas=world, rank=rank, shuffle=False), batch_size=2
    )
    assert torch.cat([batch for (batch,) in loader]).tolist()[:2] == [rank, rank + world] or world > 3
    assert "either a dataset" in refused(DistributedSampler)
    assert "is not below num_replicas=2" in refused(DistributedSampler, data, num_replicas=2, rank=2)


def threads():
    """Return the names of this process's threads."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            found.append(task.joinpath("comm").read_text().strip())
    return found


def main():
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    check_before_joining(world, rank)
    init_process_group(backend="gloo")
    init_process_group(backend="gloo")  # a second call changes nothing
    info = get_distributed_info()
    assert is_initialized() and (info["rank"], info["world_size"], info["available"]) == (rank, world, world > 1)
    is_torchs = torch.distributed.is_initialized()  # otherwise it is a Horovod world
    assert not is_torchs or any("gloo" in name for name in threads())
    check_collectives(world, rank)
    check_reduce_scatter(world, rank)
    model = check_gradients(world, rank)
    check_samplers(world, rank)
    if "--forget" not in sys.argv:
        destroy_process_group()
        assert not is_initialized() and not torch.distributed.is_initialized()
        assert not [name for name in threads() if "gloo" in name]  # a remaining thread can abort the process at its end
        with torch.no_grad():
            model(torch.ones(1, 4, dtype=torch.float64))
        assert "process group of this model has ended" in refused(model, torch.ones(1, 4, dtype=torch.float64))
    sys.stdout.write(
        json.dumps({**info, "argv": sys.argv[1:]}) + "\n"
    )  # at once, where nothing is buffered: ranks write together
    sys.stdout.flush()


main()
