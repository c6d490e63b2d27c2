# 003, "Performance Metrics". Changed: imports. Corrected (4 lines): the losses are gathered, by all ranks, where one value was repeated.
import torch
import torch.distributed as dist

from distributed import all_gather

# Track distributed training metrics
class DistributedMetrics:
    def __init__(self):
        self.all_ranks_loss = []
        self.rank_throughput = []

    def log_metrics(self, loss, throughput):
        # Collect from all ranks
        all_losses = [each.item() for each in all_gather(torch.tensor([loss]))]
        if dist.get_rank() == 0:
            self.all_ranks_loss.extend(all_losses)
            self.rank_throughput.append(throughput)

            avg_loss = sum(all_losses) / len(all_losses)
            logger.info(f"Avg loss across all ranks: {avg_loss:.4f}")
