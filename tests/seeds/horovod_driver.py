"""The samples for Horovod, on two processes of one launch."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.seeds.running import run, run_all

generator = torch.Generator().manual_seed(0)
inputs = torch.randn(96, 8, generator=generator)
DATA = TensorDataset(inputs, inputs[:, :3].argmax(1))
LOADER = DataLoader(DATA, batch_size=8, shuffle=True)


def net() -> nn.Module:
    import horovod.torch as hvd

    torch.manual_seed(hvd.rank())  # rank 0's weights must become everyone's
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


def apart(model: nn.Module) -> float:
    import horovod.torch as hvd

    rows = hvd.allgather(torch.cat([p.detach().reshape(-1) for p in model.parameters()])[None])
    return (rows - rows[0]).abs().max().item()


def trainer() -> None:
    import horovod.torch as hvd

    hvd.init()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    given = {"loss_fn": nn.functional.cross_entropy, "train_loader": LOADER, "accuracy": float(hvd.rank())}
    found = run("002/horovod.py", model=model, optimizer=optimizer, **given)
    assert found["avg_accuracy"] == 0.5 and found["trainer"].history.steps == 18
    rows = found["trainer"].history.rows
    assert rows[-1]["loss"] < rows[0]["loss"] and apart(found["trainer"].model) == 0


def compression() -> None:
    found = run("002/compression.py", model=net())["trainer"]
    assert found.fit(LOADER).steps == 6 and found.merged.config.horovod["compression"]
    assert apart(found.model) == 0


def plain() -> None:
    """A loop of one's own, with Horovod's own calls."""
    import horovod.torch as hvd

    sampler = torch.utils.data.DistributedSampler(DATA, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(DATA, batch_size=8, sampler=sampler)
    model = net()
    before = nn.functional.cross_entropy(model(inputs), DATA.tensors[1]).item()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Horovod's own, at this torch
        found = run("004/horovod.py", YourModel=lambda: model, train_loader=loader, epochs=20)
    after = nn.functional.cross_entropy(found["model"](inputs), DATA.tensors[1]).item()
    assert apart(found["model"]) == 0 and after < 0.9 * before


CASES = {
    "002/horovod.py": trainer,
    "002/compression.py": compression,
    "004/horovod.py": plain,
}

if __name__ == "__main__":
    run_all(CASES, Path(os.environ["SAMPLES_OUT"]))
