# 002, "Multi-Node Cluster". Changed: 2 nodes of 1 process on CPUs instead of 4 nodes of 8 GPUs, the address of the cluster.
# 4 nodes × 8 GPUs = 32 GPUs total
python -m distributed.cli train \
    --script train.py \
    --num-nodes 2 \
    --nproc-per-node 1 \
    --backend ray \
    --address ray://10.99.0.1:10001
