"""The loops that guides write by hand for torch, corrected, on handwritten digits: one world for all of them. Prints one line of
facts for the test."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler

import distributed
from distributed import (
    DistributedDataParallel,
    ReduceOp,
    all_gather,
    all_reduce,
    broadcast,
    destroy_process_group,
    get_distributed_info,
    get_rank,
    get_world_size,
    init_process_group,
    memory_pool_scope,
    no_sync,
    reduce_scatter,
)
from examples.train import digits

OUT = Path(sys.argv[1])
TRAIN, HELD_OUT = digits()
criterion = nn.CrossEntropyLoss()


def net(kind: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(kind)


def loader(batch_size: int = 32) -> tuple[DataLoader, DistributedSampler]:
    sampler = DistributedSampler(TRAIN, num_replicas=get_world_size(), rank=get_rank(), shuffle=True)
    return DataLoader(TRAIN, batch_size=batch_size, sampler=sampler), sampler


def apart(model: nn.Module) -> float:
    """How far the ranks' weights are from each other."""
    mine = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    return max((each - mine).abs().max().item() for each in all_gather(mine))


# ------------------------------------------------------------------ the communication layer, 000 and 001


def communication() -> dict[str, object]:
    """The arguments of init_process_group agree with the launcher or are refused; tensors are torch's."""
    world, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    init_process_group(backend="gloo", init_method="env://", world_size=world, rank=rank)
    info = get_distributed_info()
    assert info["available"] and (info["world_size"], info["rank"]) == (world, rank)

    tensor = torch.tensor([1.0, 2.0, 3.0])
    assert all_reduce(tensor.clone(), ReduceOp.SUM).tolist() == [world, 2.0 * world, 3.0 * world]
    assert len(all_gather(tensor)) == world
    assert broadcast(torch.full((2,), float(rank)), src=0).tolist() == [0.0, 0.0]
    scattered = reduce_scatter(torch.ones(world * 2 + 1, 3), ReduceOp.AVERAGE)  # rows need not divide
    assert scattered.eq(1).all()

    sampler = distributed.DistributedSampler(dataset_size=len(TRAIN), num_replicas=world, rank=rank, shuffle=True)
    model = DistributedDataParallel(net(), bucket_size_mb=25, find_unused_parameters=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    sampler.set_epoch(0)
    indices = list(sampler)
    for start in range(0, 320, 16):
        images, targets = TRAIN[indices[start : start + 16]]
        first, second = images.chunk(2), targets.chunk(2)
        with no_sync():  # each half weighs half
            (criterion(model(first[0]), second[0]) / 2).backward()
        (criterion(model(first[1]), second[1]) / 2).backward()
        model.sync_gradients()  # done already, and harmless
        optimizer.step()
        optimizer.zero_grad()
    # A rank without a batch calls the model too, on any sample and without weight: torch's DDP exchanges nothing in a backward pass
    # that no forward went before, so `sum(p.sum() * 0 for p in model.parameters())` leaves the others waiting.
    (criterion(model(images), targets) * float(rank == 0)).backward()
    try:
        memory_pool_scope()
    except distributed.ConfigError as error:
        refused = str(error)
    return {"apart": apart(model.module), "refused": refused, "accuracy": accuracy(model.module)}


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        images, labels = HELD_OUT[:]
        return (model(images).argmax(1) == labels).double().mean().item()


def logs_with_the_rank() -> dict[str, object]:
    """`%(rank)d` in a format needs a record factory that knows it."""
    make, rank = logging.getLogRecordFactory(), get_rank()

    def with_rank(*args: object, **kwargs: object) -> logging.LogRecord:
        record = make(*args, **kwargs)
        record.rank = rank
        return record

    logging.setLogRecordFactory(with_rank)
    handler = logging.FileHandler(OUT / f"training_rank_{rank}.log")
    handler.setFormatter(logging.Formatter("[Rank %(rank)d] %(levelname)s: %(message)s"))
    logger = logging.getLogger("sample")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.info(f"Training started: {get_world_size()} processes")
    handler.close()
    logging.setLogRecordFactory(make)
    return {"line": (OUT / f"training_rank_{rank}.log").read_text()}


# ------------------------------------------------------------------ 003


def synchronisation() -> dict[str, object]:
    """`all_gather` takes the list first; what all ranks lost is what each of them lost, not one value repeated."""
    world, rank = dist.get_world_size(), dist.get_rank()
    dist.barrier()
    loss = torch.tensor([float(rank + 1)])
    total = loss.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    losses = [torch.zeros_like(loss) for _ in range(world)]
    dist.all_gather(losses, loss)
    return {"losses": [each.item() for each in losses], "mean": total.item() / world}


def a_save_that_fails_on_one_rank() -> dict[str, object]:
    """The ranks agree on it: the one that returns early would leave the others in their barrier."""

    def save() -> bool:
        failed = torch.zeros(1)
        try:
            if dist.get_rank() == 1:
                raise OSError("No space left on device")
            torch.save(net().state_dict(), OUT / f"rank-{dist.get_rank()}.pt")
        except OSError:
            failed += 1
        dist.all_reduce(failed, op=dist.ReduceOp.MAX)
        return not failed.item()

    return {"saved": save()}


def mixed_precision() -> dict[str, object]:
    """The scaler and the norm: unscaled before it is clipped. torch.amp takes the device; torch.cuda.amp is its old name."""
    model = DDP(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")
    batches, _ = loader()
    losses, norms = [], []
    for images, targets in batches:
        optimizer.zero_grad()
        with torch.amp.autocast("cpu", dtype=torch.float16):
            loss = criterion(model(images), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    return {"first": losses[0], "last": losses[-1], "norm": max(norms), "apart": apart(model.module)}


def profile() -> dict[str, object]:
    """The schedule needs a `step()` for each batch; the handler's file opens in any trace viewer."""
    model, (batches, _) = DDP(net()), loader()
    activities = [torch.profiler.ProfilerActivity.CPU]
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=3, repeat=1)
    handler = torch.profiler.tensorboard_trace_handler(str(OUT / f"profiler-{get_rank()}"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler, about its own clock
        with torch.profiler.profile(activities=activities, schedule=schedule, on_trace_ready=handler) as prof:
            for _, (images, targets) in zip(range(5), batches, strict=False):
                criterion(model(images), targets).backward()
                prof.step()
    (trace,) = (OUT / f"profiler-{get_rank()}").iterdir()
    events = json.loads(trace.read_text())["traceEvents"]
    return {"reductions": sum("all_reduce" in event.get("name", "") for event in events) > 0}


# ------------------------------------------------------------------ 004


def ddp() -> dict[str, object]:
    """No port of its own, no mp.spawn; the device is the local rank's; the loss is that of all ranks."""
    local_rank, rank = int(os.environ["LOCAL_RANK"]), dist.get_rank()
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    model = net().to(device)
    ddp_model = DDP(model)
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=1e-2)
    batches, sampler = loader()
    for epoch in range(4):
        sampler.set_epoch(epoch)
        sums = torch.zeros(2)
        for images, targets in batches:
            optimizer.zero_grad()
            loss = criterion(ddp_model(images.to(device)), targets.to(device))
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(images), len(images)])
        dist.all_reduce(sums)
        if rank == 0:
            torch.save({"epoch": epoch, "model": model.state_dict()}, OUT / f"checkpoint_epoch_{epoch}.pt")
    stored = torch.load(OUT / "checkpoint_epoch_3.pt", weights_only=True) if rank == 0 else {"epoch": 3}
    return {"loss": (sums[0] / sums[1]).item(), "accuracy": accuracy(model), "apart": apart(model), "epoch": stored["epoch"]}  # fmt: skip


class GradientAccumulation:
    """Divides by the batches that there are, applies what is left over, and exchanges once an update."""

    def __init__(self, model: DDP, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.model, self.optimizer, self.steps, self.updates = model, optimizer, steps, 0

    def train(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for start in range(0, len(batches), self.steps):
            group = batches[start : start + self.steps]
            samples = sum(len(targets) for _, targets in group)
            self.optimizer.zero_grad()
            with self.model.no_sync():
                for images, targets in group[:-1]:
                    (criterion(self.model(images), targets) * len(targets) / samples).backward()
            images, targets = group[-1]
            (criterion(self.model(images), targets) * len(targets) / samples).backward()
            self.optimizer.step()
            self.updates += 1


def accumulation() -> dict[str, object]:
    images, targets = TRAIN[slice(dist.get_rank(), 400, dist.get_world_size())]
    small = list(zip(images.double().split(8), targets.split(8), strict=True))  # 25 of them, so one is left over
    joint = list(zip(images.double().split(32), targets.split(32), strict=True))
    weights, updates = [], []
    for batches, steps in ((small, 4), (joint, 1)):
        model = DDP(net(torch.float64))
        trainer = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1), steps)
        trainer.train(batches)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        updates.append(trainer.updates)
    return {"updates": updates, "expected": math.ceil(25 / 4), "apart": (weights[0] - weights[1]).abs().max().item()}


def checkpointed() -> dict[str, object]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net(torch.float64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.net[:-1]:
                x = checkpoint(layer, x, use_reentrant=False)
            return self.net[-1](x)

    images, targets = TRAIN[:32]
    gradients = []
    for module in (Checkpointed(), net(torch.float64)):
        criterion(DDP(module)(images.double()), targets).backward()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in module.parameters()]))
    return {"apart": (gradients[0] - gradients[1]).abs().max().item()}


def fsdp() -> dict[str, object]:
    """FSDP2; the whole state is gathered by all ranks, and rank 0 writes it. On rank 0 alone the call hangs."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model[1::2]:  # instead of a policy by size
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches, _ = loader()
    for images, targets in batches:
        optimizer.zero_grad()
        loss = criterion(model(images), targets)
        loss.backward()
        optimizer.step()
    local = sum(p.to_local().numel() for p in model.parameters())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole = net()
    if dist.get_rank() == 0:
        torch.save(state, OUT / "fsdp_checkpoint.pt")
        whole.load_state_dict(torch.load(OUT / "fsdp_checkpoint.pt", weights_only=True))
    numbers = sum(p.numel() for p in whole.parameters())
    return {"accuracy": accuracy(whole), "kept": local / numbers, "loss": loss.item()}


CASES = (
    communication, logs_with_the_rank, synchronisation, a_save_that_fails_on_one_rank, mixed_precision, profile, ddp, accumulation,
    checkpointed, fsdp,
)  # fmt: skip
found = {case.__name__: case() for case in CASES}
rank = get_rank()
destroy_process_group()
if rank == 0:
    print(json.dumps(found), flush=True)
