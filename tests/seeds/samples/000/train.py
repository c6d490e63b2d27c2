#!/usr/bin/env python3
# 000, "Training Script Template". Changed: imports; the CPU; an optimizer of this model.
"""Distributed training script template."""

import os
import torch
from torch.utils.data import DataLoader

from names import MyModel, batch_size, criterion, dataset, num_epochs, targets
from distributed import (
    init_process_group, destroy_process_group,
    DistributedDataParallel, DistributedSampler,
    get_world_size, get_rank
)

def main():
    # Initialize distributed training
    init_process_group(backend="nccl")

    local_rank = int(os.environ["LOCAL_RANK"])
    world_size = get_world_size()
    rank = get_rank()

    print(f"Process {rank}/{world_size} on GPU {local_rank}")

    # Set device
    device = "cpu"

    # Create model and move to device
    model = MyModel().to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    # Create distributed dataset
    sampler = DistributedSampler(
        dataset,
        num_replicas=world_size,
        rank=rank
    )

    dataloader = DataLoader(
        dataset,
        batch_size=batch_size // world_size,  # Scale batch size
        sampler=sampler
    )

    # Training loop
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)

        for batch in dataloader:
            batch = batch.to(device)

            # Forward pass
            output = model(batch)
            loss = criterion(output, targets)

            # Backward pass with automatic gradient sync
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    # Cleanup
    destroy_process_group()

if __name__ == "__main__":
    main()
