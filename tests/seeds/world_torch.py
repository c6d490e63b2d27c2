"""The samples of 003 and 004 that use torch alone: part of world.py."""

from __future__ import annotations

import types
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from distributed import DistributedDataParallel, all_gather, get_rank
from tests.seeds.parts import Net, apart, batches, names, vector
from tests.seeds.running import run

# ------------------------------------------------------------------ 003


def synchronization() -> None:
    local = {
        "compute_local_loss": lambda: get_rank() + 1.0,
        "get_local_metrics": lambda: torch.tensor([get_rank() * 2.0]),
    }
    found = run("003/synchronization.py", **local)
    with (  # the sample keeps what it receives to itself
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduce,
        mock.patch.object(dist, "all_gather", wraps=dist.all_gather) as gather,
    ):
        found["custom_synchronization"]()
    loss, metrics = reduce.call_args.args[0], gather.call_args.args[0]
    assert loss.item() == 3.0 and [each.item() for each in metrics] == [0.0, 2.0]


class Lines(list):
    """A logger that keeps what it is told."""

    info = error = list.append


def logging_rank_0() -> None:
    lines = Lines()
    run("003/logging_rank_0.py", logger=lines)
    gpus = torch.cuda.device_count()
    assert lines == (["Training started", "World size: 2", f"Available GPUs: {gpus}"] if get_rank() == 0 else [])


def metrics() -> None:
    lines = Lines()
    found = run("003/metrics.py", logger=lines)["DistributedMetrics"]()
    found.log_metrics(get_rank() + 1.0, 100.0)
    assert lines == (["Avg loss across all ranks: 1.5000"] if get_rank() == 0 else [])
    assert found.all_ranks_loss == ([1.0, 2.0] if get_rank() == 0 else [])


def profiled() -> None:
    model = DistributedDataParallel(Net())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler: no GPU, and its own clock
        run("003/profiler.py", model=model, dataloader=batches(6))
    dist.barrier()  # until each rank has written its own
    assert len(list(Path("distributed_profiler").glob("*.json"))) == 2


def checkpoint() -> None:
    """A save that fails on one rank ends on all of them, and the barrier keeps nobody waiting."""
    lines = Lines()

    def save(failing: int | None) -> bool:
        """Return whether the ranks reach the barrier when the save of rank `failing` fails."""

        def save_checkpoint() -> None:
            if get_rank() == failing:
                raise OSError("No space left on device")

        found = run("003/checkpoint.py", save_checkpoint=save_checkpoint, logger=lines)
        with mock.patch.object(dist, "barrier", wraps=dist.barrier) as barrier:
            found["save_checkpoint_with_fault_tolerance"]()
        return barrier.called

    assert save(None) and not save(1) and save(None)
    assert lines == (["Checkpoint save failed: No space left on device"] if get_rank() == 1 else [])


def mixed_precision_003() -> None:
    model = DistributedDataParallel(Net())
    before = vector(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    args = types.SimpleNamespace(gradient_clip_norm=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.cuda.amp is an older name, and says so
        run("003/mixed_precision.py", **names(model=model, dataloader=batches(), optimizer=optimizer, args=args))
    assert apart(model.parameters()) == 0 and not torch.equal(before, vector(model.parameters()))


# ------------------------------------------------------------------ 004


def classifier() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    loader = [(batch, (batch.sum(1) > 0).long()) for batch in batches(8)]
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.5), "train_loader": loader}


def learns(sample: str) -> None:
    given = classifier()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.cuda.amp
        found = run(sample, **given)
        losses = [found["loss"], *(found["trainer"].train_epoch(given["train_loader"]) for _ in range(9))]
    assert losses[-1] < losses[0] * 0.8


def tensor_parallel() -> None:
    """Forward only: the gradients of these layers do not pass their collectives, and only rank 0 adds the bias."""
    found = run("004/tensor_parallel.py")
    torch.manual_seed(get_rank())
    column, row = found["ColumnParallelLinear"](4, 6, 2), found["RowParallelLinear"](6, 3, 2)
    x = torch.ones(2, 4)
    whole = [torch.cat(all_gather(p.detach())) for p in (column.weight, column.bias)]
    hidden = column(x)
    assert torch.allclose(hidden, nn.functional.linear(x, *whole), atol=1e-6)
    wide = torch.cat(all_gather(row.weight.detach()), dim=1)
    bias = row.bias.detach() if get_rank() == 0 else 0
    assert torch.allclose(row(hidden).detach(), hidden @ wide.t() + bias, atol=1e-5)


def pipeline() -> None:
    found = run("004/pipeline.py", input_data=torch.ones(3, 784))
    assert found["output"].shape == (3, 10)
    plain = nn.Sequential(*found["layers"])
    assert torch.equal(found["output"], plain(torch.ones(3, 784)))


def gpipe() -> None:
    given = classifier()
    found = run("004/gpipe.py")
    model = found["GPipe"](given["model"], num_gpus=1, chunks=4)
    batch = given["train_loader"][0][0]
    assert torch.allclose(model(batch), given["model"](batch), atol=1e-6)
    before = vector(model.parameters())
    found["train_gpipe"](model, given["train_loader"], given["optimizer"])
    assert not torch.equal(before, vector(model.parameters()))


def profile_training() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the profiler
        given = classifier()
        run("004/profiler.py", criterion=nn.functional.cross_entropy, **given)["profile_training"]()
    dist.barrier()
    assert len(list(Path("log").glob("*.json"))) == 2


def checkpointing() -> None:
    model = run("004/checkpointing.py")["CheckpointedModel"]()
    x = torch.ones(2, 16, requires_grad=True)
    model(x).sum().backward()
    found = vector(p.grad for p in model.parameters())
    model.zero_grad()
    model.layer3(model.layer2(model.layer1(x))).sum().backward()
    assert torch.allclose(found, vector(p.grad for p in model.parameters()))


def communication() -> None:
    optimizer = run("004/communication.py")["CommunicationOptimizer"]
    values = torch.linspace(-1, 1, 200)
    kept = optimizer.gradient_compression(values, 0.01)
    assert kept.nonzero().reshape(-1).tolist() == [0, 199] and kept[0] == -1
    assert optimizer.hierarchical_all_reduce(values, 2) is None  # the sample leaves it empty


CASES = {
    "003/synchronization.py": synchronization,
    "003/logging_rank_0.py": logging_rank_0,
    "003/metrics.py": metrics,
    "003/profiler.py": profiled,
    "003/checkpoint.py": checkpoint,
    "003/mixed_precision.py": mixed_precision_003,
    "004/accumulation.py": lambda: learns("004/accumulation.py"),
    "004/mixed_precision.py": lambda: learns("004/mixed_precision.py"),
    "004/tensor_parallel.py": tensor_parallel,
    "004/pipeline.py": pipeline,
    "004/gpipe.py": gpipe,
    "004/profiler.py": profile_training,
    "004/checkpointing.py": checkpointing,
    "004/communication.py": communication,
}
