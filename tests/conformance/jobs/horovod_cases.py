"""Train every case under one backend, for a test that compares Horovod with DDP. Arguments: directory, backend."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.utils.checkpoint
from torch.utils.data import TensorDataset

from distributed import HorovodTrainer, Trainer
from tests.conformance.jobs.recording import RANK, WORLD, facts, run_cases, train

OUT, BACKEND = Path(sys.argv[1]), sys.argv[2]
SAMPLES, FEATURES, CLASSES = 44, 6, 4
IS_HOROVOD = BACKEND == "horovod"
BASE = {
    "backend": BACKEND, "epochs": 2, "global_batch_size": 12, "learning_rate": 0.05, "shuffle": False,
    "dtype": "float64", "checkpoint_frequency": None, "log_every_n_steps": 1,
}  # fmt: skip
FP32 = {"dtype": "float32"}


def data(dtype=torch.float64):
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDataset(x, torch.randint(0, CLASSES, (SAMPLES,), generator=generator))


class Net(torch.nn.Module):
    """Have a layer `extra` that no rank or one rank uses, and `word`, an embedding with sparse gradients."""

    def __init__(self, extra=None, word=False, seed=5):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = torch.nn.Sequential(
                torch.nn.Linear(FEATURES, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh()
            )
            self.head = torch.nn.Linear(8, CLASSES)
            self.extra = torch.nn.Linear(8, 8) if extra else None
            self.word = torch.nn.Embedding(16, 8, sparse=True) if word else None
        self.used_by = extra

    def forward(self, x):
        hidden = self.body(x)
        if self.word is not None:
            hidden = hidden + self.word((x[:, 0].abs() * 10).long().clamp(max=15))
        if self.used_by == RANK:
            hidden = hidden + self.extra(hidden)
        return self.head(hidden)


def blocks():
    torch.manual_seed(5)
    layers = [torch.nn.Sequential(torch.nn.Linear(FEATURES, FEATURES), torch.nn.Tanh()) for _ in range(2)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(FEATURES, CLASSES))


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)


def case(model=Net, **settings):
    return lambda: train(model, data(), **{**BASE, **settings})


def fp32(**settings):
    return lambda: train(Net, data(torch.float32), **{**BASE, **FP32, **settings})


def extra(used_by):
    settings = {} if IS_HOROVOD else {"find_unused_parameters": True}
    return case(lambda: Net(extra=used_by), optimizer=sgd, **settings)


def used_optimizer():
    """Train with an optimizer that has made a different step on each rank before."""
    model = Net(seed=RANK).double()
    optimizer = sgd(model.parameters())
    model(torch.full((1, FEATURES), RANK + 1.0, dtype=torch.float64)).sum().backward()
    optimizer.step()
    return train(model, data(), **BASE, optimizer=optimizer)


def small_buckets():
    """Count the all-reduces of gradients in each update."""
    import horovod.torch as hvd

    from distributed.backends._horovod import buckets

    names, send = [], hvd.allreduce_async_
    hvd.allreduce_async_ = lambda tensor, **more: (names.append(more["name"]), send(tensor, **more))[1]
    before, buckets.CAPACITY_MB = buckets.CAPACITY_MB, 300 / 2**20
    try:
        seen = case(gradient_accumulation_steps=3)()
    finally:
        hvd.allreduce_async_, buckets.CAPACITY_MB = send, before
    return {**seen, "names": [name for name in names if name.startswith("gradients")]}


def with_object():
    import horovod.torch as hvd

    settings = {name: value for name, value in {**BASE, **FP32}.items() if name != "backend"}
    return train(Net, data(torch.float32), **settings, trainer=HorovodTrainer, compression=hvd.Compression.fp16)


def averaged():
    trainer = Trainer(Net, **BASE)
    trainer.fit(data())
    return {"average": trainer.metric_average(RANK + 1.5, name="accuracy"), "of": WORLD}


def wrong_metric():
    return {"average": Trainer(Net, **BASE).metric_average("high", name="accuracy")}


def wrapped():
    import horovod.torch as hvd

    model = Net().double()
    return train(model, data(), **BASE, optimizer=hvd.DistributedOptimizer(sgd(model.parameters())))


class SharedAndRecomputed(torch.nn.Module):
    """Have a first layer that gets two gradients in one backward pass, from two nested passes."""

    def __init__(self):
        super().__init__()
        self.shared, self.head = torch.nn.Linear(FEATURES, FEATURES), torch.nn.Linear(FEATURES, CLASSES)

    def forward(self, x):
        x = x.clone().requires_grad_()
        for _ in range(2):
            x = torch.utils.checkpoint.checkpoint(self.shared, x, use_reentrant=True)
        return self.head(x)


def traced():
    trainer = HorovodTrainer(Net, **{k: v for k, v in BASE.items() if k != "backend"}, timeline="trace/of-two.json")
    return facts(trainer, trainer.fit(data()))


CASES = {
    "plain": case(),
    "accumulated": case(gradient_accumulation_steps=3, gradient_clipping=0.1),
    "own-start": lambda: train(Net(seed=RANK), data(), **BASE),
    "unused": extra(7),
    "half-used": extra(1),
    "sparse": case(lambda: Net(word=True), optimizer=lambda params: torch.optim.SGD(params, lr=0.1)),
    "fp32": fp32(),
    "bf16": fp32(mixed_precision="bf16"),
    "fp16": fp32(mixed_precision="fp16", scaler_init_scale=256),
    "recomputed": case(blocks, gradient_accumulation_steps=2, activation_checkpointing=True),
    "used-optimizer": used_optimizer,
}
if IS_HOROVOD:
    CASES |= {
        "small-buckets": small_buckets, "word": fp32(horovod={"compression": "fp16"}), "object": with_object,
        "shared-and-recomputed": case(SharedAndRecomputed), "averaged": averaged, "wrong-metric": wrong_metric, "wrapped": wrapped, "traced": traced,
        "prepared": lambda: {"timeline": os.environ.get("HOROVOD_TIMELINE")},
    }  # fmt: skip
run_cases(CASES, OUT)
