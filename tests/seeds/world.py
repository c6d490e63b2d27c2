"""The samples for a script without a Trainer, on two processes of one launch."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import distributed
from distributed import DistributedDataParallel, all_gather, get_rank, get_world_size
from tests.seeds import corrected
from tests.seeds.running import run, run_all

criterion = nn.functional.mse_loss
targets = torch.ones(8, 1)


class Net(nn.Module):
    """Alike on all ranks; its first layer is a block that can be computed again."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def batches(count: int = 4) -> list[torch.Tensor]:
    """Other ones on each rank."""
    generator = torch.Generator().manual_seed(get_rank())
    return [torch.randn(8, 4, generator=generator) for _ in range(count)]


def names(**more: Any) -> dict[str, Any]:
    return {"criterion": criterion, "targets": targets, **more}


def vector(values: Any) -> torch.Tensor:
    return torch.cat([value.detach().double().reshape(-1) for value in values])


def apart(values: Any) -> float:
    """How far the ranks' tensors are from each other."""
    mine = vector(values)
    return max((each - mine).abs().max().item() for each in all_gather(mine))


def assert_gradients(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    """The gradients of `model` are the mean over the ranks of the sums over their `inputs`."""
    plain = copy.deepcopy(model.module)
    plain.zero_grad()
    for batch in inputs:
        criterion(plain(batch), targets).backward()
    expected = torch.stack(all_gather(vector(p.grad for p in plain.parameters()))).mean(0)
    assert torch.allclose(vector(p.grad for p in model.parameters()), expected, atol=1e-6)


def printed(sample: str, **more: Any) -> tuple[str, dict[str, Any]]:
    with contextlib.redirect_stdout(io.StringIO()) as text:
        left = run(sample, **more)
    return text.getvalue(), left


# ------------------------------------------------------------------ 000 and 001


def data_parallel(sample: str) -> None:
    inputs = batches()
    found = run(sample, **names(MyTransformerModel=lambda: Net(get_rank()), dataloader=inputs))
    model = found["ddp_model"]
    assert apart(model.parameters()) == 0
    first = Net(0)  # rank 0's
    before, after = (torch.stack(all_gather(criterion(m(inputs[0]), targets).detach()[None])) for m in (first, model))
    assert after.sum() < before.sum()


def joined(sample: str) -> None:
    run(sample)
    info = distributed.get_distributed_info()
    assert (info["world_size"], info["backend"], info["initialized"]) == (2, "gloo", True)


def data_loading_000() -> None:
    found = run("000/data_loading.py", dataset=range(10), world_size=2, rank=get_rank(), batch_size=2, num_epochs=2)
    mine = torch.cat(list(found["dataloader"]))
    assert torch.cat(all_gather(mine)).sort().values.tolist() == list(range(10))


def data_loading_001() -> None:
    seen: list[int] = []
    dataset = types.SimpleNamespace(__getitem__=None)

    class Data:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            seen.append(index)
            return index

    dataset = Data()
    run("001/data_loading.py", dataset=dataset, world_size=2, rank=get_rank(), num_epochs=2)
    assert len(seen) == 10  # five in each of two epochs
    first = torch.cat(all_gather(torch.tensor(seen[:5])))
    assert first.sort().values.tolist() == list(range(10)) and seen[:5] != seen[5:]


def primitives_000() -> None:
    found = run("000/primitives.py")
    assert found["reduced"].tolist() == [[2, 4, 6]]
    assert [each.tolist() for each in found["gathered"]] == [[[2, 4, 6]]] * 2
    assert found["scattered"].tolist() == ([[2, 4, 6]] if get_rank() == 0 else [])  # one row for two ranks


def primitives_001() -> None:
    np.random.seed(3)  # the same on all ranks
    text, found = printed("001/primitives.py")
    assert "Reduced: tensor([2., 4., 6.])" in text and "Gathered 2 tensors" in text
    rows = torch.from_numpy(found["data"])[2 * get_rank() : 2 * get_rank() + 2]
    assert torch.allclose(found["scattered"], rows)


def no_sync() -> None:
    model, inputs = DistributedDataParallel(Net()), batches()
    run("000/no_sync.py", **names(model=model, micro_batches=inputs))
    assert_gradients(model, inputs)


def accumulation_001() -> None:
    model, inputs = DistributedDataParallel(Net()), batches()
    run("001/accumulation.py", **names(model=model, micro_batches=inputs))
    assert_gradients(model, inputs)


def manual_sync() -> None:
    model = DistributedDataParallel(Net())
    before = vector(model.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run("001/manual_sync.py", **names(model=model, dataloader=batches(), optimizer=optimizer))
    assert apart(model.parameters()) == 0 and not torch.equal(before, vector(model.parameters()))


def scaling_000() -> None:
    found = run("000/scaling.py")
    assert (found["scaled_batch_size"], found["scaled_lr"]) == (64, 2e-4)


def scaling_001() -> None:
    assert run("001/scaling.py")["per_process_batch_size"] == 16


def wrapped(sample: str) -> None:
    model = run(sample, model=Net(get_rank()))["ddp_model"]
    assert apart(model.parameters()) == 0
    criterion(model(batches()[0]), targets).backward()
    assert_gradients(model, batches()[:1])


def checkpoint_memory() -> None:
    model = DistributedDataParallel(Net())
    run("000/checkpoint_memory.py", **names(ddp_model=model, batch=batches()[0]))
    assert_gradients(model, batches()[:1])
    with contextlib.suppress(distributed.ConfigError):
        distributed.memory_pool_scope()
        raise AssertionError("memory_pool_scope() has an effect now: use it in 000/checkpoint_memory.py")


def checkpoint_scope() -> None:
    model = DistributedDataParallel(Net())
    found = run("000/checkpoint_scope.py", model=model, batch=batches()[0], total_batch_size=64, world_size=2)
    assert found["per_gpu_batch_size"] == 32
    criterion(found["output"], targets).backward()
    assert_gradients(model, batches()[:1])


def uneven() -> None:
    """Each rank has a batch; what the other branch does on a rank without one stands among the corrections."""
    model = DistributedDataParallel(Net())
    run("000/uneven.py", **names(model=model, batch=batches()[0]))
    assert_gradients(model, batches()[:1])


def info() -> None:
    text, found = printed("000/info.py", large_tensor=torch.ones(1000))
    assert f"Distributed: True\nWorld size: 2\nCurrent rank: {get_rank()}\n" in text
    assert "Communication time: " in text and found["large_tensor"].eq(2).all()


def status() -> None:
    text, _ = printed("001/status.py")
    assert f"Distributed available: True\nWorld size: 2\nCurrent rank: {get_rank()}\nBackend: gloo\n" in text
    assert "Communication test: " in text


def logging_setup(sample: str, said: str) -> None:
    root, factory = logging.getLogger(), logging.getLogRecordFactory()
    before, root.handlers, level = root.handlers, [], root.level
    try:
        run(sample, rank=get_rank(), world_size=2, batch_size=64, model=Net())
    finally:
        for handler in root.handlers:
            handler.close()
        root.handlers = before
        root.setLevel(level)
        logging.setLogRecordFactory(factory)
    text = Path(f"training_rank_{get_rank()}.log").read_text()
    assert f"[Rank {get_rank()}] INFO: {said}\n" in text


# ------------------------------------------------------------------ 003


def synchronization() -> None:
    local = {
        "compute_local_loss": lambda: get_rank() + 1.0,
        "get_local_metrics": lambda: torch.tensor([get_rank() * 2.0]),
    }
    found = run("003/synchronization.py", **local)
    loss, metrics = found["custom_synchronization"]()
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
    traces = list(Path("distributed_profiler").glob("*.json"))
    assert len(traces) == get_world_size() or get_rank() == 1, traces


def checkpoint() -> None:
    """A save that fails on one rank ends on all of them, and the barrier keeps nobody waiting."""
    lines = Lines()

    def save(failing: int | None) -> bool:
        def save_checkpoint() -> None:
            if get_rank() == failing:
                raise OSError("No space left on device")

        saved: bool = run("003/checkpoint.py", save_checkpoint=save_checkpoint, logger=lines)[
            "save_checkpoint_with_fault_tolerance"
        ]()
        return saved

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
    assert list(Path("log").glob("*.json"))


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
    "000/data_parallel.py": lambda: data_parallel("000/data_parallel.py"),
    "000/nccl.py": lambda: joined("000/nccl.py"),
    "000/gloo.py": lambda: joined("000/gloo.py"),
    "000/data_loading.py": data_loading_000,
    "000/primitives.py": primitives_000,
    "000/no_sync.py": no_sync,
    "000/scaling.py": scaling_000,
    "000/buckets.py": lambda: wrapped("000/buckets.py"),
    "000/checkpoint_memory.py": checkpoint_memory,
    "000/checkpoint_scope.py": checkpoint_scope,
    "000/info.py": info,
    "000/uneven.py": uneven,
    "000/logging_setup.py": lambda: logging_setup("000/logging_setup.py", "Training started: 2 processes"),
    "001/data_parallel.py": lambda: data_parallel("001/data_parallel.py"),
    "001/data_loading.py": data_loading_001,
    "001/primitives.py": primitives_001,
    "001/accumulation.py": accumulation_001,
    "001/scaling.py": scaling_001,
    "001/ddp.py": lambda: wrapped("001/ddp.py"),
    "001/status.py": status,
    "001/manual_sync.py": manual_sync,
    "001/logging_setup.py": lambda: logging_setup("001/logging_setup.py", "Distributed training: 2 processes"),
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
    **corrected.CASES,
}

if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    run_all(CASES, Path(os.environ["SAMPLES_OUT"]))
    assert dist.is_initialized()
    distributed.destroy_process_group()
