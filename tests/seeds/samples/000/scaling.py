# 000, "Scaling Guidelines". Changed: import.
from distributed import get_world_size

# Scale batch size linearly with number of GPUs
base_batch_size = 32
world_size = get_world_size()
scaled_batch_size = base_batch_size * world_size

# Adjust learning rate accordingly
base_lr = 1e-4
scaled_lr = base_lr * world_size
