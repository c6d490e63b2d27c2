"""Models, data and runs for the tests of a GPU, and for the scripts that they start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, History, Trainer

REHEARSAL = os.environ.get("GPU_REHEARSAL") == "cpu"
DEVICE = "cpu" if REHEARSAL else "cuda"  # value of the setting `device`
JOBS = Path(__file__).resolve().parent / "jobs"
SAMPLES, WIDTH, CLASSES = 384, 16, 4
TOO_MUCH = 1 << 47 if REHEARSAL else 1 << 42  # more bytes than any machine has


class Block(nn.Module):
    """Residual block with dropout."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.second(torch.relu(self.first(x))))


class Net(nn.Module):
    """A few blocks, and a BatchNorm if buffers are wanted. The initial weights are always the same."""

    def __init__(self, *, width: int = 64, depth: int = 3, dropout: float = 0.0, has_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.enter = nn.Linear(WIDTH, width)
        self.norm = nn.BatchNorm1d(width) if has_norm else nn.Identity()
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(depth))
        self.leave = nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.enter(x))
        for block in self.blocks:
            x = block(x)
        return self.leave(x)


def data(samples: int = SAMPLES) -> TensorDataset:
    """Return inputs and classes. The class is the index of the largest of the first entries."""
    inputs = torch.randn(samples, WIDTH, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, inputs[:, :CLASSES].argmax(1))


def loader(samples: int = SAMPLES) -> DataLoader[Any]:
    """Return the data in shuffled batches of 32 in pinned memory."""
    return DataLoader(data(samples), batch_size=32, shuffle=True, pin_memory=not REHEARSAL)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def trainer(model: nn.Module | None, **settings: Any) -> Trainer:
    """Return a Trainer of one process on the device."""
    return Trainer(model, **{"nproc_per_node": 1, "device": DEVICE, "verbose": False, "optimizer": sgd, **settings})


def checkpoint(history: History) -> Path:
    """Return the newest checkpoint of a run."""
    found: Path = max(Path(history.run_dir, "checkpoints").glob("step-*"))
    return found


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of the weights on the CPU."""
    return {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference between two entries."""
    assert one.keys() == other.keys()
    assert all(one[name].shape == other[name].shape for name in one)
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one if one[name].numel())


def resumed(make: Callable[[], nn.Module], until: int = 20, stop: int = 11, **settings: Any) -> tuple[Any, Any, Any]:
    """Return the weights of a run without a stop, the weights of a run that stopped and resumed, and its checkpoint
    at the stop."""
    straight = make()
    trainer(straight, max_steps=until, epochs=9, **settings).fit(loader())
    halted = make()
    kept = checkpoint(trainer(halted, max_steps=stop, epochs=9, **settings).fit(loader()))
    going_on = make()
    again = trainer(going_on, max_steps=until, epochs=9, resume_from_checkpoint=str(kept), **settings)
    assert again.fit(loader()).steps == until
    return weights(straight), weights(going_on), kept


def run_job(name: str, *flags: str, processes: int = 1, timeout: float = 120) -> tuple[int, str]:
    """Run `train --script jobs/NAME` and return its exit code and output. It is killed after `timeout` seconds."""
    command = [sys.executable, "-m", "distributed.cli", "train", "--script", str(JOBS / name), "--device", DEVICE]
    command += ["--nproc-per-node", str(processes), "--run-dir", "run", *flags]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"not done after {timeout:g} s:\n{output}") from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, output


def saved(name: str) -> dict[str, torch.Tensor]:
    """Return the tensors that a job saved under this name."""
    return dict(load_file(name))


class During(Callback):
    """Enter a context after one update and leave it after another."""

    def __init__(self, context: Any, first: int, last: int) -> None:
        self._context, self._first, self._last = context, first, last

    def on_step_end(self, state: Any, result: Any) -> None:
        if state.step == self._first:
            self._context.__enter__()
        if state.step == self._last:
            self._context.__exit__(None, None, None)


class SyncMode:
    """Context in which CUDA calls that make the host wait raise ("error") or warn ("warn")."""

    def __init__(self, mode: str) -> None:
        self._mode = mode

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode(self._mode)

    def __exit__(self, *failure: object) -> None:
        torch.cuda.set_sync_debug_mode("default")
