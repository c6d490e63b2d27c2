# 000, "Memory Optimization". Changed: import. Corrected (9 lines): no memory_pool_scope(), which refuses, as torch pools its memory.
from distributed import gradient_checkpointing

# Enable gradient checkpointing for memory efficiency
with gradient_checkpointing.checkpoint_scope():
    # Distributed training with memory optimizations
    output = ddp_model(batch)
    loss = criterion(output, targets)
    loss.backward()
