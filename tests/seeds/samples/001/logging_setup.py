# 001, "Basic Monitoring". Changed: import.
# Basic logging setup
import logging
import os

from distributed import get_world_size, is_initialized

rank = int(os.environ.get('RANK', 0))
logging.basicConfig(
    level=logging.INFO,
    format=f'%(asctime)s [Rank {rank}] %(levelname)s: %(message)s',
    handlers=[
        logging.FileHandler(f'training_rank_{rank}.log'),
        logging.StreamHandler()
    ]
)

logger = logging.getLogger(__name__)

# Log basic distributed info
if is_initialized():
    world_size = get_world_size()
    logger.info(f"Distributed training: {world_size} processes")
    logger.info(f"Backend: gloo (CPU)")
else:
    logger.info("Single-process training")
