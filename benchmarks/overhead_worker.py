"""One rank of overhead.py: hand-written loops compared with our Trainer, at its defaults and with all features on."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import json
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Session, Trainer
from distributed.callbacks import Callback, ExponentialMovingAverage
from distributed.launching.heartbeat import Board, heartbeat
from distributed.loggers import Image
from distributed.state import StepResult, TrainState
from distributed.training import loop
from hand_written import HandWritten
from turns import Marks, TrainerTurns, Turn, compete
from workloads import WORKLOADS, Workload

AVERAGED, IMAGED = "Trainer, moving average", "Trainer, images"
TRACKED, OWN = "Trainer, TensorBoard, MLflow", "Session, own loop"
OURS, UNWATCHED = "Trainer, defaults", "Trainer, not watched"


class Counting(Callback):
    """Callback with the two hooks that run most often."""

    steps = lines = 0

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        self.steps += 1

    def on_log(self, state: TrainState, split: str, metrics: Mapping[str, float]) -> None:
        self.lines += 1


class Images(Callback):
    """Log an image of 256 x 256 pixels every `every` steps."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.image = torch.rand(3, 256, 256, generator=torch.Generator().manual_seed(0))

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if state.step % self.every == 0:
            self.context.log("noise", Image(self.image))


def top3(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs.topk(3, -1).indices == targets.unsqueeze(-1)).any(-1).float().mean()


def cost_of_metric(batch_size: int) -> float:
    """Return the seconds of CPU of one call of `top3`, which a hand-written loop would call as well."""
    outputs, targets = torch.randn(batch_size, 10), torch.zeros(batch_size, dtype=torch.int64)
    times = []
    with torch.no_grad():
        for _ in range(1000):
            before = time.thread_time()
            top3(outputs, targets)
            times.append(time.thread_time() - before)
    return statistics.median(times)


def trainer(workload: Workload, data: TensorDataset, model: nn.Module, **settings: Any) -> TrainerTurns:
    """Return our Trainer as a contestant."""
    ours = Trainer(
        model,
        backend="pytorch-ddp",
        optimizer=workload.optimizer,
        loss_fn=workload.loss_fn,
        gradient_clipping=workload.gradient_clipping,
        **settings,
    )
    return TrainerTurns(lambda: ours.fit(DataLoader(data, batch_size=workload.batch_size)))


def without_heartbeats(turn: Turn) -> Turn:
    """Return a contestant's turn in which it reports nothing to the launcher and measures no time that it waits."""

    def quiet_turn(steps: int) -> Marks:
        beats: Any = heartbeat()
        beats.mark, beats.is_read = lambda *args, **kwargs: None, False
        try:
            return turn(steps)
        finally:
            del beats.mark
            beats.is_read = True

    return quiet_turn


class Reports:
    """The calls by which a Trainer reports to the launcher, which are timed alone: a difference of two turns has more noise."""

    def __init__(self) -> None:
        self._marks: list[tuple[Any, Any]] = []  # arguments of each call in one turn
        self._steps = 0
        self._waits_s: list[float] = []
        self._report_waits, loop._report_waits = loop._report_waits, self._timed

    def _timed(self, run: loop.Run) -> None:
        before = time.thread_time()
        self._report_waits(run)
        self._waits_s.append(time.thread_time() - before)

    def recorded(self, turn: Turn) -> Turn:
        """Return a contestant's turn, the first of which is recorded."""

        def recorded_turn(steps: int) -> Marks:
            if self._steps:
                return turn(steps)
            self._steps = steps
            beats: Any = heartbeat()
            mark = beats.mark

            def record(*args: Any, **kwargs: Any) -> None:
                self._marks.append((args, kwargs))
                mark(*args, **kwargs)

            beats.mark = record
            try:
                return turn(steps)
            finally:
                del beats.mark

        return recorded_turn

    def seconds(self) -> list[float]:
        """Return the seconds of CPU for one step, measured several times."""
        mark, found, again = heartbeat().mark, [], max(1, 10_000 // len(self._marks))
        waits_s = statistics.mean(self._waits_s) / loop._WAITS_EVERY if self._waits_s else 0.0
        for _ in range(9):
            before = time.thread_time()
            for _ in range(again):
                for args, kwargs in self._marks:
                    mark(*args, **kwargs)
            found.append((time.thread_time() - before) / again / self._steps + waits_s)
        return found


class OwnLoop:
    """A loop of its own on our Session as a contestant."""

    def __init__(self, workload: Workload, data: TensorDataset) -> None:
        self.model, self._leaving = workload.initial_model(), contextlib.ExitStack()
        settings = {"backend": "pytorch-ddp", "gradient_clipping": workload.gradient_clipping, "verbose": False}
        session = self._leaving.enter_context(Session(**settings))
        loader = DataLoader(data, batch_size=workload.batch_size)
        self._steps = self._run(session, workload, *session.prepare(self.model, workload.optimizer, loader))

    def _run(self, s: Session, workload: Workload, model: nn.Module, _: Any, loader: Any) -> Iterator[None]:
        for _ in s.epochs():
            for inputs, targets in loader:
                s.backward(workload.loss_fn(model(inputs), targets))
                s.update()
                yield

    def turn(self, steps: int) -> list[tuple[float, float]]:
        """Run `steps` updates. Return the (main-thread CPU, wall) clocks before each and after the last, in seconds."""
        marks = []
        for _ in range(steps):
            marks.append((time.thread_time(), time.perf_counter()))
            next(self._steps)
        marks.append((time.thread_time(), time.perf_counter()))
        return marks

    def end(self) -> None:
        """End the loop."""
        assert next(self._steps, None) is None
        self._leaving.close()


def threads_clocks() -> tuple[float, float]:
    """Return the CPU time in seconds of the threads of MLflow's logger, and the wall time."""
    idents = [
        each.ident for each in threading.enumerate() if each.name.startswith("mlflow-") and each.ident is not None
    ]
    return sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in idents), time.perf_counter()


