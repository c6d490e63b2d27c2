# 000, "Gloo Backend". Changed: imports; 2 processes; each has the rank that its launcher gave it.
import os

from distributed import init_process_group

# Universal backend for CPU training
init_process_group(
    backend="gloo",
    init_method="env://",
    world_size=2,
    rank=int(os.environ["RANK"])
)
