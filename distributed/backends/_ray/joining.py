"""Find an existing cluster, and join it within time limits.

Workaround (Ray 2.60, no upstream issue known; may go when `ray.init` and Ray's client have time limits): both may wait
for minutes or for ever.

A local cluster is found in /proc, without psutil: the package does not depend on it (see `runs.processes`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

_TRIES = 10  # on a busy head one attempt in five may fail
_SERVER_S = 45.0  # time for the process that serves this client to start; the head itself gives up after 30 s
_ADDRESS_CHARACTERS = 1000
_LAST_WORDS_S = 1.0  # time for a failed connection to close by itself


def connected() -> str | None:
    """Return the cluster that the caller is connected to, or the one in RAY_ADDRESS, or None."""
    client = sys.modules.get("ray.util.client")
    # Workaround (Ray 2.60, no upstream issue known; may go when Ray has a public name for the client's address): the
    # client may not reach the cluster's own address.
    if client is not None and client.ray.is_connected():
        return f"ray://{client.ray.get_context().client_worker._conn_str}"
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        address: str = ray.get_runtime_context().gcs_address
        return address
    from_environ = os.environ.get("RAY_ADDRESS")
    return from_environ if from_environ and from_environ != "local" else None


def join(ray: Any, address: str, **settings: Any) -> None:
    """Call `ray.init` for the cluster at `address`. Raises ConnectionError.

    Workaround (Ray 2.60, ray-project/ray#63202; the tries may go when the oldest supported Ray has that issue fixed):
    the server of ray:// forks a process for each client. Sometimes that process dies at once or never comes up, because
    of gRPC's handlers in a fork, so we try again with a new process. A head under GRPC_ENABLE_FORK_SUPPORT=0 does not
    have the problem.
    """
    if not address.startswith("ray://"):
        ray.init(_own_cluster() if address == "auto" else address, **settings)
        return
    for _ in range(_TRIES):
        watch = _ConnectionWatch()
        try:
            ray.init(address, **settings)
            return
        except ConnectionError as error:
            if not (watch.has_cut or isinstance(error, ConnectionAbortedError)):
                raise
        finally:
            watch.end()
    raise ConnectionError(
        f"{_TRIES} times the cluster started no process for this client: ray_client_server.err in the logs of its head shows why"
    )


def _own_cluster() -> str:
    """Return the address that `auto` means: that of a cluster which this user or root started on this machine.

    Workaround (Ray 2.60, no upstream issue known; may go when Ray checks the owner): Ray accepts a cluster that any
    user's process or file names, and unpickles its answers. Raises ConnectionError if there is none.
    """
    if (from_environ := os.environ.get("RAY_ADDRESS", "auto")) != "auto":
        return from_environ
    running = {address for pid in _pids() if (address := _address_of(pid)) is not None}
    written = _written_address()
    if len(running) == 1 or (running and written not in running):
        return min(running)
    if written is None:
        raise ConnectionError("Could not find any running Ray instance that this user or root has started.")
    return written


def _pids() -> list[Path]:
    return [entry for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _address_of(process: Path) -> str | None:
    """Return the head's address from the command line of `process`, or None if it is not a raylet of this user or
    root."""
    with contextlib.suppress(OSError):
        words = process.joinpath("cmdline").read_text(errors="replace").split("\0")
        if Path(words[0]).name.startswith("raylet") and process.stat().st_uid in (0, os.geteuid()):
            return next((word.partition("=")[2] for word in words if word.startswith("--gcs-address=")), None)
    return None


def _written_address() -> str | None:
    """Return the address that `ray start` wrote, unless another user could have written it: Ray's directory is open
    to all users."""
    directory = os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "/tmp"
    with contextlib.suppress(OSError):
        fd = os.open(Path(directory, "ray", "ray_current_cluster"), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(fd, encoding="utf-8", errors="replace") as file:
            found = os.fstat(fd)
            if found.st_uid in (0, os.geteuid()) and not found.st_mode & 0o022:
                return file.read(_ADDRESS_CHARACTERS).strip() or None
    return None


class _ConnectionWatch:
    """Close the connection of Ray's client when no answer can be expected any more.

    Workaround (Ray 2.60, no upstream issue known; may go when Ray's client has a time limit for this): if the server
    has no process for the client, the client waits for an answer; after an error it still waits for the log of that
    process.
    """

    def __init__(self) -> None:
        self.has_cut = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="patience with Ray", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop watching. Called when the connection is established or has failed."""
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        """Close the client's connection when it has waited too long. Runs in the watching thread."""
        client = importlib.import_module("ray.util.client").ray
        deadline = None
        while not self._is_over.wait(0.1):
            worker, now = client.get_context().client_worker, time.monotonic()
            if worker is None:  # the head has not answered yet; Ray has a time limit for that
                continue
            if deadline is None:
                deadline = now + _SERVER_S
            if not client.is_connected():
                deadline = min(deadline, now + _LAST_WORDS_S)
            if now > deadline and worker.channel is not None:
                self.has_cut = True
                worker.channel.close()
                return
