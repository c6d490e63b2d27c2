# 000, "Single-Node Multi-GPU Training". Changed: import; 2 processes, gloo. Corrected (4 lines): positional arguments stand before keywords.
from distributed import launch_distributed_training

# Launch programmatically
launch_distributed_training(
    "train.py",
    # Script arguments
    "--model", "transformer",
    "--batch_size", "32",
    nproc_per_node=2,    # 2 processes
    nnodes=1,            # Single node
    backend="gloo",
)
