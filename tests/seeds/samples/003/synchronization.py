# 003, "Synchronization". Changed: import. Corrected (2 lines): all_gather takes the list first.
import torch
# Custom synchronization points
import torch.distributed as dist

def custom_synchronization():
    # Barrier - wait for all processes
    dist.barrier()

    # All-reduce - combine values from all processes
    local_loss = compute_local_loss()
    global_loss = torch.tensor([local_loss])
    dist.all_reduce(global_loss, op=dist.ReduceOp.SUM)

    # All-gather - collect values from all processes
    local_metrics = get_local_metrics()
    all_metrics = [torch.zeros_like(local_metrics) for _ in range(dist.get_world_size())]
    dist.all_gather(all_metrics, local_metrics)
