# 000, "Performance Monitoring". Changed: imports.
import time

from distributed import all_reduce, get_distributed_info

# Get distributed training statistics
info = get_distributed_info()
print(f"Distributed: {info['available']}")
print(f"World size: {info['world_size']}")
print(f"Current rank: {info['rank']}")

# Benchmark communication performance
start_time = time.time()
all_reduce(large_tensor)
comm_time = time.time() - start_time
print(f"Communication time: {comm_time:.4f}s")
