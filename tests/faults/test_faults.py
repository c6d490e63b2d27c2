"""Inject faults into real runs, and check what `distributed why` says about each: rank, kind, step, line, and what was done.

`pytest -m '' tests/faults -k NAME` runs one fault; `job.py` shows how to do the same by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.cli.why import lines_of
from distributed.runs.directory import RunDirectory
from distributed.runs.why import read_why
from tests.conftest import Finished, Started, needs_backend, poll

pytestmark = pytest.mark.timeout(600)
JOB = Path(__file__).with_name("job.py")
LINES = JOB.read_text().splitlines()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of job.py and what is to be seen.

    Attributes:
        name: the argument of job.py.
        code: the exit code of `train`.
        says: parts of what `why` says, in their order. `{N}` stands for the number of the line of job.py that holds the text N.
        flags: more flags of `train`.
    """

    name: str
    code: int
    says: tuple[str, ...]
    flags: tuple[str, ...] = ()


_AGAIN = "restarted once, from step 2"
_LOOPS = "time.sleep(0.01)"
_NOT_AGAIN = "not restarted: only kills and hangs are restarted"
FAULTS = (
    Fault("stop", 0, ("finished", "rank 1 hangs in step 3 (callbacks)", "it is stopped (SIGSTOP)", "rank 1, step 3", _AGAIN)),
    Fault("stop-and-go-on", 0, ("finished at step 8",)),
    Fault("loop-data", 0, ("finished", "rank 1 hangs in step 3 (reading data)", "rank 1, step 3", "line {time.sleep(0.01)},", _AGAIN)),
    Fault("loop-loader", 0, ("finished", "rank 1 hangs in step 3 (reading data)", "its loader process 0 stands still", "rank 1, step 3",
                             "line {time.sleep(0.01)},", _AGAIN)),
    Fault("loader-stopped", 0, ("finished", "rank 1 hangs in step 3 (reading data)", "its loader process 0 stands still, it is stopped (SIGSTOP)",
                                "rank 1, step 3", _AGAIN)),
    Fault("loop-callback", 0, ("rank 1 hangs in step 3 (callbacks)", "rank 1, step 3", "line {time.sleep(0.01)},", _AGAIN)),
    Fault("loop-step", 0, ("rank 1 hangs in step 3 (training)", "rank 1, step 3", "line {time.sleep(0.01)},", _AGAIN)),
    Fault("exit-0", 1, ("failed in step 3", "rank 1 exited with code 0 while other", "rank 1, step 3", "line {os._exit(0),},", _NOT_AGAIN)),
    Fault("exit-3", 1, ("failed in step 3", "rank 1 exited with code 3", "rank 1, step 3 (callbacks)", "line {os._exit(3),},", _NOT_AGAIN)),
    Fault("sys-exit", 1, ("failed in step 3", "rank 1 exited with code 4", "rank 1, step 3 (callbacks)", "line {sys.exit(4),},", _NOT_AGAIN)),
    Fault("shapes", 0, ("rank 1 was killed by signal 6 (SIGABRT): in all_reduce: ", "8 vs 4", "rank 1, step 3", "line {4 if RANK else 8},", _AGAIN)),
    Fault("order", 0, (
        "stand still in step 3", "rank 0 in broadcast at", "line {dist.broadcast(},", "rank 1 in all_gather at job.py, line {# the others call},",
        "line {the others call},", _AGAIN,
    )),
    Fault("stays-away", 0, (
        "stand still in step 3", "rank 0 in barrier at", "line {dist.barrier()},", "rank 1 in all_gather at",
        "line {trainer.fit(data)},", _AGAIN,
    )),
    Fault("raise", 1, ("failed in step 3", "rank 1 failed with ValueError: invalid literal", "rank 1, step 3 (callbacks)",
                       "line {no number},", _NOT_AGAIN, "--resume, from step-00000002", "rank-1.log")),
    Fault("raise-on-rank-0", 1, ("rank 0 failed with RuntimeError: only rank 0", "rank 0, step 3", "line {only rank 0},", "rank-0.log")),
    Fault("memory", 1, ("rank 1 is out of memory in step 3: MemoryError", "rank 1, step 3 (training)", "line {bytearray(1 << 60)},")),
    Fault("device-memory", 1, ("rank 1 is out of memory in step 3: CUDA out of memory", "rank 1, step 3", "line {torch.OutOfMemoryError},")),
    Fault("device-assert+device-assert", 1, ("failed in step 3", "rank 1 failed with AcceleratorError: CUDA error: device-side assert",
                                             "rank 1, step 3 (training)", "line {torch.AcceleratorError},", "restarted once, from step 2",
                                             "Usually an index is out of range")),
    Fault("kill+kill+kill", 1, ("failed in step 3", "killed by signal 9 (SIGKILL); stopped, because the same failure came 3 times at step 3",
                                "rank 1, step 3", "restarted 2 times, from step 2, step 2", "the machine or the container ran out of memory")),
    Fault("segfault", 0, ("rank 1 was killed by signal 11 (SIGSEGV)", "rank 1, step 3", "line {ctypes.string_at(0)},", _AGAIN)),
    Fault("disk-full", 0, ("finished at step 8", "1 failed, last step-00000004: No space left on device; later ones succeeded")),
    Fault("disk-stays-full", 1, ("failed", "No space left on device", "free disk space, and run again with --resume", "3 failed, last step-")),
    Fault("checkpoints-deleted", 0, ("finished at step 8", "saves deleted during the run: checkpoints")),
    Fault("loader-killed", 1, ("failed", "rank 1 failed with RuntimeError: DataLoader worker (pid", "rank 1, step",
                               "line {trainer.fit(data)},", "A loader worker was killed, usually because memory ran out.")),
    Fault("nan", 1, ("failed in step 3", "the loss is nan on rank 1 for samples 17, 19, 21, 23 of the data set; not finite in the data: 17",
                     "rank 1, step 3 (training)")),
    Fault("bad-sample", 1, ("rank 1 failed with ValueError: sample 17 cannot be read", "rank 1, step 3 (reading data)", "line {cannot be read},")),
    Fault("bad-sample-in-loader", 1, ("rank 1 failed with ValueError", "sample 17 cannot be read", "rank 1, step 3 (reading data)",
                                      "line {cannot be read},")),
    Fault("clock", 0, ("finished at step 8",)),
    Fault("setting", 2, ("failed before its first step", "gradient_clipping=-1 must be greater than 0", "line {Trainer(},")),
    Fault("import", 1, ("failed before its first step", "ModuleNotFoundError: No module named 'a_module_that_nobody_has'",
                        "outside of a fit", "line {import a_module},")),
)  # fmt: skip


