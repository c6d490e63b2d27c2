# 003, "Distributed Logging". Changed: imports.
import torch
import torch.distributed as dist

# Only log from rank 0 to avoid duplicate logs
if dist.get_rank() == 0:
    logger.info("Training started")
    logger.info(f"World size: {dist.get_world_size()}")
    logger.info(f"Available GPUs: {torch.cuda.device_count()}")
