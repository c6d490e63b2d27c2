# 002, "Horovod: launch". Changed: 2 nodes of 1 process, their names.
# 16 GPUs across 2 nodes
horovodrun -np 2 -H node0:1,node1:1 \
    python train.py
