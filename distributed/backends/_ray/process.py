"""Training process that a Ray worker starts: `python process.py PARENT`. It reads its request from standard input.

It is run by its path and not with -m, so that the working directory is not on the path before the request says so.
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
    from distributed.launching.request import LaunchRequest
    from distributed.launching.worker import run_worker
    from distributed.runs.processes import die_with_parent

    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's workers block SIGINT
    signal.signal(signal.SIGINT, signal.default_int_handler)
    order = json.loads(sys.stdin.buffer.read())
    os.environ.update(order["environ"])
    request = LaunchRequest.from_json(json.dumps(order["request"]))
    code = 1
    try:
        for name in request.preload:
            importlib.import_module(name)
        code = run_worker(request, order, order["fds"])
    except KeyboardInterrupt:  # Ctrl-C before the script began
        code = 128 + signal.SIGINT
    except BaseException:  # the top frame of a process: report every error
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    # sys.path[0] is this directory, whose files would hide other modules. Put the parent of the package there instead.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    main(int(sys.argv[1]))
