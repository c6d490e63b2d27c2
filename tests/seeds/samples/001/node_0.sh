# 001, "Multi-Node Distributed Training". Changed: module; 2 processes, the address; the command of node 1 is in node_1.sh.
# Node 0 (master node)
python -m distributed.launcher \
    train.py \
    --nproc_per_node=2 \
    --nnodes=2 \
    --node_rank=0 \
    --master_addr=10.99.0.1 \
    --master_port=29500 \
    --backend=gloo
