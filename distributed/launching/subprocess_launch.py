"""Start the launcher as a process of its own, and show its output where the caller's output goes."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, Any, TextIO, cast

from distributed.launching.epochs import Caller, Row
from distributed.launching.request import HANDOVER_VARIABLE, LaunchRequest
from distributed.loggers.notebook import CellBar, in_notebook
from distributed.runs.processes import STOP_SIGNALS, die_with_parent, heeded_signals, raise_kept


def start_launcher(request: LaunchRequest, on_epoch: Callable[[Mapping[str, Any]], None] | None = None) -> int:
    """Run the workers from a launcher process of their own, for a plain script or a notebook. Return its exit code.

    Args:
        request: what to launch.
        on_epoch: called in this thread with the row of each finished epoch. If it raises, the workers end as after
            SIGTERM, and the error is raised when they have ended.

    Raises:
        KeyboardInterrupt: after SIGINT, which is passed on to the launcher, when that has ended.
    """
    return run_launcher(request, sys.stdout, sys.stderr, on_epoch)


def run_launcher(
    request: LaunchRequest, out: TextIO, err: TextIO, on_epoch: Callable[[Row], None] | None = None
) -> int:
    """Run a launcher process for `request` with its output in `out` and `err`. Return its exit code.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to it. `on_epoch` gets the row of each finished epoch; if it
    raises, the workers end as after SIGTERM. When the launcher has ended, that error is raised, or KeyboardInterrupt
    if SIGINT was among the signals.
    """
    seen: list[int] = []
    with _held_back() as let_go:
        raise_kept()
        bar = CellBar() if in_notebook() else None
        process, epochs, progress = _start(
            request, _is_own_descriptor(out, 1), _is_own_descriptor(err, 2), on_epoch is not None, bar is not None
        )
        caller = Caller(on_epoch, process.terminate)
        with _passed_on(process, seen):
            let_go()
            takers = {process.stdout: _shown_on(out), process.stderr: _shown_on(err), epochs: _rows_to(caller)}
            if bar is not None:
                takers[progress] = _rows_to(bar.take)
            _relay(takers)
            code = process.wait()
    if caller.error is not None:
        raise caller.error
    if signal.SIGINT in seen:
        raise KeyboardInterrupt
    return 128 - code if code < 0 else code


def run_command(arguments: Sequence[str], output: IO[bytes]) -> int:
    """Run `python ARGUMENTS` with both its streams in `output`. Return the exit code. It dies with this process.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to it. Raises KeyboardInterrupt when it has ended and SIGINT was
    among them.
    """
    seen: list[int] = []
    parent = os.getpid()
    with _held_back() as let_go:
        process = subprocess.Popen(
            [sys.executable, *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
            preexec_fn=lambda: die_with_parent(parent),
        )  # fmt: skip
        with _passed_on(process, seen):
            let_go()
            code = process.wait()
    if signal.SIGINT in seen:
        raise KeyboardInterrupt
    if seen:
        raise SystemExit(128 + seen[0])
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def _held_back() -> Iterator[Callable[[], None]]:
    """Block the stop signals until the yielded function is called.

    A child that is started before that has them blocked too.
    """
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield let_go
    finally:
        let_go()


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes], seen: list[int]) -> Iterator[None]:
    """Pass signals that would end this process on to `process`. Main thread only: elsewhere Python delivers none."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def pass_on(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in heeded_signals()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def _start(
    request: LaunchRequest, inherits_out: bool, inherits_err: bool, tells_epochs: bool, tells_progress: bool
) -> tuple[subprocess.Popen[bytes], IO[bytes] | None, IO[bytes] | None]:
    """Start a launcher, and return it with the pipes for the rows of epochs and for what a progress bar shows.

    The launcher reads its request from standard input, so that a killed caller leaves no file behind.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    read, write = os.pipe() if tells_epochs else (None, None)
    read_bar, write_bar = os.pipe() if tells_progress else (None, None)
    payload = re.fullmatch(r"/proc/self/fd/(\d+)", request.payload or "")
    passed = tuple(fd for fd in (write, write_bar) if fd is not None)
    environ = {name: value for name, value in os.environ.items() if name != HANDOVER_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("main.py")), "-", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=None if inherits_out else subprocess.PIPE,
        stderr=None if inherits_err else subprocess.PIPE,
        env=environ,
        pass_fds=(*passed, *([int(payload[1])] if payload else [])),
        start_new_session=True,  # the terminal's Ctrl-C reaches only the caller, which passes it on
    )
    for fd in passed:
        os.close(fd)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(dataclasses.replace(request, epochs_fd=write, bar_fd=write_bar).to_json().encode())
    return process, _opened(read), _opened(read_bar)


def _opened(fd: int | None) -> IO[bytes] | None:
    return None if fd is None else os.fdopen(fd, "rb", buffering=0)


def _is_own_descriptor(stream: TextIO, fd: int) -> bool:
    """Return whether `stream` is the one that the process was started with.

    A notebook's stream is not, whatever its `fileno` says.
    """
    if stream is not (sys.__stdout__ if fd == 1 else sys.__stderr__):
        return False
    try:
        return stream.fileno() == fd
    except (OSError, ValueError):
        return False


def _shown_on(stream: TextIO) -> Callable[[str], None]:
    def show(text: str) -> None:
        stream.write(text)
        stream.flush()

    return show


def _rows_to(take: Callable[[Any], None]) -> Callable[[str], None]:
    rest = ""

    def read(text: str) -> None:
        nonlocal rest
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            take(json.loads(line))

    return read


def _relay(pipes: Mapping[IO[bytes] | None, Callable[[str], None]]) -> None:
    """Give what comes out of each pipe to its function, until all pipes are closed."""
    decoder = codecs.getincrementaldecoder("utf-8")
    with selectors.DefaultSelector() as selector:
        for pipe, take in pipes.items():
            if pipe is not None and not pipe.closed:
                selector.register(pipe, selectors.EVENT_READ, (take, decoder(errors="replace")))
        while selector.get_map():
            for key, _ in selector.select():
                pipe, (take, decode) = cast("IO[bytes]", key.fileobj), key.data
                data = os.read(key.fd, 65536)
                take(decode.decode(data, final=not data))
                if not data:
                    selector.unregister(pipe)
                    pipe.close()