def numbered(text: str) -> str:
    """Return `text` with each `{N}` replaced by the number of the last line of job.py that holds N."""

    def number(found: re.Match[str]) -> str:
        return str(max(index for index, line in enumerate(LINES, 1) if found[1] in line))

    return re.sub(r"\{(.*?)\}(?=,)", number, text)


def why(run: Path) -> str:
    """Return what `why` prints in one line, after checking that it is short."""
    with contextlib.chdir(run.parent):
        lines = lines_of(read_why(Path(run.name)))
    assert len(lines) <= 10, "\n".join(lines)
    assert all(len(line) <= 80 or max(map(len, line.split())) > 60 for line in lines), "\n".join(lines)
    return " ".join(" ".join(lines).split())


def check(run: Path, fault: Fault, done: Finished) -> None:
    """Assert that `why` names what the fault is to show, in that order."""
    said, position = why(run), 0
    for part in map(numbered, fault.says):
        position = said.find(part, position)
        assert position >= 0, f"{part!r} is missing in:\n{said}\n{done.output[-3000:]}"


def arguments(run: Path, name: str, *flags: str) -> list[str]:
    return [
        "train",
        "--script",
        str(JOB),
        "--nproc-per-node",
        "2",
        "--run-dir",
        str(run),
        "--set",
        "hang_timeout=2",
        *flags,
        "--",
        name,
    ]


@pytest.mark.parametrize(
    ("backend", "names", "last"),
    [
        ("pytorch-ddp", ["segfault", "raise-on-rank-0", "loop-callback"], "rank 1 hangs in step 3"),
        pytest.param(
            "ray", ["loop-loader", "segfault"], "rank 1 was killed by signal 11 (SIGSEGV)", marks=pytest.mark.full
        ),
    ],
)
def test_faults_in_one_run_are_told_apart(
    run_cli: Callable[..., Finished], tmp_path: Path, backend: str, names: list[str], last: str
) -> None:
    """The journal is cut after each failure in turn, as `why` finds it at that time."""
    needs_backend(backend)
    run, count = tmp_path / "run", len(names)
    flags = ("--backend", backend, "--set", "restart_on_exception=true", "--set", "max_restarts=5")
    done = run_cli(arguments(run, "+".join(names), *flags))
    assert done.returncode == 0, done.output
    again = f"restarted {count} times, from {', '.join(['step 2'] * count)}"
    said = ("finished at step 8", f"failed {count} times before, last: {last}", again)
    check(run, Fault("", 0, said), done)
    events = run / "events.jsonl"
    lines = events.read_text().splitlines(keepends=True)
    failed = [index for index, line in enumerate(lines) if json.loads(line)["event"] == "worker_failed"]
    for name, index in zip(names, failed, strict=True):
        events.write_text("".join(lines[: index + 1]))
        fault = next(fault for fault in FAULTS if fault.name == name)
        says = tuple(part for part in fault.says if part != _AGAIN and "rank-" not in part)
        check(run, dataclasses.replace(fault, says=says), done)


