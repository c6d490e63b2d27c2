"""Train on a stream of which each rank reads its part, and write what was read, the weights and the outputs.

streams.py OUT [--kill STEP]
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

from distributed import Callback, Trainer

SAMPLES, GLOBAL, EPOCHS = 125, 12, 2  # the last update of an epoch is short


class Positions(IterableDataset[Any]):
    """Samples that depend on their position, of which a part tells where it stands."""

    def __init__(self, log: Path | None = None) -> None:
        self.log, self.index, self.parts, self.at = log, 0, 1, 0

    def shard(self, index: int, count: int) -> Positions:
        part = copy.copy(self)
        part.index, part.parts = index, count
        return part

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]

    def __iter__(self) -> Iterator[Any]:
        for position in range(SAMPLES)[self.index :: self.parts][self.at :]:
            self.at += 1
            if self.log is not None and self.parts > 1:
                with self.log.open("a") as file:
                    file.write(f"{position}\n")
            yield inputs_at(position), torch.tensor([position % 7 / 7], dtype=torch.float64)


def inputs_at(position: int) -> torch.Tensor:
    return torch.sin(torch.arange(4, dtype=torch.float64) * (position + 1))


def model() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


class Kill(Callback):
    """End a rank without warning, once."""

    def __init__(self, step: int, mark: Path) -> None:
        self.step, self.mark = step, mark

    def on_step_end(self, state: Any, result: Any) -> None:
        if state.step == self.step and self.context.worker.rank == 1 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def trainer_of(**settings: Any) -> Trainer:
    return Trainer(
        model, global_batch_size=GLOBAL, epochs=EPOCHS, learning_rate=0.05, dtype="float64", device="cpu", seed=3,
        checkpoint_every_n_steps=3, keep_latest_k=20, **settings,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--kill", type=int, default=0)
    given = parser.parse_args()
    rank = int(os.environ.get("RANK", "0"))
    log = given.out / f"read-{rank}-{int((given.out / 'killed').exists())}"
    trainer = trainer_of(callbacks=[Kill(given.kill, given.out / "killed")])
    trainer.fit(Positions(log))
    trainer.save(given.out / "weights.safetensors")
    out = trainer.predict(Positions(), out=given.out / "outputs")
    (given.out / f"done-{rank}.json").write_text(json.dumps({"out": str(out)}))


if __name__ == "__main__":
    main()
