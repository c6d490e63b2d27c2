"""Start, read and stop the processes of torch's DataLoader."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from torch.utils.data import DataLoader, get_worker_info

from distributed.launching.heartbeat import heartbeat
from distributed.launching.loader_stacks import join_as_loader
from distributed.runs.processes import die_with_parent, is_running
from distributed.runs.shared_memory import mark_directory, mark_process


class WorkerInit:
    """Initialize a loader process.

    The process ends with its trainer, writes its stacks if the launcher asks for them, leaves no shared memory, and sees the user's
    data set in `get_worker_info()`. Then the user's own function is called. Workaround (torch 2.13, no upstream issue known; may go
    when torch's loader processes end with their parent): they check for their parent only every 5 s, and not while they
    read.
    """

    def __init__(self, dataset: Any, function: Callable[[int], None] | None) -> None:
        self._dataset, self._function = dataset, function
        self._trainer, self._writes_stacks = os.getpid(), heartbeat().writes_stacks
        self._marks = mark_directory()

    def __call__(self, worker_id: int) -> None:
        # The trainer may already be dead and this process adopted. A child of a fork server always has another parent.
        is_child = os.getppid() == self._trainer
        if not is_child and not is_running(self._trainer):
            os.kill(os.getpid(), signal.SIGKILL)
        die_with_parent(self._trainer if is_child else os.getppid())
        if not is_child:
            _let_fork_server_end()
        if self._writes_stacks:
            join_as_loader(worker_id)
        mark_process(self._marks)
        object.__setattr__(get_worker_info(), "dataset", self._dataset)
        if self._function is not None:
            self._function(worker_id)


def _let_fork_server_end() -> None:
    """Close this process's end of the pipe by which the fork server sees that its users have ended.

    Workaround (Python 3.11 to 3.13, no upstream issue known; may go when children of a fork server do not keep it alive): the server
    would outlive a trainer that is killed, because its own children hold the pipe open.
    """
    server: Any = multiprocessing.forkserver._forkserver
    os.close(server._forkserver_alive_fd)
    server._forkserver_alive_fd = None


def read_loader(loader: DataLoader[Any]) -> Generator[Any, None, None]:
    """Yield the batches of `loader`. Its processes end with the iteration, unless they are persistent.

    Raises RuntimeError if one of its processes was killed.
    """
    batches = iter(loader)
    try:
        yield from _deaths.watched(batches) if loader.num_workers else batches
    finally:
        if not loader.persistent_workers:
            stop_workers(batches)


def stop_workers(batches: Any) -> None:
    """Stop the processes of a loader's iterator immediately.

    Workaround (torch 2.13, pytorch/pytorch#64766; may go when a loader has a public method for this): torch stops them
    when the iterator is deleted, and a traceback delays the deletion.
    """
    if (stop := getattr(batches, "_shutdown_workers", None)) is None:
        return
    workers = batches._workers
    if any(worker.exitcode for worker in workers):
        # The one that was killed may have held the lock of the event that torch sets to stop the others.
        for worker in workers:
            worker.kill()
        for worker in workers:
            worker.join()
        batches._workers_done_event = multiprocessing.Event()
    # If one is killed now, torch waits for that lock until its handler raises an error.
    with contextlib.suppress(RuntimeError), _deaths.raised():
        stop()
    _deaths.give_back(batches)


class _Deaths:
    """Report the death of a loader process where a batch is read, and nowhere else.

    Workaround (torch 2.13, no upstream issue known; may go when torch reports it in `next` of the loader's iterator only): torch's
    handler of SIGCHLD raises RuntimeError at whatever line the main thread executes. That may be within a save, or within code that
    takes a RuntimeError for something else.
    """

    def __init__(self) -> None:
        self._of_torch: Callable[[int, Any], Any] | None = None
        self._running: set[int] = set()  # ids of the iterators of loaders whose processes have not been stopped
        self._may_raise = False
        self._found: RuntimeError | None = None

    def watched(self, batches: Iterator[Any]) -> Generator[Any, None, None]:
        """Yield the batches. Raises RuntimeError where one is read if a process has been killed, now or since the last one."""
        self._take_over(batches)
        while True:
            with self.raised():
                if self._found is not None:
                    found, self._found = self._found, None
                    raise found
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch

    def _take_over(self, batches: Iterator[Any]) -> None:
        """Take the place of torch's handler, which torch sets when it starts the first process of a loader."""
        if threading.current_thread() is not threading.main_thread():
            return  # torch has no handler then
        self._running.add(id(batches))
        self._found = None  # of an earlier loader; one that is still read notices within 5 s that its process is gone
        handler = signal.getsignal(signal.SIGCHLD)
        if callable(handler) and getattr(handler, "__module__", "") == "torch.utils.data._utils.signal_handling":
            self._of_torch = handler
            signal.signal(signal.SIGCHLD, self._handle)

    def give_back(self, batches: Iterator[Any]) -> None:
        """Put torch's handler back when the processes of all loaders have been stopped, for loaders of the script."""
        self._running.discard(id(batches))
        if not self._running and self._of_torch is not None and signal.getsignal(signal.SIGCHLD) == self._handle:
            with contextlib.suppress(ValueError):  # this is not the main thread
                signal.signal(signal.SIGCHLD, self._of_torch)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Let the handler raise RuntimeError within the block. It runs in the main thread."""
        before, self._may_raise = self._may_raise, threading.current_thread() is threading.main_thread()
        try:
            yield
        finally:
            self._may_raise = before

    def _handle(self, number: int, frame: Any) -> None:
        assert self._of_torch is not None
        try:
            self._of_torch(number, frame)
        except RuntimeError as error:
            if self._may_raise:
                raise
            self._found = error


_deaths = _Deaths()  # of the process, as a signal handler is
