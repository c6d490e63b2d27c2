"""One rank of overhead.py: hand-written loops against our Trainer, at its defaults and with everything on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Trainer
from distributed.callbacks import Callback
from distributed.state import StepResult, TrainState
from hand_written import HandWritten
from turns import Session, taking_turns
from workloads import WORKLOADS, Workload


class Counting(Callback):
    """A callback with the two hooks that run most."""

    steps = lines = 0

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        self.steps += 1

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        self.lines += 1


def top3(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.topk(3, -1).indices == targets.unsqueeze(-1)).any(-1).float().mean()


def compete(workload: Workload, data: TensorDataset, ours: str, others: list[str], **settings: Any) -> dict[str, Any]:
    """One session: what every contestant's turns took, and the digests of their final weights. All ranks."""
    loops = {name: HandWritten(workload, data) for name in others}
    session = Session(ours, {name: loop.turn for name, loop in loops.items()}, workload.turn_steps, workload.rounds)
    model = workload.initial_model()
    with taking_turns(session, "pytorch-ddp"):
        Trainer(
            model,
            backend="pytorch-ddp",
            optimizer=workload.optimizer,
            loss_fn=workload.loss_fn,
            gradient_clipping=workload.gradient_clipping,
            **settings,
        ).fit(DataLoader(data, batch_size=workload.batch_size))
    digests = {name: digest(loop.model.module) for name, loop in loops.items()}
    return {"turns": session.turns, "digests": digests | {ours: digest(model)}}


def digest(model: nn.Module) -> str:
    """Two models with the same digest have bit-identical weights."""
    hashed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


def main(name: str, out: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    workload = WORKLOADS[name]
    if quick:
        workload = dataclasses.replace(workload, turn_steps=min(workload.turn_steps, 20), rounds=3)
    data = workload.data(workload.rounds * workload.turn_steps * workload.batch_size * 2)
    features: dict[str, Any] = {
        "callbacks": [Counting(), Counting()],
        "metrics": {"top3": top3},
    }
    sessions = [
        compete(workload, data, "Trainer, defaults", ["hand-written", "hand-written again"]),
        compete(workload, data, "Trainer, callbacks, metrics, log", ["hand-written"], log_every_n_steps=50, **features),
    ]
    if dist.get_rank() == 0:
        rounds = f"{workload.rounds - 1} rounds of {workload.turn_steps} steps"
        about = f"batch {workload.batch_size} per rank, 2 gloo processes, 1 thread each, {rounds}"
        out.write_text(json.dumps({"sessions": sessions, "about": about}))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "1")
