"""A user's own DDP script, started by torchrun: torchrun --nproc-per-node 2 startup_hand_written.py DIR."""

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from marks import pause, reached


def main(directory: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    inputs = torch.randn(6400, 32)
    data = TensorDataset(inputs, inputs[:, :10].argmax(1))
    loader = DataLoader(data, batch_size=32, sampler=DistributedSampler(data))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step, (x, y) in enumerate(loader, start=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if dist.get_rank() == 0 and step == 1:
            reached(directory, "first-step")
        if dist.get_rank() == 0 and step == 50:
            pause(directory)
    del model, optimizer
    # Workaround (torch 2.13, pytorch/pytorch#179291; may go when torch ends gloo's threads before the interpreter): one process of
    # eight aborts when a DDP wrapper outlives its group.
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
