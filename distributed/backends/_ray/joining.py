"""Joining an existing cluster, where Ray's client alone may wait for minutes or for ever."""

from __future__ import annotations

import importlib
import threading
import time
from typing import Any

_TRIES = 10  # of which one in five may fail, on a busy head
_SERVER_S = 45.0  # for the process that serves this client to come up; a head itself gives up after 30
_LAST_WORDS_S = 1.0  # for a connection that failed to end by itself


def join(ray: Any, address: str, **settings: Any) -> None:
    """`ray.init` for the cluster at `address`. Raises ConnectionError.

    The server of ray:// forks a process for each client. Now and then that dies at once or never comes up (ray issue 63202:
    gRPC's handlers in a fork); another try gets another process. A head under GRPC_ENABLE_FORK_SUPPORT=0 does not have this.
    """
    if not address.startswith("ray://"):
        ray.init(address, **settings)
        return
    for _ in range(_TRIES):
        watch = _Watch()
        try:
            ray.init(address, **settings)
            return
        except ConnectionError as error:
            if not (watch.has_cut or isinstance(error, ConnectionAbortedError)):
                raise
        finally:
            watch.end()
    raise ConnectionError(
        f"{_TRIES} times it had no process for this client: ray_client_server.err in the logs of its head says why"
    )


class _Watch:
    """Closes the connection of Ray's client once it is in vain: without a process for it there the client waits for an answer,
    and where it is told so, still for the log of that process."""

    def __init__(self) -> None:
        self.has_cut = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="patience with Ray", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """The connection stands or has failed."""
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        client = importlib.import_module("ray.util.client").ray
        deadline = None
        while not self._is_over.wait(0.1):
            worker, now = client.get_context().client_worker, time.monotonic()
            if worker is None:  # the head has not answered yet: Ray itself gives that up
                continue
            if deadline is None:
                deadline = now + _SERVER_S
            if not client.is_connected():
                deadline = min(deadline, now + _LAST_WORDS_S)
            if now > deadline and worker.channel is not None:
                self.has_cut = True
                worker.channel.close()
                return
