# 001, "Single-Node Multi-Process Training". Changed: module; 2 processes, a free port.
# Using the distributed launcher (CPU backend recommended)
python -m distributed.launcher \
    train.py \
    --nproc_per_node=2 \
    --nnodes=1 \
    --master_addr=localhost \
    --master_port=$PORT \
    --backend=gloo
