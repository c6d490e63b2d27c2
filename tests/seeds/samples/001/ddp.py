# 001, "Current Usage Recommendations". Changed: import.
from distributed import DistributedDataParallel

# Basic configuration (advanced options not implemented)
ddp_model = DistributedDataParallel(
    model,
    # bucket_size_mb parameter exists but has no effect
    # find_unused_parameters parameter exists but has no effect
)
