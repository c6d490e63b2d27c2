"""Samples of 000 and 004 in the form that is right, where the document's own is too far from it to be run."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler

from distributed import DistributedDataParallel, all_gather
from examples.train import digits

criterion = nn.CrossEntropyLoss()


def net(kind: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 10)).to(kind)


def loader() -> tuple[DataLoader, DistributedSampler]:
    data, _ = digits()
    sampler = DistributedSampler(data, num_replicas=dist.get_world_size(), rank=dist.get_rank(), shuffle=True)
    return DataLoader(data, batch_size=32, sampler=sampler), sampler


def apart(model: nn.Module) -> float:
    """How far the ranks' weights are from each other."""
    mine = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    return max((each - mine).abs().max().item() for each in all_gather(mine))


def accuracy(model: nn.Module) -> float:
    with torch.no_grad():
        images, labels = digits()[1][:]
        return (model(images).argmax(1) == labels).double().mean().item()


def a_rank_without_a_batch() -> None:
    """It calls the model too, on any sample and without weight: torch's DDP exchanges nothing in a backward pass that no forward
    went before, so `sum(p.sum() * 0 for p in model.parameters())` leaves the others waiting."""
    model = DistributedDataParallel(net())
    images, labels = digits()[0][:8]
    (criterion(model(images), labels) * float(dist.get_rank() == 0)).backward()
    plain = net()
    criterion(plain(images), labels).backward()
    for mine, whole in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine.grad, whole.grad / 2, atol=1e-7)


def ddp() -> None:
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
        for images, labels in batches:
            optimizer.zero_grad()
            loss = criterion(ddp_model(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            sums += torch.tensor([loss.item() * len(images), len(images)])
        dist.all_reduce(sums)
        if rank == 0:
            torch.save({"epoch": epoch, "model": model.state_dict()}, f"checkpoint_epoch_{epoch}.pt")
    assert accuracy(model) > 0.9 and sums[0] / sums[1] < 0.4 and apart(model) == 0
    if rank == 0:
        stored = torch.load("checkpoint_epoch_3.pt", weights_only=True)
        assert stored["epoch"] == 3 and torch.equal(stored["model"]["1.weight"], model[1].weight)


class GradientAccumulation:
    """Divides by the batches that there are, applies what is left over, and exchanges once an update."""

    def __init__(self, model: DDP, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.model, self.optimizer, self.steps, self.updates = model, optimizer, steps, 0

    def train(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        for start in range(0, len(batches), self.steps):
            group = batches[start : start + self.steps]
            samples = sum(len(labels) for _, labels in group)
            self.optimizer.zero_grad()
            with self.model.no_sync():
                for images, labels in group[:-1]:
                    (criterion(self.model(images), labels) * len(labels) / samples).backward()
            images, labels = group[-1]
            (criterion(self.model(images), labels) * len(labels) / samples).backward()
            self.optimizer.step()
            self.updates += 1


def accumulation() -> None:
    images, labels = digits()[0][slice(dist.get_rank(), 400, dist.get_world_size())]
    small = list(zip(images.double().split(8), labels.split(8), strict=True))  # 25 of them, so one is left over
    joint = list(zip(images.double().split(32), labels.split(32), strict=True))
    weights, updates = [], []
    for batches, steps in ((small, 4), (joint, 1)):
        model = DDP(net(torch.float64))
        trainer = GradientAccumulation(model, torch.optim.SGD(model.parameters(), lr=0.1), steps)
        trainer.train(batches)
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
        updates.append(trainer.updates)
    assert updates == [7, 7] and (weights[0] - weights[1]).abs().max() < 1e-12


def fsdp() -> None:
    """FSDP2; the whole state is gathered by all ranks, and rank 0 writes it. On rank 0 alone the call hangs."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = net()
    for layer in model[1::2]:  # instead of a policy by size
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batches, _ = loader()
    for images, labels in batches:
        optimizer.zero_grad()
        criterion(model(images), labels).backward()
        optimizer.step()
    local = sum(p.to_local().numel() for p in model.parameters())
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    whole = net()
    assert 0.4 < local / sum(p.numel() for p in whole.parameters()) < 0.6
    if dist.get_rank() == 0:
        torch.save(state, Path("fsdp_checkpoint.pt"))
        whole.load_state_dict(torch.load("fsdp_checkpoint.pt", weights_only=True))
        assert accuracy(whole) > 0.7


CASES = {
    "corrected: a rank without a batch (000)": a_rank_without_a_batch,
    "corrected: train_ddp (004)": ddp,
    "corrected: gradient accumulation (004)": accumulation,
    "corrected: FSDP (004)": fsdp,
}
