# 002, "Single Node, Multiple GPUs". Changed: 2 processes, over Gloo, the run directory; the first command is in train.sh.
# Horovod - 8 GPUs
horovodrun --gloo -np 2 python -m distributed.cli train --script train.py --backend horovod --run-dir run
