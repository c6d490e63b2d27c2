"""The worker server: a process that has imported the framework, and forks a launcher for each request within milliseconds.

The worker server is started as `python worker_server.py FD MODULES`, by its path and not with -m, so that the working directory
is not on `sys.path`. The launcher that it forks is `forkserver.py`.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.launching.request import LaunchRequest
    from distributed.state import EpochMetrics

_MESSAGE_BYTES = 1 << 20


class WorkerServer:
    """The caller's side of a worker server. It runs one launch at a time; the server and its launcher end with this process."""

    def __init__(self, preload: tuple[str, ...]) -> None:
        self.preload = preload
        self._channel, side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with side:  # no parent-death signal: it would come when the calling thread ends
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(side.fileno()), ",".join(preload)], pass_fds=(side.fileno(),),
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        self._lock = threading.Lock()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def launch(self, request: LaunchRequest, output: int, on_epoch: Callable[[EpochMetrics], None]) -> int:
        """Run `request` until it has ended, with standard output and error in the descriptor `output`. Return the exit code.

        `on_epoch` is called in this thread with the metrics of each finished epoch. If it raises, the workers end as after SIGTERM,
        and the error is raised here when they have ended.
        """
        from distributed.launching.epochs import Caller

        read, write = os.pipe()
        caller = Caller(on_epoch, self.stop)
        try:
            socket.send_fds(self._channel, [request.to_json().encode()], [output, write])
        except OSError:
            os.close(read)
            return 1
        finally:
            os.close(write)
        with os.fdopen(read, encoding="utf-8") as epochs:
            for line in epochs:
                caller(json.loads(line))
        code = self._code()
        if caller.error is not None:
            raise caller.error
        return code

    def _code(self) -> int:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = self._channel.recv(_MESSAGE_BYTES)
        return int(data) if data else 1

    def stop(self) -> None:
        """Stop the running launcher, if any, as SIGTERM does. May be called from any thread."""
        with self._lock, contextlib.suppress(OSError):
            self._channel.send(b"stop")

    def close(self) -> None:
        """End the server process."""
        self._channel.close()
        self._process.wait()


class _Server:
    """The loop of the server's process, which has a single thread so that its children start from a clean state."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def serve(self) -> None:
        """Serve requests until the caller has ended. A launcher that still runs then dies with this process."""
        from distributed.launching.forking import fork

        while True:
            data, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 2)
            if not data:
                return
            if data == b"stop":  # the launcher had ended before this message came
                continue
            pid = fork(functools.partial(self._launch, data, fds))
            for fd in fds:
                os.close(fd)
            if not self._wait(pid):
                return

    def _wait(self, pid: int) -> bool:
        """Wait until the launcher has ended. Return False if the caller has ended first."""
        end = os.pidfd_open(pid)
        try:
            while True:
                ready, _, _ = select.select([self._channel.fileno(), end], [], [])
                if end in ready:
                    break
                if not self._channel.recv(_MESSAGE_BYTES):
                    return False
                os.kill(pid, signal.SIGTERM)
        finally:
            os.close(end)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        self._channel.send(str(128 - status if status < 0 else status).encode())
        return True

    def _launch(self, data: bytes, fds: list[int]) -> int:
        """Run the launcher in a forked child. `fds` are the descriptors for its output and for the rows of epochs."""
        import dataclasses

        from distributed.errors import DistributedError
        from distributed.launching.forkserver import launch
        from distributed.launching.request import LaunchRequest
        from distributed.runs.processes import STOP_SIGNALS

        signal.pthread_sigmask(signal.SIG_UNBLOCK, (*STOP_SIGNALS, signal.SIGCHLD))
        os.setsid()
        self._channel.close()
        output, epochs = fds
        for stream in (1, 2):
            os.dup2(output, stream)
        os.close(output)
        gc.enable()
        try:
            return launch(dataclasses.replace(LaunchRequest.from_json(data.decode()), epochs_fd=epochs))
        except DistributedError as error:
            sys.stderr.write(f"error: {error}\n")
            return error.exit_code


def _main(fd: int, preload: list[str]) -> Any:
    from distributed.launching.forking import shared_imports
    from distributed.runs.processes import leave

    with shared_imports():
        for name in preload:
            importlib.import_module(name)
    _Server(socket.socket(fileno=fd)).serve()
    leave(0)


if __name__ == "__main__":
    # sys.path[0] is this directory, and its files would hide modules of the same name. Replace it by the package's parent.
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    _main(int(sys.argv[1]), [name for name in sys.argv[2].split(",") if name])
