"""The processes of a DataLoader: where their death is reported, and their stacks."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from distributed.backends._torch import loader_processes  # noqa: E402
from distributed.backends._torch.loader_processes import WorkerInit, read_loader, stop_workers  # noqa: E402
from distributed.launching.heartbeat import STACKS_SIGNAL, heartbeat  # noqa: E402
from distributed.launching.loader_stacks import LoaderProcess, collect_of_loaders  # noqa: E402
from distributed.launching.stacks import line_in_script, passes_batches, why_silent  # noqa: E402
from distributed.runs import shared_memory  # noqa: E402
from distributed.runs.processes import die_with_parent, is_running  # noqa: E402
from tests.conftest import poll  # noqa: E402


class Numbers(Dataset[Any]):
    """32 numbers with the process that reads them, and 32 that are never read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if index >= 32:
            threading.Event().wait()  # for ever
        return torch.tensor([index, os.getpid()])


def kill(batch: Any) -> None:
    """Kill the process that has read a batch, and wait until this process has had its SIGCHLD."""
    os.kill(int(batch[0, 1]), signal.SIGKILL)
    poll(lambda: loader_processes._deaths._found, 10, lambda: "no SIGCHLD")


def test_a_killed_process_is_reported_where_a_batch_is_read_and_nowhere_else() -> None:
    batches = read_loader(DataLoader(Numbers(), batch_size=4, num_workers=1, prefetch_factor=1))
    kill(next(batches))  # torch's own handler would raise here
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* is killed by signal"):
        next(batches)


def test_a_process_that_is_killed_while_it_reads_is_reported_at_once() -> None:
    batches = read_loader(DataLoader(Numbers(), batch_size=32, num_workers=1, prefetch_factor=1))
    pid, begin = int(next(batches)[0, 1]), time.monotonic()
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    with pytest.raises(RuntimeError, match=r"DataLoader worker \(pid"):
        next(batches)
    assert time.monotonic() - begin < 4


def test_the_lock_of_a_killed_process_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch sets an event when it stops the processes, and takes the lock of that event."""
    iterators: list[Any] = []
    begin = DataLoader.__iter__
    monkeypatch.setattr(DataLoader, "__iter__", lambda loader: iterators.append(begin(loader)) or iterators[-1])
    batches = read_loader(DataLoader(Numbers(), batch_size=4, num_workers=2))
    kill(next(batches))
    holder = threading.Thread(target=iterators[0]._workers_done_event._cond.acquire, daemon=True)  # as the process did
    holder.start()
    holder.join()
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        next(batches)
    assert not any(worker.is_alive() for worker in iterators[0]._workers)


def test_whole_epochs_with_persistent_processes() -> None:
    loader: DataLoader[Any] = DataLoader(
        torch.utils.data.TensorDataset(torch.arange(10)), batch_size=4, num_workers=1, persistent_workers=True
    )
    for _ in range(2):
        assert [batch[0].tolist() for batch in read_loader(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
        assert not is_torchs_handler()
    stop_workers(loader._iterator)
    assert is_torchs_handler()  # which reports the death of a process of the script's own loader at once


def is_torchs_handler() -> bool:
    return signal.getsignal(signal.SIGCHLD).__module__ == "torch.utils.data._utils.signal_handling"


# ------------------------------------------------------------------ stacks


@contextlib.contextmanager
def running(
    batches: list[list[int]], function: Any = None, start_method: str = "fork", num_workers: int = 1
) -> Iterator[Any]:
    """Start the processes of a loader, as this package starts them. They are killed at the end."""
    data = Numbers()
    loader: DataLoader[Any] = DataLoader(
        data, batch_sampler=batches, num_workers=num_workers, multiprocessing_context=start_method,
        worker_init_fn=WorkerInit(data, function),
    )  # fmt: skip
    iterator = iter(loader)
    try:
        next(iterator)
        yield iterator
    finally:
        before = signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would raise
        for worker in iterator._workers:
            worker.kill()
            worker.join()
        stop_workers(iterator)
        signal.signal(signal.SIGCHLD, before)


def loaders_of_this_process() -> list[LoaderProcess]:
    return collect_of_loaders({0: os.getpid(), 1: 0})[0]


def in_user_code() -> list[LoaderProcess]:
    """Return the loader processes of this process once the second one reads a sample."""
    found = loaders_of_this_process()
    return found if len(found) == 2 and line_in_script(found[1].process.stacks) else []


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_each_loader_process_writes_its_stacks_and_is_marked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start_method: str
) -> None:
    """Process 0 has nothing to read, and process 1 reads for ever."""
    monkeypatch.setattr(heartbeat(), "writes_stacks", True)
    monkeypatch.setattr(shared_memory, "_directory", str(tmp_path))
    with running([[0], [40]], None, start_method, 2):
        idle, reading = poll(in_user_code, 50, lambda: str(loaders_of_this_process()))
        assert (idle.number, reading.number) == (0, 1)
        assert passes_batches(idle.process.stacks) and line_in_script(idle.process.stacks) == ""
        stacks, pid = reading.process.stacks, reading.process.pid
        assert line_in_script(stacks).endswith(", in __getitem__") and not passes_batches(stacks)

        os.kill(pid, signal.SIGSTOP)
        poll(lambda: why_silent(pid), 10, lambda: "it goes on")
        stopped = loaders_of_this_process()[1].process
        assert stopped.stacks == "" and stopped.why_silent == "it is stopped (SIGSTOP)"
        assert {path.name for path in tmp_path.iterdir()} == {f"process-{each.process.pid}" for each in (idle, reading)}


DIES = """
import os, signal, sys
from pathlib import Path
from torch.utils.data import DataLoader
from distributed.backends._torch.loader_processes import WorkerInit
from tests.unit.test_loader_processes import Numbers

if __name__ == "__main__":
    loader = DataLoader(
        Numbers(), batch_size=4, num_workers=2, multiprocessing_context=sys.argv[1], worker_init_fn=WorkerInit(None, None)
    )
    batches = iter(loader)
    next(batches), next(batches)
    Path(sys.argv[2]).write_text(" ".join(str(worker.pid) for worker in batches._workers))
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_loader_processes_end_with_a_rank_that_is_killed(tmp_path: Path, start_method: str) -> None:
    script = tmp_path / "dies.py"
    script.write_text(DIES)
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    died = subprocess.run([sys.executable, str(script), start_method, str(tmp_path / "pids")], env=environ)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert died.returncode == -signal.SIGKILL and len(pids) == 2
    try:
        poll(lambda: not any(map(is_running, pids)), 10, lambda: "they go on")
    finally:
        for pid in filter(is_running, pids):
            os.kill(pid, signal.SIGKILL)


def reset(number: int) -> None:
    """Fork a process, which has the file for the stacks too, and reset the handler in the loader process."""
    parent = os.getpid()
    if os.fork() == 0:
        die_with_parent(parent)
        threading.Event().wait()
    signal.signal(STACKS_SIGNAL, signal.SIG_DFL)


def test_no_process_gets_a_signal_that_would_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One child is no loader process. The other one is, but the user's function has reset its handler."""
    monkeypatch.setattr(heartbeat(), "writes_stacks", True)
    with (
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other,
        running([[each] for each in range(8)], reset) as batches,
    ):
        assert [(each.number, each.process.stacks) for each in loaders_of_this_process()] == [(0, "")]
        assert len(list(batches)) == 7
        other.communicate(b"\n")
        assert other.returncode == 0


def test_a_loader_process_of_a_rank_that_nobody_asks_has_no_handler() -> None:
    with running([[0]]):
        assert loaders_of_this_process() == []
