"""Run the training process that a Ray worker starts: `python process.py PARENT`. The request is read from standard
input.

The file is run by its path and not with -m, because -m would put the working directory on `sys.path` even if the
request does not.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path


def main(parent: int) -> None:
    """Run the request as a worker. Never returns."""
    from distributed.launching.heartbeat import Board
    from distributed.launching.request import LaunchRequest
    from distributed.launching.worker import run_worker
    from distributed.runs.processes import die_with_parent

    die_with_parent(parent)
    # Workaround (Ray 2.60, ray-project/ray#31805; may go when processes that a Ray worker starts receive SIGINT): Ray
    # blocks SIGINT in its workers, and their child processes inherit the signal mask.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    signal.signal(signal.SIGINT, signal.default_int_handler)
    command = json.loads(sys.stdin.buffer.read())
    os.environ.update(command["environ"])
    request = LaunchRequest.from_json(json.dumps(command["request"]))
    code = 1
    try:
        for name in request.preload:
            importlib.import_module(name)
        Board(1, command["board"]).join(0)
        code = run_worker(request, command, command["fds"])
    except KeyboardInterrupt:  # Ctrl-C before the script began
        code = 128 + signal.SIGINT
    except BaseException:  # top frame of a process: report every error
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    # sys.path[0] is this directory, whose files would hide other modules. Put the parent of the package there instead.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    main(int(sys.argv[1]))
