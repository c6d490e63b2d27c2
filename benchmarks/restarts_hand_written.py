"""A user's own DDP script that goes on after a restart: torchrun --max-restarts 99 restarts_hand_written.py DIR."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from marks import stepped


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    rank, saved = dist.get_rank(), Path(directory, "checkpoint.pt")
    torch.manual_seed(0)
    inputs = torch.randn(6400, 32)
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    sampler: DistributedSampler = DistributedSampler(data)
    loader = DataLoader(data, batch_size=32, sampler=sampler)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done = 0
    if saved.exists():
        state = torch.load(saved)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        done = state["step"]
    step = 0
    for epoch in range(1000):
        sampler.set_epoch(epoch)
        for x, y in loader:
            step += 1
            if step <= done:
                continue
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            stepped(directory, rank, step)
            time.sleep(0.02)
            if rank == 0 and step % 10 == 0:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, saved.with_suffix(".tmp"))
                saved.with_suffix(".tmp").replace(saved)


if __name__ == "__main__":
    main(sys.argv[1])
