"""Fail in the way that the first argument names. The second argument is the directory for the results."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from distributed import Callback, ConfigError, Trainer

RANK = int(os.environ.get("RANK", "0"))
OUT = Path(sys.argv[2])
BASE = {"global_batch_size": 8, "shuffle": False, "log_every_n_steps": 1, "checkpoint_every_n_steps": 2}


class Samples(Dataset):
    def __init__(self, count: int = 64, bad: int = -1, fail: int = -1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x, self.bad, self.fail = torch.randn(count, 6, generator=generator), bad, fail
        self.y = torch.randint(0, 3, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        if index == self.fail:
            raise_now(ValueError(f"sample {index} cannot be read"))
        return (self.x[index] * float("nan") if index == self.bad else self.x[index]), self.y[index]


class Endless(Dataset):
    """Provide a map-style dataset without a length."""

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(6), torch.tensor(0)


class Stream(IterableDataset):
    def __iter__(self) -> Any:
        yield from (Samples(16)[i] for i in range(16))


class Breaks(torch.nn.Module):
    """Fail in the third forward pass of rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(6, 3), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and RANK == 1:
            raise_now(RuntimeError("the third forward fails"))
        return self.layer(x)


class Weights(Callback):
    """Write this rank's weights after every update."""

    trainer: Trainer

    def on_step_end(self, state: Any, result: Any) -> None:
        weights = torch.nn.utils.parameters_to_vector(self.trainer.model.parameters()).tolist()
        line = {"step": state.step, "skipped": result.skipped, "weights": weights}
        with (OUT / f"{sys.argv[1]}-{RANK}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


def raise_now(error: Exception) -> None:
    """Write the time, and raise `error`."""
    (OUT / "raised-at").write_text(repr(time.time()))
    raise error


def model() -> torch.nn.Module:
    return torch.nn.Linear(6, 3)


def fit(data: Any, built: Any = model, **settings: Any) -> Trainer:
    seen = Weights()
    seen.trainer = trainer = Trainer(built, callbacks=[seen], **{**BASE, **settings})
    trainer.fit(data)
    return trainer


def nan(policy: str) -> None:
    """Make sample 33 NaN, which rank 1 has in step 5."""
    fit(Samples(bad=33), nan_policy=policy)


def full_disk() -> None:
    """Have no space on the disk for the checkpoint of step 4."""
    import distributed.backends._torch.tensor_io as tensor_io

    writes = tensor_io.write_tensors

    def write(path: Path, *rest: Any) -> None:
        if "step-00000004" in str(path):
            raise OSError(28, "No space left on device")
        writes(path, *rest)

    tensor_io.write_tensors = write
    fit(Samples())


def slow_disk() -> None:
    """Make the checkpoint of step 4 take much longer than `timeout_s`, on rank 1 and then on rank 0.

    In the checkpoint of step 6 rank 0 hangs.
    """
    fsync = os.fsync

    def slow(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if path.parts[-2:] == (".tmp-step-00000004", "manifest.json") or (RANK == 1 and "step-00000004" in str(path)):
            time.sleep(3)
        if path.parts[-2:] == (".tmp-step-00000006", "manifest.json"):
            (OUT / "raised-at").write_text(repr(time.time() + 2))
            os.kill(os.getpid(), signal.SIGSTOP)
        fsync(fd)

    os.fsync = slow
    fit(Samples(), timeout_s=2, max_restarts=0)


def other_model() -> None:
    path = str(OUT / "first")
    fit(Samples(), checkpoint_dir=path)
    wider = torch.nn.Sequential(torch.nn.Linear(6, 3), torch.nn.Linear(3, 3))
    fit(Samples(), lambda: wider, resume_from_checkpoint=path)


def other_shape() -> None:
    path = str(OUT / "first")
    fit(Samples(), checkpoint_dir=path)
    fit(Samples(), lambda: torch.nn.Linear(6, 4), resume_from_checkpoint=path)


def rank_1_stays_away() -> None:
    class Late(Callback):
        def on_step_end(self, state: Any, result: Any) -> None:
            if state.step == 2 and RANK == 1:
                (OUT / "raised-at").write_text(repr(time.time() + 2))
                time.sleep(60)

    seen = Trainer(model, callbacks=[Late()], **BASE, timeout_s=2, max_restarts=0)
    seen.fit(Samples())


CASES = {
    "nan-stop": lambda: nan("stop"),
    "nan-skip": lambda: nan("skip"),
    "nan-warn": lambda: nan("warn"),
    "bad-sample": lambda: fit(Samples(fail=33)),
    "bad-sample-in-a-worker": lambda: fit(DataLoader(Samples(fail=33), batch_size=4, num_workers=1)),
    "bad-forward": lambda: fit(Samples(), Breaks),
    "bad-directory": lambda: fit(Samples(), checkpoint_dir="/dev/null"),
    "bad-setting": lambda: Trainer(model, gradient_clipping=-1),
    "loader-disagrees": lambda: Trainer(model, batch_size=4).fit(DataLoader(Samples(), batch_size=8)),
    "no-length": lambda: fit(Endless()),
    "shuffled-stream": lambda: Trainer(model, shuffle=True, batch_size=4).fit(Stream()),
    "other-model": other_model,
    "other-shape": other_shape,
    "full-disk": full_disk,
    "slow-disk": slow_disk,
    "timeout": rank_1_stays_away,
    "no-parameters": lambda: fit(Samples(), lambda: torch.nn.Flatten()),
    "no-data": lambda: Trainer(model).fit(None),
}

MISTAKES = (
    "bad-setting", "bad-directory", "loader-disagrees", "no-length", "shuffled-stream", "no-parameters", "no-data",
)  # fmt: skip


def mistakes() -> None:
    """Make each mistake in turn. Each rank writes the error that it got."""
    found = {}
    for name in MISTAKES:
        try:
            CASES[name]()
        except ConfigError as error:
            found[name] = f"{type(error).__name__}: {error}"
    (OUT / f"mistakes-{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    mistakes() if sys.argv[1] == "mistakes" else CASES[sys.argv[1]]()
