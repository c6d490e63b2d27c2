# 001, "Status Checking". Changed: imports.
from distributed import all_reduce, get_distributed_info, is_initialized

# Check if distributed training is set up
if is_initialized():
    info = get_distributed_info()
    print(f"Distributed available: {info['available']}")
    print(f"World size: {info['world_size']}")
    print(f"Current rank: {info['rank']}")
    print(f"Backend: {info['backend']}")
else:
    print("Distributed training not initialized")

# Test basic communication
if is_initialized():
    from torch import Tensor
    import numpy as np
    import time

    test_tensor = Tensor(np.random.randn(100, 100).astype(np.float32))
    start_time = time.time()
    result = all_reduce(test_tensor)
    comm_time = time.time() - start_time
    print(f"Communication test: {comm_time:.4f}s")
