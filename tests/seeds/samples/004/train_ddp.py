# 004, "Using torchrun". Changed: gloo, the CPU; import.
# train_ddp.py
import torch
from names import YourModel
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

def main():
    # Initialize from environment variables set by torchrun
    dist.init_process_group(backend='gloo')

    rank = dist.get_rank()
    world_size = dist.get_world_size()

    # Create model
    model = YourModel().to('cpu')
    ddp_model = DDP(model)

    # Training loop
    # ... (same as above)

    dist.destroy_process_group()

if __name__ == '__main__':
    main()
