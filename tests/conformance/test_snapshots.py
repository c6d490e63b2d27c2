"""Snapshots in memory: killed workers go on from the newest one, and nothing of it is left."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.runs.temporary import claim, memory_of, release
from tests.conftest import Finished, Started, poll

KILL = "os.kill(os.getpid(), signal.SIGKILL)"
SCRIPT = """
import os, signal, sys, time
import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

KILLED_AT = {KILLED_AT}
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])

class Kill(Callback):
    def on_step_end(self, state, result):
        time.sleep({WAIT_S})
        last = int(os.environ["WORLD_SIZE"]) - 1
        if ATTEMPT < len(KILLED_AT) and state.step == KILLED_AT[ATTEMPT] and int(os.environ["RANK"]) == last:
            {FAULT}

torch.manual_seed(0)
data = TensorDataset(torch.randn(48, 4), torch.randn(48, 1))
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
trainer = Trainer(
    model, optimizer=lambda parameters: torch.optim.Adam(parameters, 0.01), loss_fn=torch.nn.functional.mse_loss, epochs=3,
    global_batch_size=8, checkpoint_frequency=None, callbacks=[Kill()],
)
trainer.fit(data)
if trainer.is_main_process:
    print("weights", b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()).hex())
"""


def command(
    tmp_path: Path, backend: str, *flags: str, killed_at: tuple[int, ...] = (), wait_s: float = 0.0, fault: str = KILL
) -> list[str]:
    script = tmp_path / "train.py"
    text = SCRIPT.replace("{KILLED_AT}", repr(killed_at)).replace("{WAIT_S}", str(wait_s)).replace("{FAULT}", fault)
    script.write_text(text)
    processes = "1" if backend == "single" else "2"
    return [
        "train", "--script", str(script), "--backend", backend, "--nproc-per-node", processes, "--device", "cpu", "--run-dir",
        str(tmp_path / "run"), *flags,
    ]  # fmt: skip


def events(tmp_path: Path, kind: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (tmp_path / "run" / "events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == kind]


def weights(done: Finished) -> str:
    assert done.returncode == 0, done.output
    return done.stdout.split("weights ")[1].split()[0]


@pytest.mark.parametrize(
    "backend",
    ["pytorch-ddp", *(pytest.param(name, marks=pytest.mark.full) for name in ("fsdp", "single", "deepspeed"))],
)
def test_a_killed_worker_costs_at_most_one_step_and_no_bit(
    run_cli: Callable[..., Finished], tmp_path: Path, backend: str
) -> None:
    """Killed in the middle of an epoch, after its last step, and after its first one."""
    clean = tmp_path / "clean"
    clean.mkdir()
    expected = weights(run_cli(command(clean, backend)))
    done = run_cli(command(tmp_path, backend, "--set", "snapshot_every_n_steps=1", killed_at=(4, 12, 13)))
    assert weights(done) == expected
    assert [event["step"] for event in events(tmp_path, "resumed")] == [3, 11, 12]
    assert "resumed from step-00000003 in memory" in done.output
    assert [event["step"] for event in events(tmp_path, "checkpoint_saved")] == [18]  # snapshots are none
    assert not memory_of(tmp_path / "run").exists()


@pytest.mark.full
def test_a_rank_that_hangs_costs_at_most_one_step_and_no_bit(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    clean = tmp_path / "clean"
    clean.mkdir()
    expected = weights(run_cli(command(clean, "pytorch-ddp")))
    settings = ("--set", "snapshot_every_n_steps=1", "--set", "hang_timeout=2")
    done = run_cli(command(tmp_path, "pytorch-ddp", *settings, killed_at=(8,), fault="time.sleep(1000)"))
    assert weights(done) == expected and "rank 1 hangs in step 8 (callbacks)" in done.output, done.output
    assert [event["step"] for event in events(tmp_path, "resumed")] == [7]
    assert not memory_of(tmp_path / "run").exists()


@pytest.mark.full
def test_a_newer_checkpoint_is_preferred_and_every_nth_step_has_a_snapshot(
    run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    flags = ("--set", "snapshot_every_n_steps=3", "--checkpoint-every-n-steps", "5")
    done = run_cli(command(tmp_path, "pytorch-ddp", *flags, killed_at=(6, 12, 14)))
    assert done.returncode == 0, done.output
    assert [event["step"] for event in events(tmp_path, "resumed")] == [5, 10, 12]


def test_a_state_that_is_saved_in_the_background_has_a_snapshot_too(
    run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    """The worker is killed one step after a save has begun that does not end in this attempt."""
    flags = ("--set", "snapshot_every_n_steps=1", "--set", "checkpoint_async=true", "--checkpoint-every-n-steps", "4")
    text = command(tmp_path, "pytorch-ddp", *flags, killed_at=(5,))
    script = tmp_path / "train.py"
    script.write_text(
        "import os, threading\nimport distributed.checkpoints.background as b\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':\n"
        "    b.BackgroundSave._run = lambda self: threading.Event().wait()\n" + script.read_text()
    )
    done = run_cli(text)
    assert done.returncode == 0, done.output
    assert [event["step"] for event in events(tmp_path, "resumed")] == [4]


@pytest.mark.full
def test_what_a_killed_launcher_leaves_is_neither_used_nor_kept(
    run_cli: Callable[..., Finished], start: Callable[..., Started], tmp_path: Path
) -> None:
    flags = ("--set", "snapshot_every_n_steps=1", "--checkpoint-every-n-steps", "4")
    memory = memory_of(tmp_path / "run")
    training = start([sys.executable, "-m", "distributed.cli", *command(tmp_path, "pytorch-ddp", *flags, wait_s=0.3)])
    training.wait_for(lambda: list(memory.glob("fits/step-00000007")))
    for pid in training.alive()[:2]:
        os.kill(pid, signal.SIGKILL)
    poll(lambda: not training.alive(), 30, lambda: "still alive")
    assert memory.exists()
    done = run_cli(command(tmp_path, "pytorch-ddp", *flags, "--resume"))
    assert done.returncode == 0 and "resumed from step-00000004:" in done.output, done.output
    assert not memory.exists()


@pytest.mark.full
def test_too_little_memory_is_a_warning(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    text = command(tmp_path, "pytorch-ddp", "--set", "snapshot_every_n_steps=2")
    script = tmp_path / "train.py"
    script.write_text(
        "import distributed.checkpoints.directory as d\nbegins = d.CheckpointDirectory.begin\n"
        "def begin(self, target):\n    if '/dev/shm' in str(target):\n        raise OSError(28, 'No space left on device')\n"
        "    begins(self, target)\n"
        "d.CheckpointDirectory.begin = begin\n" + script.read_text()
    )
    done = run_cli(text)
    assert done.returncode == 0, done.output
    assert done.output.count("No space left on device") == 1
    assert "snapshot_every_n_steps: no more snapshots are taken in this attempt" in done.output


def test_only_the_owner_removes_a_directory_in_memory(tmp_path: Path) -> None:
    """A second launch on a run directory in use is refused, and leaves the snapshots of the first one."""
    own, other = claim(tmp_path / "distributed-own"), claim(tmp_path / "distributed-other", os.getppid())
    for path in (own, other, tmp_path / "distributed-none"):
        release(path)
    assert not own.exists() and other.exists()
