"""The warning about a script whose processes do not share their work."""

from __future__ import annotations


def ways_out(script: str | None, world_size: int) -> str:
    """Return the warning about a script that ran on `world_size` processes, none of which shared its work with another."""
    return (
        f"{script} ran on {world_size} processes, and none of them used a Trainer, joined a process group or made a strategy:"
        f" unless the script divides its work by RANK, it was done {world_size} times. Train with distributed.Trainer; or join"
        " the processes in the script (torch.distributed.init_process_group with DistributedDataParallel and"
        " DistributedSampler, or TensorFlow's MultiWorkerMirroredStrategy); or start one process (--nproc-per-node 1)"
    )
