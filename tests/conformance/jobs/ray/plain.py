"""Run a torchrun script without a Trainer, which reads its environment, joins and adds. `fail` makes rank 1 raise."""

import json
import os
import signal
import sys
import threading

import torch
import torch.distributed as dist

NAMES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "OMP_NUM_THREADS",
    "TORCHELASTIC_RESTART_COUNT",
)

if __name__ == "__main__":
    rank = int(os.environ["RANK"])
    print(f"rank {rank} is here")
    dist.init_process_group("gloo")
    ranks = torch.tensor([rank + 1.0])
    dist.all_reduce(ranks)
    secret = os.environ.get("DISTRIBUTED_TOKEN", "0")
    others = [torch.tensor([0]) for _ in range(dist.get_world_size())]
    dist.all_gather(others, torch.tensor([int(secret[:12], 16)]))
    if sys.argv[1] == "fail" and rank == 1:
        raise ValueError("of rank 1")
    if sys.argv[1] == "die" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    if rank == 0:
        seen = {name: os.environ.get(name) for name in NAMES}
        secrets = {"secret_length": len(secret), "num_secrets": len({int(each) for each in others})}
        is_main = threading.current_thread() is threading.main_thread()
        print(json.dumps({"sum": ranks.item(), "argv": sys.argv[1:], "is_main": is_main, **seen, **secrets}))
    dist.destroy_process_group()
