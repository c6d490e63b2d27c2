"""The process that a Ray worker starts: `python process.py PARENT`; standard input says what it is to run.

Run by its path, not with -m: nothing of the working directory is on the path before the request says so.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path


def main(parent: int) -> None:
    """Live as a worker that our own launcher forked. Never returns."""
    from distributed.launching.request import LaunchRequest
    from distributed.launching.worker import run_worker
    from distributed.runs.processes import die_with_parent

    die_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray's workers hold SIGINT back
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.stdin.buffer.read())
    os.environ.update(given["environ"])
    request = LaunchRequest.from_json(json.dumps(given["request"]))
    code = 1
    try:
        for name in request.preload:
            importlib.import_module(name)
        code = run_worker(request, given, given["fds"])
    except KeyboardInterrupt:  # a Ctrl-C that came before the script began
        code = 128 + signal.SIGINT
    except BaseException:  # the top frame of a process: say it, whatever it is
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)


if __name__ == "__main__":
    # sys.path[0] is this directory, whose files would hide others: the package's parent is what is meant.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    main(int(sys.argv[1]))
