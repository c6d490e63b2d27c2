# 004, "Using torchrun". Changed: 2 processes, a free port; the command for several nodes is left out (5 lines).
# Launch with torchrun
torchrun --nproc_per_node=2 --master_port=$PORT train_ddp.py
