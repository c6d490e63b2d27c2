#!/bin/bash
# 002, "Launch Scripts: Single Node". Changed: 2 processes, a free port, epochs and batch.
# train_single_node.sh

python -m torch.distributed.launch \
    --nproc_per_node=2 \
    --master_port=$PORT \
    train.py \
        --num-epochs 2 \
        --batch-size 16 \
        --lr 0.001
