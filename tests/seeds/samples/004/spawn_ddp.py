# 004, "PyTorch DistributedDataParallel". Changed: gloo, the CPU, 2 processes, a free port, loader workers; imports.
import torch
import torch.nn as nn

from names import YourDataset, YourModel
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data.distributed import DistributedSampler

def setup(rank, world_size):
    """Initialize distributed training"""
    import os

    # Set up distributed process group
    os.environ['MASTER_ADDR'] = 'localhost'
    os.environ['MASTER_PORT'] = os.environ['PORT']

    # Initialize process group
    dist.init_process_group(
        backend='gloo',  # or 'gloo' for CPU
        rank=rank,
        world_size=world_size
    )

def cleanup():
    """Clean up distributed training"""
    dist.destroy_process_group()

def train_ddp(rank, world_size, model, train_dataset, epochs=10):
    """Training function for each GPU"""

    # Setup
    setup(rank, world_size)

    # Move model to GPU
    model = model.to('cpu')

    # Wrap model with DDP
    ddp_model = DDP(model)

    # Create distributed sampler
    sampler = DistributedSampler(
        train_dataset,
        num_replicas=world_size,
        rank=rank,
        shuffle=True
    )

    # DataLoader with distributed sampler
    train_loader = torch.utils.data.DataLoader(
        train_dataset,
        batch_size=32,
        sampler=sampler,
        num_workers=0,
        pin_memory=False
    )

    # Optimizer
    optimizer = torch.optim.Adam(ddp_model.parameters(), lr=1e-3)

    # Training loop
    ddp_model.train()
    for epoch in range(epochs):
        # Set epoch for shuffling
        sampler.set_epoch(epoch)

        epoch_loss = 0
        for batch_idx, (data, target) in enumerate(train_loader):
            data, target = data.to('cpu'), target.to('cpu')

            optimizer.zero_grad()
            output = ddp_model(data)
            loss = nn.CrossEntropyLoss()(output, target)
            loss.backward()

            optimizer.step()

            epoch_loss += loss.item()

        # Average loss across all processes
        avg_loss = epoch_loss / len(train_loader)

        if rank == 0:  # Only log from rank 0
            print(f'Epoch {epoch}, Loss: {avg_loss:.4f}')

        # Save checkpoint (only from rank 0)
        if rank == 0 and (epoch + 1) % 5 == 0:
            torch.save({
                'epoch': epoch,
                'model_state_dict': ddp_model.module.state_dict(),
                'optimizer_state_dict': optimizer.state_dict(),
            }, f'checkpoint_epoch_{epoch}.pt')

    cleanup()

# Launch distributed training
def main():
    world_size = 2  # Number of processes

    # Create model and dataset
    model = YourModel()
    train_dataset = YourDataset()

    # Spawn processes for each GPU
    mp.spawn(
        train_ddp,
        args=(world_size, model, train_dataset),
        nprocs=world_size,
        join=True
    )

if __name__ == '__main__':
    main()
