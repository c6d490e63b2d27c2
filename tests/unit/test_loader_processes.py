"""The processes of a DataLoader: where their death is reported."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from distributed.backends._torch import loader_processes  # noqa: E402
from distributed.backends._torch.loader_processes import read_loader, stop_workers  # noqa: E402
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
