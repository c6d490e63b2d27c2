"""The launcher as a process of its own: started here, its output shown where the caller's goes."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, TextIO, cast

from distributed.launcher import HANDOVER_VARIABLE, LaunchRequest
from distributed.launching.processes import STOP_SIGNALS, die_with_parent, heeded_signals


def run_launcher(request: LaunchRequest, out: TextIO, err: TextIO) -> int:
    """`python -m distributed._launch` for `request`; its output goes to `out` and `err`. Returns the exit code.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to it. KeyboardInterrupt when it has ended and SIGINT was among them.
    """
    seen: list[int] = []
    with _held_back() as let_go:
        process = _start(request.to_json(), _is_own_descriptor(out, 1), _is_own_descriptor(err, 2))
        with _passed_on(process, seen):
            let_go()
            _relay(process, out, err)
            code = process.wait()
    if signal.SIGINT in seen:
        raise KeyboardInterrupt
    return 128 - code if code < 0 else code


def run_command(arguments: Sequence[str], output: IO[bytes]) -> int:
    """`python ARGUMENTS` with both its streams in `output`; returns the exit code. It dies with this process.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to it. KeyboardInterrupt when it has ended and SIGINT was among them.
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
    """Signals wait until the function given is called; a child started by then is born with them held back too."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)

    def let_go() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        yield let_go
    finally:
        let_go()


@contextlib.contextmanager
def _passed_on(process: subprocess.Popen[bytes], seen: list[int]) -> Iterator[None]:
    """Signals that would end this process go to `process`. Main thread only: elsewhere Python delivers none."""
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


def _start(request: str, inherits_out: bool, inherits_err: bool) -> subprocess.Popen[bytes]:
    """A launcher that has its request on standard input: no file that a killed caller could leave behind."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    environ = {name: value for name, value in os.environ.items() if name != HANDOVER_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).parents[1] / "_launch.py"), "-", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=None if inherits_out else subprocess.PIPE,
        stderr=None if inherits_err else subprocess.PIPE,
        env=environ,
        start_new_session=True,  # the terminal's Ctrl-C reaches only the caller, who passes it on
    )
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(request.encode())
    return process


def _is_own_descriptor(stream: TextIO, fd: int) -> bool:
    """Whether `stream` is what the process was started with (a notebook's stream is not, whatever its fileno says)."""
    if stream is not (sys.__stdout__ if fd == 1 else sys.__stderr__):
        return False
    try:
        return stream.fileno() == fd
    except (OSError, ValueError):
        return False


def _relay(process: subprocess.Popen[bytes], out: TextIO, err: TextIO) -> None:
    """Copy the launcher's pipes to the caller's streams until both are closed."""
    decoder = codecs.getincrementaldecoder("utf-8")
    with selectors.DefaultSelector() as selector:
        for pipe, stream in ((process.stdout, out), (process.stderr, err)):
            if pipe is not None and not pipe.closed:
                selector.register(pipe, selectors.EVENT_READ, (stream, decoder(errors="replace")))
        while selector.get_map():
            for key, _ in selector.select():
                pipe, (stream, decode) = cast("IO[bytes]", key.fileobj), key.data
                data = os.read(key.fd, 65536)
                stream.write(decode.decode(data, final=not data))
                stream.flush()
                if not data:
                    selector.unregister(pipe)
                    pipe.close()
