# 000, "Scaling Guidelines". Changed: import.
from distributed import DistributedDataParallel

# Configure gradient bucket size
ddp_model = DistributedDataParallel(
    model,
    bucket_size_mb=25,  # Larger buckets = fewer communications
    find_unused_parameters=False  # Optimize if no unused params
)
