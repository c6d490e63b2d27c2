"""Read the output and the events of the workers.

The lines of a worker go to the log of its rank. The lines of rank 0 also go to the console. Events go to the agent or the display.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from distributed.launching.request import LaunchRequest
from distributed.loggers.console import Display
from distributed.loggers.notebook import SentBar
from distributed.runs.directory import RunDirectory

_CHUNK = 65536
_FOR_AGENT = {
    "error", "raises", "interrupted", "unshared", "trains", "saved", "shares", "leaves", "uploads", "chose backend",
}  # fmt: skip
Message = dict[str, Any]


def display_of(request: LaunchRequest) -> Display:
    """Return the display of a launcher.

    If the caller shows the progress bar, as a notebook does, the display sends the content of the bar to the caller.
    """
    fd = request.bar_fd
    if fd is None:
        return Display(live=request.live, verbose=request.verbose)
    return Display(live=True, verbose=request.verbose, bar=lambda: SentBar(fd))


class RankLog:
    """Write RUN/logs/rank-N.log in whole lines, each with its rank and time. If the disk is full, lines are lost."""

    def __init__(self, run: RunDirectory, rank: int) -> None:
        self._rank = rank
        run.logs.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(run.logs / f"rank-{rank}.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, text: str) -> None:
        """Append the lines of `text`."""
        prefix = f"[rank {self._rank} {time.strftime('%H:%M:%S')}] "
        lines = "".join(f"{prefix}{line}\n" for line in text.split("\n"))
        with contextlib.suppress(OSError):
            os.write(self._fd, lines.encode("utf-8", "replace"))

    def close(self) -> None:
        os.close(self._fd)


@dataclasses.dataclass
class Pipe:
    """One pipe of one worker, and the beginning of a line that is not complete yet."""

    rank: int
    kind: str  # "stdout", "stderr" or "control"
    decoder: codecs.IncrementalDecoder = dataclasses.field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )
    rest: str = ""  # the beginning of the line that is not complete yet

    def lines(self, data: bytes, *, final: bool = False) -> str:
        """Return all complete lines so far as one text without the last newline, or ""."""
        text = self.rest + self.decoder.decode(data, final=final)
        whole, newline, self.rest = text.rpartition("\n")
        if final and self.rest:
            whole, self.rest = (f"{whole}\n{self.rest}" if newline else self.rest), ""
        return whole


class WorkerOutput:
    """Read every pipe of the workers, and the channel of the launcher, in one thread.

    In that thread, `on_message` is called with messages for the agent, and `on_event` with the events of rank 0 that are displayed.
    """

    def __init__(
        self, run: RunDirectory, display: Display, channel: socket.socket, on_message: Callable[[Message], None],
        on_event: Callable[[Message], None] = lambda event: None,
    ) -> None:  # fmt: skip
        self._run, self._display, self._channel, self._on_message = run, display, channel, on_message
        self._on_event = on_event
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._logs: dict[int, RankLog] = {}
        self._local: dict[int, list[int]] = {}  # local rank -> its pipes
        self._thread = threading.Thread(target=self._read_all, name="worker output", daemon=True)

    def start(self) -> None:
        """Start reading."""
        self._thread.start()

    def attach(self, local_rank: int, rank: int, stdout: int, stderr: int, control: int) -> None:
        """Start to read these pipes of a new worker. May be called from any thread, because epoll allows that during a wait."""
        if rank not in self._logs:
            self._logs[rank] = RankLog(self._run, rank)
        self._local[local_rank] = [stdout, stderr, control]
        for fd, kind in ((stdout, "stdout"), (stderr, "stderr"), (control, "control")):
            os.set_blocking(fd, False)
            self._selector.register(fd, selectors.EVENT_READ, Pipe(rank, kind))

    def log(self, rank: int, text: str) -> None:
        """Write `text` into the log of `rank`, if that rank ran on this node."""
        if rank in self._logs:
            self._logs[rank].write(text)

    def _read_all(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._channel:
                    if not self._read_channel():
                        return
                elif key.fd in self._selector.get_map():  # `_drain` may have closed it in this round
                    self._read_pipe(key.fd)

    def _read_channel(self) -> bool:
        data = self._channel.recv(_CHUNK)
        if not data:
            return False
        message: Message = json.loads(data)
        if message["op"] == "exit":
            self._drain(message["local_rank"])  # handle what the worker wrote before its end
        self._on_message(message)
        return True

    def _drain(self, local_rank: int) -> None:
        """Read what a dead worker has left in its pipes. Do not wait for a child of the worker that still holds a pipe."""
        for fd in self._local.pop(local_rank, []):
            while fd in self._selector.get_map() and self._read_pipe(fd):
                pass
            if fd in self._selector.get_map():
                self._end(fd)

    def _read_pipe(self, fd: int) -> bool:
        """Read once from a pipe. Return False if the pipe is empty or has ended."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        except OSError:  # a connection to another machine that is gone, such as one of a Ray cluster
            data = b""
        if not data:
            self._end(fd)
            return False
        self._take(self._selector.get_map()[fd].data, data)
        return True

    def _end(self, fd: int) -> None:
        self._take(self._selector.get_map()[fd].data, b"", final=True)
        self._selector.unregister(fd)
        os.close(fd)

    def _take(self, pipe: Pipe, data: bytes, *, final: bool = False) -> None:
        whole = pipe.lines(data, final=final)
        if pipe.kind == "control":
            for line in whole.split("\n") if whole else ():
                self._take_event(pipe.rank, line)
            return
        if whole or (data and b"\n" in data):
            self._logs[pipe.rank].write(whole)
        if pipe.rank == 0 and (data or final):
            self._display.print_output(data.decode("utf-8", "replace"), pipe.kind == "stderr")

    def _take_event(self, rank: int, line: str) -> None:
        """Give the event in a line of a control pipe to the agent, or, if rank 0 wrote it, to the display."""
        try:
            event = json.loads(line)
        except ValueError:  # incomplete: the worker died while it wrote the line
            return
        if event.get("kind") in _FOR_AGENT:
            if "full_traceback" in event:
                self.log(rank, event["full_traceback"])
            self._on_message({"op": "event", **event, "rank": rank})
        elif rank == 0:
            self._display.handle(event)
            self._on_event(event)
