# 001, "Limited Multi-Node Support". Changed: module; 2 processes.
# Problem: Multi-node training doesn't work reliably
# Current limitation: Basic launcher, no SSH automation

# Workaround: Use single-node multi-process for now
python -m distributed.launcher \
    train.py \
    --nproc_per_node=2 \
    --nnodes=1 \
    --backend=gloo
