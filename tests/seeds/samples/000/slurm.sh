#!/bin/bash
# 000, "SLURM Integration". Changed: 2 nodes of 2 processes, no GPUs to ask for. Corrected (2 lines): RANK and LOCAL_RANK are not exported, as they are 0 in every task.
#SBATCH --job-name=distributed_training
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --time=24:00:00

# Set distributed training environment
export MASTER_ADDR=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)
export MASTER_PORT=29500
export WORLD_SIZE=$SLURM_NTASKS

# Launch distributed training
srun python train.py
