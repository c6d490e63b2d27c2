# 002, "Single Node, Multiple GPUs". Changed: 2 processes on CPUs instead of 4 GPUs, the run directory; horovodrun is in horovod.sh.
# PyTorch DDP - 4 GPUs on one machine
python -m distributed.cli train \
    --script train.py \
    --nproc-per-node 2 \
    --backend pytorch-ddp \
    --run-dir run
