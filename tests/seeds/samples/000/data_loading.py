# 000, "Distributed Data Loading". Changed: imports; num_workers.
from torch.utils.data import DataLoader
from distributed import DistributedSampler

# Create distributed sampler
sampler = DistributedSampler(
    dataset,
    num_replicas=world_size,
    rank=rank,
    shuffle=True
)

# Use with dataloader
dataloader = DataLoader(
    dataset,
    batch_size=batch_size,
    sampler=sampler,
    num_workers=0
)

# Update sampler for each epoch
for epoch in range(num_epochs):
    sampler.set_epoch(epoch)  # Ensures different shuffling
    # ... training loop
