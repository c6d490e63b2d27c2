"""Create a new SQLite store of MLflow atomically.

Workaround (MLflow 3.17.2, mlflow/mlflow#24321, which was not merged; may go when MLflow creates its tables in one
transaction under a lock): MLflow creates them in a hundred steps. If a process is killed among them, or two begin
together, the file that is left is one that MLflow cannot open any more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from distributed.loggers._mlflow.tracking_uri import file_of


def make_whole(uri: str) -> None:
    """Create the SQLite file that `uri` names, if it does not exist. Other processes that call this wait.

    Do nothing if `uri` names another kind of store.
    """
    path = file_of(uri)
    if path is None or path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)  # MLflow creates it too
    with _alone_in(path.parent):
        if path.exists():
            return
        for left in path.parent.glob(f".{path.name}.*"):  # left by a process that was killed
            left.unlink()
        stage = path.with_name(f".{path.name}.{secrets.token_hex(4)}").absolute()
        MlflowClient(tracking_uri=f"sqlite:///{stage}")
        stage.rename(path)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """Let one process at a time into the block, if the file system has locks.

    The lock is on the directory itself, so no lock file is left.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
