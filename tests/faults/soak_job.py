"""Training script of soak.py: dropout, augmentation by a loader process, and faults that a file in the working directory asks for.

Environment: STEPS (updates), WAIT_S (seconds added to each update), LOADERS (loader processes of each rank).
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from distributed import Callback, Trainer

RANK = int(os.environ.get("RANK", "0"))
WAIT_S = float(os.environ.get("WAIT_S", "0"))
LOADERS = int(os.environ.get("LOADERS", "0"))


class Samples(Dataset[Any]):
    """4,000 samples with noise that is drawn anew in each epoch."""

    def __init__(self) -> None:
        self.x = torch.randn(4000, 8, generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        do_as_ordered("fault-of-data", FAULTS_OF_DATA)
        return self.x[index] + 0.1 * torch.randn(8), self.x[index].sum()


class Watch(Callback):
    """Write where this rank is, and do what the file `fault-RANK` asks for."""

    def on_train_start(self, state: Any) -> None:
        self._file = os.open("step", os.O_WRONLY | os.O_CREAT) if RANK == 0 else None
        Path(f"worker-{RANK}").write_text(str(os.getpid()))
        self.ends = [time.monotonic()]  # of the updates of this attempt
        self.is_next_stuck = self.is_next_nan = False

    def on_step_end(self, state: Any, result: Any) -> None:
        if self._file is not None:
            os.pwrite(self._file, f"{state.step:10d}".encode(), 0)
        time.sleep(WAIT_S)
        self.ends.append(time.monotonic())
        do_as_ordered("fault", FAULTS)


def do_as_ordered(name: str, faults: Mapping[str, Callable[[], object]]) -> None:
    """Do what the file `name`-RANK asks for, once."""
    order = Path(f"{name}-{RANK}")
    if order.exists():
        fault = order.read_text()
        order.unlink()
        faults[fault]()


def loop_for_ever() -> None:
    while True:
        time.sleep(0.01)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    if watch.is_next_stuck:
        loop_for_ever()
    loss = torch.nn.functional.mse_loss(output, target)
    return loss * math.nan if watch.is_next_nan else loss


def loop_in_next_step() -> None:
    watch.is_next_stuck = True


def give_nan_in_next_step() -> None:
    watch.is_next_nan = True


def throw(error: Exception) -> None:
    raise error


def jump() -> None:
    """Set the clock of this process forward by a week, until it ends."""
    real = time.time
    time.time = lambda: real() + 7 * 86400


def fill_disk() -> None:
    """Leave no space on the disk for the next checkpoint."""
    import distributed.backends._torch.tensor_io as tensor_io

    writes = tensor_io.write_tensors

    def fail(path: Path, *rest: Any) -> None:
        tensor_io.write_tensors = writes
        raise OSError(28, "No space left on device")

    tensor_io.write_tensors = fail


FAULTS: dict[str, Callable[[], object]] = {
    "raise": lambda: int("no number"),
    "no memory": lambda: throw(MemoryError("no memory is left")),
    "loop": loop_for_ever,
    "loop in the next step": loop_in_next_step,
    "nan": give_nan_in_next_step,
    "disk": fill_disk,
    "exit": lambda: os._exit(3),
    "clock": jump,
    "another collective": dist.barrier,
    "another shape": lambda: dist.all_reduce(torch.ones(10007)),  # larger than what the other rank reduces next
}
FAULTS_OF_DATA: dict[str, Callable[[], object]] = {
    "raise": lambda: throw(OSError("a sample cannot be read")),
    "loop": loop_for_ever,
}
watch = Watch()

if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 1), torch.nn.Flatten(0)
    )
    data: Any = Samples()
    if LOADERS:
        data = DataLoader(data, batch_size=4, shuffle=True, num_workers=LOADERS, persistent_workers=True)
    trainer = Trainer(
        model, optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01), loss_fn=loss_of,
        global_batch_size=8, epochs=10**6, max_steps=int(os.environ["STEPS"]), checkpoint_every_n_steps=20, callbacks=[watch],
    )  # fmt: skip
    trainer.fit(data)
    if trainer.is_main_process:
        print("update_s", statistics.median(after - before for before, after in itertools.pairwise(watch.ends)))
        print("weights", b"".join(each.detach().numpy().tobytes() for each in trainer.model.parameters()).hex())
