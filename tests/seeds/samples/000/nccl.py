# 000, "NCCL Backend". Changed: imports; 2 processes; each has the rank that its launcher gave it.
import os

from distributed import init_process_group

# Optimal for NVIDIA GPU clusters
init_process_group(
    backend="nccl",
    init_method="env://",
    world_size=2,  # Total number of processes
    rank=int(os.environ["RANK"])         # Current process rank
)
