# 002, "Horovod: launch". Changed: 2 processes on each node, the names of the nodes.
# 16 GPUs across 2 nodes
horovodrun -np 4 -H node0:2,node1:2 \
    python train.py
