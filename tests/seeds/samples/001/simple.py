#!/usr/bin/env python3
# 001, "Basic Functionality Testing". Changed: imports.
"""Test current distributed functionality."""

from distributed import (
    init_process_group, get_world_size, get_rank,
    all_reduce, DistributedSampler
)
from torch import Tensor
import numpy as np

def test_basic_functionality():
    """Test basic distributed features."""

    # Test process group initialization
    init_process_group(backend="gloo", world_size=1, rank=0)
    print(f"World size: {get_world_size()}, Rank: {get_rank()}")

    # Test communication primitives
    tensor = Tensor(np.array([1.0, 2.0, 3.0]))
    result = all_reduce(tensor)
    print(f"All-reduce result: {result.data}")

    # Test distributed sampler
    sampler = DistributedSampler(dataset_size=100, num_replicas=1, rank=0)
    indices = list(sampler)
    print(f"Sampler generated {len(indices)} indices")

    print("✅ Basic functionality working")

if __name__ == "__main__":
    test_basic_functionality()
