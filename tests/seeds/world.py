"""The samples for a script without a Trainer, on two processes of one launch."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import distributed
from distributed import DistributedDataParallel, all_gather, get_rank
from tests.seeds import corrected, world_torch
from tests.seeds.parts import Net, apart, assert_gradients, batches, criterion, names, printed, targets, vector
from tests.seeds.running import run, run_all

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

    class Data:
        def __len__(self) -> int:
            return 10

        def __getitem__(self, index: int) -> int:
            seen.append(index)
            return index

    run("001/data_loading.py", dataset=Data(), world_size=2, rank=get_rank(), num_epochs=2)
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
    **world_torch.CASES,
    **corrected.CASES,
}

if __name__ == "__main__":
    assert os.environ["WORLD_SIZE"] == "2"
    run_all(CASES, Path(os.environ["SAMPLES_OUT"]))
    assert dist.is_initialized()
    distributed.destroy_process_group()
