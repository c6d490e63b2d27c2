"""Clusters of Ray, which tests start on machines that other tests keep busy.

Workaround (Ray 2.60, ray-project/ray#65983; the tries may go when Ray waits for its own services as long as they need): on a busy
machine Ray gives up a start whose services need more than 30 s. Such a start is tried again.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.conftest import Started, clean_environment, free_port, patient, poll

RAY = str(Path(sys.executable).with_name("ray"))
# What a test says on both sides of a cluster: no token, no statistics, and more time for its services to start.
OPEN = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "RAY_raylet_start_wait_time_s": "60"}
_TOO_SLOW = "timed out during startup"
T = TypeVar("T")


def _tried(attempt: Callable[[], T]) -> T:
    """Return what `attempt` returns, at its third try at the latest if Ray was too slow."""
    for is_last in (False, False, True):
        try:
            return attempt()
        except (Exception, pytest.fail.Exception) as error:  # Ray raises no subclass here, so the text tells
            if is_last or _TOO_SLOW not in str(error):
                raise
    raise AssertionError("the last try returns or raises")


def init(directory: Path | str, **settings: Any) -> None:
    """Start a cluster in this process with `ray.init`, with its files in `directory`, whose path must be short."""
    import ray

    _tried(lambda: ray.init(
        "local", include_dashboard=False, log_to_driver=False, logging_level="ERROR", object_store_memory=10**8,
        _temp_dir=str(directory), **settings,
    ))  # fmt: skip


def start(begin: Callable[[], Started], started: str = "Ray runtime started") -> Started:
    """Start a command with `begin` that starts a node of Ray, and wait until it says `started`."""

    def attempt() -> Started:
        node = begin()
        try:
            node.wait_for(started, patient(150))  # an error holds the output
        except pytest.fail.Exception:
            node.kill()
            raise
        return node

    return _tried(attempt)


@contextlib.contextmanager
def head(output: Path, *flags: str, client_port: int | None = None, **environ: str) -> Iterator[str]:
    """Start a cluster of one node, which listens on 127.0.0.1, and yield its address. Its output goes to the directory `output`.

    With `client_port`, it also waits for the client server.
    """
    port, server = free_port(), [] if client_port is None else [f"--ray-client-server-port={client_port}"]
    with tempfile.TemporaryDirectory(prefix="head-") as temporary:  # short: sockets lie in it
        command = [
            RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", *server,
            "--object-store-memory=100000000", f"--temp-dir={temporary}", *flags,
        ]  # fmt: skip
        node = start(lambda: Started(command, output, None, clean_environment(**{**OPEN, **environ})))
        try:
            if client_port is not None:  # it comes later
                poll(lambda: _listens(client_port), 60, lambda: f"no client server\n{node.output}")
            yield f"127.0.0.1:{port}"
        finally:
            node.kill()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
