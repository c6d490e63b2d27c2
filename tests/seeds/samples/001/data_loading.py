# 001, "Distributed Data Loading". Changed: import.
from distributed import DistributedSampler

# Create distributed sampler - this works correctly
sampler = DistributedSampler(
    dataset_size=len(dataset),  # Pass dataset size, not dataset object
    num_replicas=world_size,
    rank=rank,
    shuffle=True
)

# Use with your data loading logic
for epoch in range(num_epochs):
    sampler.set_epoch(epoch)  # Ensures different shuffling per epoch

    for idx in sampler:
        # Load data at index `idx`
        batch = dataset[idx]
        # ... training loop
