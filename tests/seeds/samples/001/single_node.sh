#!/bin/bash
# 001, "Single-Node CPU Training". Changed: module; 2 processes, a free port.
# Recommended approach for current implementation

# Set environment variables
export MASTER_ADDR=localhost
export MASTER_PORT=$PORT
export WORLD_SIZE=2
export RANK=0

# Launch with CPU backend
python -m distributed.launcher \
    train.py \
    --nproc_per_node=2 \
    --nnodes=1 \
    --backend=gloo
