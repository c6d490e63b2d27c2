"""The loop that a user would write from PyTorch's DDP tutorial. Our Trainer is compared with it."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from workloads import Workload


class HandWritten:
    """One contestant: default DDP over a default DataLoader. All ranks take every turn."""

    def __init__(
        self, workload: Workload, data: TensorDataset, rank: int | None = None, size: int | None = None
    ) -> None:
        """Build model, optimizer and data loader.

        Args:
            rank, size: rank and number of processes, for engines that do not use torch.distributed.
        """
        self.workload = workload
        self.model, self.optimizer = self.prepare(workload.initial_model())
        sampler: DistributedSampler[object] = DistributedSampler(data, size, rank, shuffle=False)
        self.batches = iter(DataLoader(data, batch_size=workload.batch_size, sampler=sampler))
        self.loss = torch.tensor(0.0)

    def prepare(self, model: nn.Module) -> tuple[Any, Any]:
        """Return the model to call, and the optimizer."""
        wrapped = DistributedDataParallel(model)
        return wrapped, self.workload.optimizer(wrapped.parameters())

    def step(self) -> None:
        """Run one optimizer update."""
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        self.loss = self.workload.loss_fn(self.model(inputs), targets)
        self.loss.backward()
        if self.workload.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.gradient_clipping)
        self.optimizer.step()

    def turn(self, steps: int) -> list[tuple[float, float]]:
        """Run `steps` updates. Return the (main-thread CPU, wall) clocks before each and after the last, in seconds."""
        marks = []
        for _ in range(steps):
            marks.append((time.thread_time(), time.perf_counter()))
            self.step()
        marks.append((time.thread_time(), time.perf_counter()))
        return marks
