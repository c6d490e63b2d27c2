"""Ask a Ray cluster for its nodes in a separate process, because a process that has used Ray must not fork.

The process runs this file by its path: `python asking.py ADDRESS`. It prints one line of JSON.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"}


def ask(address: str, patience_s: float) -> Sequence[dict[str, Any]]:
    """Return the result of `ray.nodes()` for the cluster at `address`.

    Raises:
        ConnectionError: the cluster cannot be reached. The message is that of Ray.
        TimeoutError: there was no answer within `patience_s` seconds.
    """
    try:
        done = subprocess.run(
            [sys.executable, __file__, address], env={**_QUIET, **os.environ}, stdin=subprocess.DEVNULL,
            capture_output=True, text=True, timeout=patience_s,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {patience_s:g} s") from None
    lines = done.stdout.splitlines()
    answer: dict[str, Any] = {"error": done.stderr}
    if lines and lines[-1].startswith("{"):
        answer = json.loads(lines[-1])
    if "error" in answer:
        raise ConnectionError(answer["error"])
    nodes: Sequence[dict[str, Any]] = answer["nodes"]
    return nodes


def main(address: str) -> None:
    """Print the nodes of the cluster, or why it cannot be reached."""
    import ray

    from distributed.backends._ray.joining import join

    try:
        join(ray, address, logging_level=logging.ERROR, log_to_driver=False, configure_logging=False)
        answer = {"nodes": ray.nodes()}
    except (ConnectionError, RuntimeError) as error:  # Ray raises RuntimeError for another version of Ray or Python
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # the cluster detects the end of the process, and a shutdown would take seconds


if __name__ == "__main__":
    # sys.path[0] is this directory, whose files would hide other modules. Put the parent of the package there instead.
    sys.path[0] = str(Path(__file__).resolve().parents[3])
    main(sys.argv[1])