def add_threads(turns: list[dict[str, float]], before: tuple[float, float], after: tuple[float, float]) -> None:
    """Add the share of these threads to the mean CPU time of a step. They work by the clock, whichever contestant
    has its turn."""
    share = (after[0] - before[0]) / (after[1] - before[1])
    for turn in turns:
        turn["mean"] += share * turn["wall"]


def digest(model: nn.Module) -> str:
    """Return a digest of the weights. Two models with the same digest have bit-identical weights."""
    hashed = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hashed.update(name.encode() + tensor.numpy().tobytes())
    return hashed.hexdigest()


def main(name: str, out: Path, quick: bool) -> None:
    torch.set_num_threads(1)
    Board(1).join(0)  # as in a worker that a launcher watches
    dist.init_process_group("gloo")
    workload = WORKLOADS[name]
    if quick:
        # the first round warms up, and the median of five leaves out two that other programs have slowed down
        workload = dataclasses.replace(workload, turn_steps=min(workload.turn_steps, 20), rounds=6)
    data = workload.data(workload.rounds * workload.turn_steps * workload.batch_size * 2)
    loops = {name: HandWritten(workload, data) for name in ("hand-written", "hand-written again")}
    settings: dict[str, dict[str, Any]] = {
        OURS: {},
        UNWATCHED: {},
        "Trainer, callbacks, metrics, log": {
            "callbacks": [Counting(), Counting()],
            "metrics": {"top3": top3},
            "log_every_n_steps": 50,
        },
    }
    if name == "gpt":
        settings[AVERAGED] = {"callbacks": [ExponentialMovingAverage(0.999)]}
        # One image, and one log line, in each turn.
        settings[IMAGED] = {"callbacks": [Images(workload.turn_steps)], "log_every_n_steps": workload.turn_steps}
        settings[TRACKED] = {"tensorboard": True, "mlflow_tracking": True, "log_every_n_steps": workload.turn_steps}
    models = {name: workload.initial_model() for name in settings}
    ours = {name: trainer(workload, data, model, **settings[name]) for name, model in models.items()}
    contestants = {name: each.turn for name, each in loops.items()} | {name: turns.turn for name, turns in ours.items()}
    contestants[UNWATCHED] = without_heartbeats(contestants[UNWATCHED])
    reports = Reports()
    contestants[OURS] = reports.recorded(contestants[OURS])
    own = OwnLoop(workload, data)
    contestants[OWN] = own.turn
    before = threads_clocks()
    turns = compete(contestants, workload.turn_steps, workload.rounds)
    add_threads(turns.get(TRACKED, []), before, threads_clocks())
    own.end()
    for each in ours.values():
        each.end()
    digests = {name: digest(each.model.module) for name, each in loops.items()}
    digests |= {name: digest(model) for name, model in {**models, OWN: own.model}.items()}
    if dist.get_rank() == 0:
        rounds = f"{workload.rounds - 1} rounds of {workload.turn_steps} steps"
        about = f"batch {workload.batch_size} per rank, 2 gloo processes, 1 thread each, {rounds}"
        found = {"turns": turns, "digests": digests, "about": about, "turn_steps": workload.turn_steps}
        alone = {"metric_s": cost_of_metric(workload.batch_size), "reports_s": reports.seconds()}
        out.write_text(json.dumps(found | alone))
    loops.clear()
    contestants.clear()
    # Workaround (torch 2.13, pytorch/pytorch#179291; may go when torch ends gloo's threads before the interpreter): one process of
    # eight aborts when a DDP wrapper outlives its group.
    gc.collect()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3] == "1")
