# 002, "Efficient Data Loading". Changed: loader workers.
from torch.utils.data import DataLoader, DistributedSampler

# Use DistributedSampler to partition data
sampler = DistributedSampler(
    dataset,
    num_replicas=num_gpus,
    rank=rank
)

train_loader = DataLoader(
    dataset,
    batch_size=batch_size,
    sampler=sampler,
    num_workers=0,  # Multi-threaded loading
    pin_memory=True  # Faster GPU transfer
)
