# 000, "Monitoring and Logging". Changed: the logger. Corrected (6 lines): a record factory that knows the rank.
# Enable comprehensive logging
import logging

make_record = logging.getLogRecordFactory()


def with_rank(*args, **kwargs):
    record = make_record(*args, **kwargs)
    record.rank = rank
    return record


logging.setLogRecordFactory(with_rank)
logger = logging.getLogger("000")
logging.basicConfig(
    level=logging.INFO,
    format='%(asctime)s [Rank %(rank)d] %(levelname)s: %(message)s',
    handlers=[
        logging.FileHandler(f'training_rank_{rank}.log'),
        logging.StreamHandler()
    ]
)

# Log distributed training metrics
logger.info(f"Training started: {world_size} processes")
logger.info(f"Model parameters: {sum(p.numel() for p in model.parameters())}")
logger.info(f"Batch size per GPU: {batch_size // world_size}")