@pytest.mark.full
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(run_cli: Callable[..., Finished], tmp_path: Path, fault: Fault) -> None:
    done = run_cli(arguments(tmp_path / "run", fault.name, *fault.flags))
    assert done.returncode == fault.code, done.output
    check(tmp_path / "run", fault, done)
    if fault.name in ("stop-and-go-on", "clock"):
        assert "failed" not in why(tmp_path / "run")


@pytest.mark.full
def test_a_launcher_that_is_killed_leaves_a_run_of_which_why_says_so(
    start: Callable[..., Started], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    training = start([sys.executable, "-m", "distributed.cli", *arguments(run, "none")], env={"FAULT_WAITS_S": "0.2"})
    training.wait_for(lambda: list(run.glob("checkpoints/step-*")))
    assert "running" in why(run) and "last sign of progress" in why(run)
    for pid in training.alive()[:1]:
        os.kill(pid, signal.SIGKILL)
    poll(lambda: not training.alive(), 30, lambda: "still alive")
    said = poll(lambda: "run: killed at step" in why(run) and why(run), 10, lambda: why(run))
    assert f"the launcher (process {training.pid} on " in said, said
    assert re.search(r"--resume, from step-0000000\d", said), said


@pytest.mark.full
@pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "SIGTERM"), (signal.SIGINT, "SIGINT")])
def test_a_run_that_is_stopped_names_the_signal(
    start: Callable[..., Started], tmp_path: Path, number: int, name: str
) -> None:
    run = tmp_path / "run"
    training = start([sys.executable, "-m", "distributed.cli", *arguments(run, "none")], env={"FAULT_WAITS_S": "0.2"})
    training.wait_for(lambda: list(run.glob("checkpoints/step-*")))
    training.signal(number)
    training.finish()
    assert f"stopped by {name}, after a checkpoint" in (said := why(run)) and "interrupted at step" in said, said


@pytest.mark.full
def test_a_damaged_checkpoint_is_set_aside_and_only_damaged_ones_end_the_run(
    run_cli: Callable[..., Finished], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert run_cli(arguments(run, "raise")).returncode == 1
    assert run_cli([*arguments(run, "none", "--resume", "--max-steps", "4")]).returncode == 0
    newest = run / "checkpoints" / "step-00000004" / "model" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"\xff")
    done = run_cli(arguments(run, "none", "--resume"))
    assert done.returncode == 0 and "finished at step 8" in why(run), done.output
    assert "set aside: damaged-step-00000004" in why(run), why(run)

    for each in run.glob("checkpoints/step-*/model/model.safetensors"):
        each.write_bytes(b"\xff")
    done = run_cli(arguments(run, "none", "--resume"))
    said = why(run)
    assert done.returncode == 2 and "failed" in said and "damaged" in said, said + done.output


@pytest.mark.full
def test_a_checkpoint_of_another_model_is_named(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert run_cli(arguments(run, "none", "--max-steps", "4")).returncode == 0
    done = run_cli(arguments(run, "other-model", "--resume"))
    assert done.returncode == 2, done.output
    shapes = "other shapes: layer.weight is [3, 6] in the checkpoint, [4, 6] here"
    check(run, Fault("", 2, ("failed", "is of another model:", shapes)), done)


@pytest.mark.full
def test_a_small_disk_that_is_full_is_named(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    """The run directory is on a file system of 200 KB, which is full after some checkpoints."""
    if os.geteuid() or shutil.which("mount") is None:
        pytest.skip("only root can mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        done = run_cli(arguments(disk / "run", "none", "--checkpoint-every-n-steps", "1", "--set", "keep_latest_k=100"))
        said = why(disk / "run")
        assert done.returncode == 1 and "No space left on device" in said and "free disk space" in said, (
            said + done.output
        )
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_the_page_lists_every_fault() -> None:
    page = (JOB.parents[2] / "docs" / "reliability.md").read_text()
    missing: list[Any] = [fault.name for fault in FAULTS if f"`{fault.name}`" not in page]
    assert missing == []


def test_no_run_is_one_line(run_cli: Callable[..., Finished], tmp_path: Path) -> None:
    RunDirectory(tmp_path)
    done = run_cli(["why", str(tmp_path / "none")])
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.output
    assert "does not exist: name a run, 'distributed runs' lists those in ./runs" in done.stderr
