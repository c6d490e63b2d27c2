"""The loop that a user would write from PyTorch's DDP tutorial: what our Trainer is measured against."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from workloads import Workload


class HandWritten:
    """One contestant: DDP at its defaults over a DataLoader at its defaults. All ranks take every turn."""

    def __init__(
        self, workload: Workload, data: TensorDataset, rank: int | None = None, size: int | None = None
    ) -> None:
        """`rank` of `size`, where torch.distributed does not know them."""
        self.workload = workload
        self.model, self.optimizer = self.prepare(workload.initial_model())
        sampler: DistributedSampler[object] = DistributedSampler(data, size, rank, shuffle=False)
        self.batches = iter(DataLoader(data, batch_size=workload.batch_size, sampler=sampler))
        self.loss = torch.tensor(0.0)

    def prepare(self, model: nn.Module) -> tuple[Any, Any]:
        """The model to call, and the optimizer."""
        wrapped = DistributedDataParallel(model)
        return wrapped, self.workload.optimizer(wrapped.parameters())

    def step(self) -> None:
        """One optimizer update."""
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        self.loss = self.workload.loss_fn(self.model(inputs), targets)
        self.loss.backward()
        if self.workload.gradient_clipping is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.gradient_clipping)
        self.optimizer.step()

    def turn(self, steps: int) -> list[tuple[float, float]]:
        """`steps` updates; the (main-thread CPU, wall) clock before each and after the last, in seconds."""
        marks = []
        for _ in range(steps):
            marks.append((time.thread_time(), time.perf_counter()))
            self.step()
        marks.append((time.thread_time(), time.perf_counter()))
        return marks
