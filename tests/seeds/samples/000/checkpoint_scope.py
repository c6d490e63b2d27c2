# 000, "Memory Issues in Distributed Training". Changed: import.
# Problem: Out of memory in distributed training
# Solution: Scale batch size and enable memory optimizations

# Reduce per-GPU batch size
per_gpu_batch_size = total_batch_size // world_size

# Enable gradient checkpointing
from distributed import checkpoint_scope
with checkpoint_scope():
    output = model(batch)
