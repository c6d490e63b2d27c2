"""The launcher as a process of its own: started here, its output shown where the caller's goes."""

from __future__ import annotations

import codecs
import contextlib
import os
import selectors
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, TextIO, cast

from distributed.launcher import HANDOVER_VARIABLE, LaunchRequest


def run_launcher(request: LaunchRequest, out: TextIO, err: TextIO) -> int:
    """`python -m distributed._launch` for `request`; its output goes to `out` and `err`. Returns the exit code."""
    process = _start(request.to_json(), _is_own_descriptor(out, 1), _is_own_descriptor(err, 2))
    is_interrupted = False
    while True:
        try:
            _relay(process, out, err)
            code = process.wait()
            break
        except KeyboardInterrupt:
            is_interrupted = True
            process.send_signal(signal.SIGINT)
    if is_interrupted:
        raise KeyboardInterrupt
    return 128 - code if code < 0 else code


def _start(request: str, inherits_out: bool, inherits_err: bool) -> subprocess.Popen[bytes]:
    """A launcher that has its request on standard input: no file that a killed caller could leave behind."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    environ = {name: value for name, value in os.environ.items() if name != HANDOVER_VARIABLE}
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("_launch.py")), "-", str(os.getpid())],
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
