"""A new SQLite store, whole or not there: MLflow makes its tables in a hundred steps. A process that was killed among them, or two
that began together, left a file that no MLflow takes any more."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from distributed.loggers._mlflow.tracking_uri import file_of


def make_whole(uri: str) -> None:
    """Make the SQLite file that `uri` names, where there is none; others wait meanwhile. Nothing for another store."""
    path = file_of(uri)
    if path is None or path.exists():
        return
    from mlflow import MlflowClient

    path.parent.mkdir(parents=True, exist_ok=True)  # as MLflow does
    with _alone_in(path.parent):
        if path.exists():
            return
        for left in path.parent.glob(f".{path.name}.*"):  # by one that was killed
            left.unlink()
        stage = path.with_name(f".{path.name}.{secrets.token_hex(4)}").absolute()
        MlflowClient(tracking_uri=f"sqlite:///{stage}")
        stage.rename(path)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """One process at a time, where the file system has locks; the directory itself is locked, and no file is left."""
    fd = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
