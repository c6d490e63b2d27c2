# 001, "Current Usage Recommendations". Changed: import.
from distributed import get_world_size

# Scale batch size with number of processes
base_batch_size = 32
world_size = get_world_size()
per_process_batch_size = base_batch_size // world_size  # Divide, don't multiply

# Learning rate scaling is experimental
base_lr = 1e-4
# lr = base_lr * sqrt(world_size)  # Conservative scaling
