"""Start the launcher as a separate process, and show its output where the caller's output goes."""

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

from distributed.launching.epochs import Caller
from distributed.launching.request import HANDOVER_VARIABLE, LaunchRequest
from distributed.loggers.notebook import CellBar, in_notebook
from distributed.runs.processes import STOP_SIGNALS, die_with_parent, heeded_signals, raise_kept
from distributed.state import EpochMetrics


def start_launcher(
    request: LaunchRequest,
    on_epoch: Callable[[EpochMetrics], None] | None = None,
    on_run_dir: Callable[[str], None] | None = None,
) -> int:
    """Run the workers from a separate launcher process, for a plain script or a notebook. Return the exit code of the launcher.

    Args:
        request: what to launch.
        on_epoch: called in this thread with the metrics of each finished epoch. If it raises, the workers end as after
            SIGTERM, and the error is raised when they have ended.
        on_run_dir: called in this thread with the run directory, once the nodes have agreed on it.

    Raises:
        KeyboardInterrupt: SIGINT arrived. It is passed on to the launcher, and raised here when the launcher has ended.
    """
    return run_launcher(request, sys.stdout, sys.stderr, on_epoch, on_run_dir)


def run_launcher(
    request: LaunchRequest, out: TextIO, err: TextIO, on_epoch: Callable[[EpochMetrics], None] | None = None,
    on_run_dir: Callable[[str], None] | None = None,
) -> int:  # fmt: skip
    """Run a launcher process for `request` with its output in `out` and `err`. Return its exit code.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to the launcher. `on_epoch` is called with the metrics of each finished
    epoch. If it raises, the workers end as after SIGTERM, and the error is raised here when the launcher has ended.
    `on_run_dir` is called with the run directory, once the nodes have agreed on it.
    KeyboardInterrupt is raised if one of the signals was SIGINT.
    """
    seen: list[int] = []
    with _held_back() as let_go:
        raise_kept()
        caller = Caller(on_epoch, lambda: process.terminate())
        takers: dict[str, Callable[[Any], None] | None] = {
            "epochs_fd": caller if on_epoch is not None else None,
            "bar_fd": CellBar().take if in_notebook() else None,
            "run_dir_fd": on_run_dir,
        }
        heard = {name: take for name, take in takers.items() if take is not None}
        process, pipes = _start(request, _is_own_descriptor(out, 1), _is_own_descriptor(err, 2), [*heard])
        with _passed_on(process, seen):
            let_go()
            outputs = {process.stdout: _shown_on(out), process.stderr: _shown_on(err)}
            _relay({**outputs, **{pipes[name]: _lines_to(take) for name, take in heard.items()}})
            code = process.wait()
    if caller.error is not None:
        raise caller.error
    if signal.SIGINT in seen:
        raise KeyboardInterrupt
    return 128 - code if code < 0 else code


def run_command(arguments: Sequence[str], output: IO[bytes]) -> int:
    """Run `python ARGUMENTS` with standard output and error in `output`. Return its exit code. It dies with this process.

    SIGINT, SIGTERM, SIGUSR1 and SIGHUP are passed on to the command. When the command has ended, KeyboardInterrupt is raised if
    one of them was SIGINT, and SystemExit if only others came.
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

    A child process that is started before this call also has the signals blocked.
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
    """Pass signals that would end this process on to `process`. Works in the main thread only: Python delivers signals there."""
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
    request: LaunchRequest, inherits_out: bool, inherits_err: bool, names: Sequence[str]
) -> tuple[subprocess.Popen[bytes], dict[str, IO[bytes]]]:
    """Start a launcher. Return its process, and one pipe from it for each field of the request in `names`.

    The launcher reads its request from standard input, so that a killed caller leaves no file behind.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    pipes = {name: os.pipe() for name in names}
    writing: dict[str, Any] = {name: write for name, (_, write) in pipes.items()}
    payload = re.fullmatch(r"/proc/self/fd/(\d+)", request.payload or "")
    environ = {name: value for name, value in os.environ.items() if name != HANDOVER_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("main.py")), "-", str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=None if inherits_out else subprocess.PIPE,
        stderr=None if inherits_err else subprocess.PIPE,
        env=environ,
        pass_fds=(*writing.values(), *([int(payload[1])] if payload else [])),
        start_new_session=True,  # the terminal's Ctrl-C reaches only the caller, which passes it on
    )
    for fd in writing.values():
        os.close(fd)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(dataclasses.replace(request, **writing).to_json().encode())
    return process, {name: os.fdopen(read, "rb", buffering=0) for name, (read, _) in pipes.items()}


def _is_own_descriptor(stream: TextIO, fd: int) -> bool:
    """Return whether `stream` is the stream with descriptor `fd` that this process was started with.

    Return False for the stream of a notebook, even if its `fileno` returns `fd`.
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


def _lines_to(take: Callable[[Any], None]) -> Callable[[str], None]:
    rest = ""

    def read(text: str) -> None:
        nonlocal rest
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            take(json.loads(line))

    return read


def _relay(pipes: Mapping[IO[bytes] | None, Callable[[str], None]]) -> None:
    """Call the function of each pipe with the text that comes out of the pipe, until all pipes are closed."""
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
