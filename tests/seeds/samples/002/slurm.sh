#!/bin/bash
# 002, "Launch Scripts: Multi-Node with SLURM". Changed: 2 nodes of 2 processes, no GPUs to ask for. Corrected (8 lines): the nodes are listed one by one, and each task reads its own $SLURM_NODEID.
#SBATCH --nodes=2
#SBATCH --time=12:00:00

nodes=($(scontrol show hostnames $SLURM_NODELIST))
master_addr=${nodes[0]}

srun bash -c "python -m torch.distributed.launch \
    --nproc_per_node=2 \
    --nnodes=2 \
    --node_rank=\$SLURM_NODEID \
    --master_addr=$master_addr \
    --master_port=29500 \
    train.py"
