"""Copy the logs of the other nodes to the run directory of node 0, through a directory that all nodes share."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from distributed.runs.directory import RunDirectory


def send_logs(run: RunDirectory, shared: Path | None, run_id: str, node_rank: int) -> None:
    """Copy the logs of this node into the directory `shared`. Do nothing if it is None or the nodes share the run directory.

    Called on every node before the others know that its workers have ended. Raises OSError.
    """
    if shared is not None and run.part_of:
        shutil.copytree(run.logs, _folder(shared, run_id) / f"node-{node_rank}", dirs_exist_ok=True)


def fetch_logs(run: RunDirectory, shared: Path | None, run_id: str) -> None:
    """Move the logs that the other nodes have sent to RUN/logs/node-N. Called on node 0 after the last node has ended. Raises OSError."""
    if shared is not None and (folder := _folder(shared, run_id)).is_dir():
        shutil.copytree(folder, run.logs, dirs_exist_ok=True)
        shutil.rmtree(folder)


def _folder(shared: Path, run_id: str) -> Path:
    # The id came over a socket, so keep only hexadecimal digits.
    return shared / f".logs-{re.sub(r'[^0-9a-f]', '', run_id)}"
