#!/bin/bash
# 003, "Slurm Cluster". Changed: module, whose model is a script here; its flags follow --; 2 nodes of 2 processes, no GPUs to ask for, sizes, 4 steps. Corrected (3 lines): the first line is that of the shell, as sbatch demands; the last one goes on.
#SBATCH --job-name=sloughgpt-distributed
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=24:00:00

# Export environment variables
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export MASTER_PORT=29500

# Launch distributed training
srun --ntasks-per-node=2 --nodes=2 \
python -m distributed.cli train --script char_gpt.py \
    --world-size 4 \
    --master-addr $MASTER_ADDR \
    --master-port $MASTER_PORT \
    --batch-size 8 \
    --max-steps 4 \
    -- --hidden-size 32 --attention-heads 2 --layers 2 --vocab-size 64 --max-seq-length 32 --sample-length 5
