# 003, "Fault Tolerance". Changed: imports. Corrected (4 lines): the ranks agree on a failure, else the others wait in the barrier.
import torch
import torch.distributed as dist

# Checkpoint with fault tolerance
def save_checkpoint_with_fault_tolerance():
    failed = torch.zeros(1)
    try:
        save_checkpoint()
    except Exception as e:
        failed += 1
        logger.error(f"Checkpoint save failed: {e}")
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    if failed:
        # Continue training
        return

    # Synchronize with all ranks
    if dist.get_world_size() > 1:
        dist.barrier()
