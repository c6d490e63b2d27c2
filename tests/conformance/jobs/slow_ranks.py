"""Train several times, with a rank that is slow in the way that each argument names."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch
from torch.utils.data import Dataset

from distributed import Trainer

RANK, SLEEP_S, UPDATES = int(os.environ["RANK"]), 0.03, 150


class Slowness:
    """Sleep once in each update, four times as long as the rest of the update took, and at least `SLEEP_S` seconds.

    The share of the sleep is thus the same on machines of all speeds, and beside other processes.
    """

    def __init__(self) -> None:
        self.woke: float | None = None

    def sleep(self) -> None:
        rest_s = 0.0 if self.woke is None else time.monotonic() - self.woke
        time.sleep(max(SLEEP_S, 4 * rest_s))
        self.woke = time.monotonic()


SLOWNESS = Slowness()


class Samples(Dataset):
    """Samples of which rank 1 reads those of the first updates slowly."""

    def __init__(self, num_slow_updates: int = 0) -> None:
        self.num_slow, self.num_read = num_slow_updates, 0

    def __len__(self) -> int:
        return 2 * UPDATES

    def __getitem__(self, index: int) -> Any:
        self.num_read += 1
        if RANK == 1 and self.num_read <= self.num_slow:
            SLOWNESS.sleep()
        return torch.ones(4), torch.ones(1)


def slow_step(model: Any, batch: Any) -> Any:
    if RANK == 0:
        SLOWNESS.sleep()
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def equally_slow_step(model: Any, batch: Any) -> Any:
    time.sleep(SLEEP_S)
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


CASES: dict[str, Any] = {
    "loader": lambda: (Samples(UPDATES), {"loss_fn": torch.nn.MSELoss()}),
    "step": lambda: (Samples(), {"training_step": slow_step}),
    "equal": lambda: (Samples(), {"training_step": equally_slow_step}),
    "briefly": lambda: (Samples(10), {"loss_fn": torch.nn.MSELoss()}),
    "short": lambda: (Samples(), {"loss_fn": torch.nn.MSELoss()}),
}
for case in sys.argv[1:]:
    data, settings = CASES[case]()
    Trainer(torch.nn.Linear(4, 1), batch_size=1, monitor="loss", **settings).fit(data)
