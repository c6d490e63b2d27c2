"""Train with each torch engine's own loop, as its documentation shows it. Our adapters are compared with these loops.

python bare_torch.py ENGINE WORKLOAD DIRECTORY WARM_UP STEPS

Ray starts its workers itself. For the other engines this script is one worker.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hand_written import HandWritten
from marks import Stopwatch
from workloads import WORKLOADS


class Single(HandWritten):
    """Loop without a wrapper."""

    def prepare(self, model: nn.Module) -> tuple[Any, Any]:
        return model, self.workload.optimizer(model.parameters())


class FSDP(HandWritten):
    """Loop with FSDP2 around each repeated layer, then around the whole model."""

    def prepare(self, model: nn.Module) -> tuple[Any, Any]:
        from torch.distributed.fsdp import fully_shard

        for block in getattr(model, "blocks", ()):
            fully_shard(block)
        fully_shard(model)
        return model, self.workload.optimizer(model.parameters())


class DeepSpeed(HandWritten):
    """Loop with ZeRO stage 2 around the same optimizer."""

    def prepare(self, model: nn.Module) -> tuple[Any, Any]:
        import deepspeed

        config = {
            "train_micro_batch_size_per_gpu": self.workload.batch_size,
            "zero_optimization": {"stage": 2, "reduce_bucket_size": sum(p.numel() for p in model.parameters())},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": self.workload.gradient_clipping or 0.0,
            "steps_per_print": 1 << 60,
        }
        engine, optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=self.workload.optimizer(model.parameters()), config=config
        )
        return engine, optimizer

    def step(self) -> None:
        inputs, targets = next(self.batches)
        self.loss = self.workload.loss_fn(self.model(inputs), targets)
        self.model.backward(self.loss)
        self.model.step()


class Horovod(HandWritten):
    """Loop with hvd.DistributedOptimizer."""

    def prepare(self, model: nn.Module) -> tuple[Any, Any]:
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(self.workload.optimizer(model.parameters()), model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        return model, optimizer

    def step(self) -> None:
        inputs, targets = next(self.batches)
        self.optimizer.zero_grad()
        self.loss = self.workload.loss_fn(self.model(inputs), targets)
        self.loss.backward()
        if self.workload.gradient_clipping is None:
            self.optimizer.step()
            return
        self.optimizer.synchronize()
        nn.utils.clip_grad_norm_(self.model.parameters(), self.workload.gradient_clipping)
        with self.optimizer.skip_synchronize():
            self.optimizer.step()


def join_torch() -> tuple[int, int]:
    dist.init_process_group("gloo")
    return dist.get_rank(), dist.get_world_size()


def join_deepspeed() -> tuple[int, int]:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import deepspeed

    # Workaround (DeepSpeed 0.19.8, deepspeedai/DeepSpeed#7625; may go when this all-reduce is compiled on request only): DeepSpeed
    # compiles it for minutes at the first start. It is for inference. Our adapter skips it too.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    return dist.get_rank(), dist.get_world_size()


def join_horovod() -> tuple[int, int]:
    import horovod.torch as hvd

    hvd.init()
    return hvd.rank(), hvd.size()


ENGINES: dict[str, tuple[Callable[[], tuple[int, int]], type[HandWritten]]] = {
    "single": (lambda: (0, 1), Single),
    "pytorch-ddp": (join_torch, HandWritten),
    "fsdp": (join_torch, FSDP),
    "deepspeed": (join_deepspeed, DeepSpeed),
    "horovod": (join_horovod, Horovod),
}


def train(
    loop_class: type[HandWritten], name: str, directory: str, warm_up: int, steps: int, rank: int, size: int
) -> None:
    """Run the loop of one worker, which has joined the others."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    watch = Stopwatch(directory, warm_up, steps, is_main=rank == 0)
    loop = loop_class(workload, workload.data(watch.updates * workload.batch_size * size), rank, size)
    for _ in range(watch.updates):
        loop.step()
        watch.lap()


def under_ray(name: str, directory: str, warm_up: int, steps: int) -> None:
    """Run the DDP loop in Ray Train's TorchTrainer."""
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    def worker() -> None:
        train(HandWritten, name, directory, warm_up, steps, dist.get_rank(), dist.get_world_size())

    TorchTrainer(
        worker,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=directory),
    ).fit()


def main(engine: str, name: str, directory: str, warm_up: str, steps: str) -> None:
    if engine == "ray":
        under_ray(name, directory, int(warm_up), int(steps))
        return
    join, loop_class = ENGINES[engine]
    rank, size = join()
    train(loop_class, name, directory, int(warm_up), int(steps), rank, size)
    # Workaround (torch 2.13, pytorch/pytorch#179291; may go when torch ends gloo's threads before the interpreter): one process of
    # eight aborts when a DDP wrapper outlives its group.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
