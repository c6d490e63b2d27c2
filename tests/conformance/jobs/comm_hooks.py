"""Train with each of our own values of ddp.comm_hook, on four processes in two groups. Arguments: the directory for the results."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import TensorDataset

from distributed import Callback, Trainer
from tests.conformance.jobs.options import BASE, case, deep, many
from tests.conformance.jobs.recording import facts, run_cases

BUCKETS = {"bucket_cap_mb": 0.004}
PAIRS = {"comm_hook": "hierarchical", "hierarchical_group_size": 2, **BUCKETS}
LONG = {
    "data": many,
    "dtype": "float32",
    "global_batch_size": 8,
    "log_every_n_steps": 1000,
    "epochs": 4,
    "max_steps": 60,
}


def topk(ratio: float) -> dict[str, Any]:
    return {"comm_hook": "topk", "topk_ratio": ratio, **BUCKETS}


def traced(**settings: Any) -> Any:
    """Return what an update sends: collective -> the number of elements in its tensors, for each call."""

    def run() -> dict[str, Any]:
        trainer = Trainer(deep, **{**BASE, "max_steps": 3, **settings})
        step, seen, box = trainer.backend.train_step, {}, []

        def tracing(group: Any) -> Any:
            with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
                box.append(step(group))
            seen.clear()  # keep only the last update, in which DDP's buckets are final
            for event in profiler.events():
                if event.name.startswith("c10d::"):
                    sizes = [math.prod(shape) for shape in event.input_shapes if shape]
                    seen.setdefault(event.name, []).append(sizes)
            return box.pop()

        trainer.backend.train_step = tracing
        history = trainer.fit(many())
        return {**facts(trainer, history), "seen": seen}

    return run


class Forgetful(Callback):
    """Clear the memory of error feedback."""

    trainer: Trainer

    def on_step_end(self, state: Any, result: Any) -> None:
        self.trainer.backend.wrapper.hook.forget()


def line() -> TensorDataset:
    """Return noisy measurements of a line. The part of each rank alone has another solution."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(64, 32, generator=generator, dtype=torch.float64)
    noise = torch.randn(64, 1, generator=generator, dtype=torch.float64)
    y = x.sum(1, keepdim=True) + noise
    return TensorDataset(x.repeat(40, 1), y.repeat(40, 1))  # an epoch has forty updates


def converged(forgets: bool = False, **settings: Any) -> Any:
    """Run gradient descent with all samples in each update, and return the distance from the solution."""

    def run() -> dict[str, Any]:
        callback, (x, y) = Forgetful(), line().tensors
        fixed = {"dtype": "float64", "global_batch_size": 64, "epochs": 8, "shuffle": False, "log_every_n_steps": 1000}
        callbacks = [callback] if forgets else []
        callback.trainer = trainer = Trainer(
            torch.nn.Linear(32, 1, bias=False), optimizer=descent, callbacks=callbacks, **fixed, **settings
        )
        history = trainer.fit(line())
        away = trainer.model.weight.detach().t() - torch.linalg.lstsq(x, y).solution
        return {**facts(trainer, history), "away": float(away.norm())}

    return run


def descent(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.03)


def resumed(options: dict[str, Any]) -> Any:
    """Stop in the middle, and resume from the checkpoint with another trainer."""

    def run() -> dict[str, Any]:
        settings = {**BASE, **LONG, "ddp": options}
        data = settings.pop("data")()
        history = Trainer(deep, **{**settings, "max_steps": 31}).fit(data)
        path = Path(history.run_dir) / "checkpoints" / "step-00000031"
        second = Trainer(deep, **settings, resume_from_checkpoint=str(path))
        return {**facts(second, second.fit(data)), "files": sorted(p.name for p in (path / "comm_hook").glob("*"))}

    return run


def after_each_other(options: dict[str, Any]) -> Any:
    """Fit twice with one trainer. The groups of the hook are made again, and its memory is kept."""

    def run() -> dict[str, Any]:
        settings = {**BASE, **LONG, "ddp": options, "max_steps": 31}
        data = settings.pop("data")()
        trainer = Trainer(deep, **settings)
        trainer.fit(data)
        groups = len(torch.distributed.distributed_c10d._world.pg_map)
        return {**facts(trainer, trainer.fit(data, max_steps=29)), "groups": groups}

    return run


def spoilt() -> dict[str, Any]:
    """Have a NaN in one update, which the memory of the hook must not keep."""
    x, y = many().tensors
    x[8 * 5] = float("nan")
    settings = {**BASE, **LONG, "epochs": 1, "max_steps": 12, "nan_policy": "skip"}
    del settings["data"]
    trainer = Trainer(deep, **settings, ddp=topk(0.1))
    return facts(trainer, trainer.fit(TensorDataset(x, y)))


CASES = {
    "plain": case(deep, ddp=BUCKETS),
    "hierarchical": case(deep, ddp=PAIRS, gradient_accumulation_steps=3, gradient_clipping=0.05),
    "accumulated": case(deep, ddp=BUCKETS, gradient_accumulation_steps=3, gradient_clipping=0.05),
    "one-node": case(deep, ddp={"comm_hook": "hierarchical"}),
    "hierarchical-traced": traced(ddp=PAIRS),
    "topk-traced": traced(ddp=topk(0.25)),
    "hierarchical-long": case(deep, **LONG, ddp=PAIRS),
    "hierarchical-resumed": resumed(PAIRS),
    "hierarchical-twice": after_each_other(PAIRS),
    "hierarchical-of-three": case(ddp={"comm_hook": "hierarchical", "hierarchical_group_size": 3}),
    "hierarchical-alone": case(ddp={"hierarchical_group_size": 2}),
    "topk-everything": case(deep, ddp=topk(1.0)),
    "plain-long": case(deep, **LONG, ddp=BUCKETS),
    "topk-long": case(deep, **LONG, ddp=topk(0.1)),
    "topk-resumed": resumed(topk(0.1)),
    "topk-twice": after_each_other(topk(0.1)),
    "topk-spoilt": spoilt,
    "all-of-it": converged(),
    "topk-remembers": converged(ddp=topk(0.1)),
    "topk-forgets": converged(forgets=True, ddp=topk(0.1)),
    "topk-fp16": case(mixed_precision="fp16", dtype="float32", ddp=topk(0.1)),
    "topk-nothing": case(ddp={"comm_hook": "topk", "topk_ratio": 0}),
    "topk-too-much": case(ddp={"comm_hook": "topk", "topk_ratio": 1.5}),
}

if __name__ == "__main__":
    run_cases(CASES, Path(sys.argv[1]))
