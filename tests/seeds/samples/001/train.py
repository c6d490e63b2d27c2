#!/usr/bin/env python3
# 001, "Training Script Template". Changed: imports; an optimizer of this model.
"""Distributed training script template."""

import os
import torch

from names import MyModel, criterion, dataset, num_epochs, targets
from distributed import (
    init_process_group, destroy_process_group,
    DistributedDataParallel, DistributedSampler,
    get_world_size, get_rank
)

def main():
    # Initialize distributed training (CPU backend recommended)
    init_process_group(backend="gloo")  # Use "nccl" only if CuPy installed

    world_size = get_world_size()
    rank = get_rank()

    print(f"Process {rank}/{world_size}")

    # Create model (device handling simplified for CPU)
    model = MyModel()
    model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    # Create distributed dataset sampler
    sampler = DistributedSampler(
        dataset_size=len(dataset),  # Pass size, not dataset
        num_replicas=world_size,
        rank=rank
    )

    # Training loop
    for epoch in range(num_epochs):
        sampler.set_epoch(epoch)

        for idx in sampler:
            batch = dataset[idx]  # Load data at sampled index

            # Forward pass
            output = model(batch)
            loss = criterion(output, targets)

            # Backward pass with MANUAL gradient sync
            loss.backward()
            model.sync_gradients()  # Required - auto sync not implemented
            optimizer.step()
            optimizer.zero_grad()

    # Cleanup
    destroy_process_group()

if __name__ == "__main__":
    main()
