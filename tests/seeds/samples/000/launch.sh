# 000, "Single-Node Multi-GPU Training". Changed: module; 2 processes, a free port, gloo.
# Using the distributed launcher
python -m distributed.launcher \
    train.py \
    --nproc_per_node=2 \
    --nnodes=1 \
    --master_addr=localhost \
    --master_port=$PORT \
    --backend=gloo
