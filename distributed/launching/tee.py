"""Copy what a worker of a foreign launcher (torchrun, srun, mpirun) prints to its rank's log.

A small separate process does the copying. It goes on when the worker dies in the middle of a line, and never waits for the
worker's interpreter. A worker that ends normally waits for it, because `srun` kills what is left of a job when the workers have
ended.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from distributed.runs.directory import RunDirectory
from distributed.runs.processes import flush

_COPIED_S = 5.0  # seconds that a worker waits at its end; a child process that goes on may keep its output open


def tee_output(run: RunDirectory, rank: int) -> None:
    """Send the standard output and error of this process through a copying process. Call this once per process.

    The console then shows the standard output of rank 0 only, and the standard error of every rank.
    """
    ends = {name: os.pipe() for name in ("stdout", "stderr")}
    reads = [str(read) for read, _ in ends.values()]
    sys.stdout.flush()
    sys.stderr.flush()
    console = [os.dup(1) if rank == 0 else os.open(os.devnull, os.O_WRONLY), os.dup(2)]
    copying = subprocess.Popen(
        [sys.executable, "-E", str(Path(__file__)), str(run.path.absolute()), str(rank), *reads],
        stdin=subprocess.DEVNULL,
        pass_fds=[int(read) for read in reads],
        start_new_session=True,  # a Ctrl-C must not end the copying of the worker's last lines
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    for target, (read, write) in zip((1, 2), ends.values(), strict=True):
        os.dup2(write, target)
        os.close(read)
        os.close(write)
    atexit.register(_wait_until_copied, copying, console, os.getpid())


def _wait_until_copied(copying: subprocess.Popen[bytes], console: Sequence[int], pid: int) -> None:
    """Wait until everything was copied. What exit functions print afterwards goes to the console only."""
    if os.getpid() != pid:  # a fork of the worker
        return
    flush()
    for target, fd in zip((1, 2), console, strict=True):
        os.dup2(fd, target)
        os.close(fd)
    with contextlib.suppress(subprocess.TimeoutExpired):
        copying.wait(_COPIED_S)


def main(run_dir: str, rank: int, stdout: int, stderr: int) -> None:
    """Copy from the pipes `stdout` and `stderr` to the log and the console until both pipes are closed."""
    from distributed.launching.output import Pipe, RankLog

    log = RankLog(RunDirectory(run_dir), rank)
    with selectors.DefaultSelector() as selector:
        for fd, console in ((stdout, 1 if rank == 0 else None), (stderr, 2)):
            selector.register(fd, selectors.EVENT_READ, (Pipe(rank, "stdout"), console))
        while selector.get_map():
            for key, _ in selector.select():
                pipe, console = key.data
                data = os.read(key.fd, 65536)
                if console is not None:
                    os.write(console, data)
                if whole := pipe.lines(data, final=not data):
                    log.write(whole)
                if not data:
                    selector.unregister(key.fd)
    log.close()


if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[2])
    main(sys.argv[1], *map(int, sys.argv[2:]))
