"""How Horovod's workers find each other over Gloo: a small HTTP server and some environment variables.

Not in the workers alone: a script that calls `hvd.init()` itself must find the variables set, so our launcher serves it, anew
for each attempt (a restarted worker would read the addresses of the dead). Loads no framework.
"""

from __future__ import annotations

import os
import socket
from typing import Any

from distributed.launching.environment import WorkerEnvironment

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


class Rendezvous:
    """The server of one launch."""

    def __init__(self) -> None:
        self._server: Any = None

    def open(self) -> int:
        """Serve a new attempt; returns the port."""
        from horovod.runner.http.http_server import RendezvousServer

        self.close()
        server = RendezvousServer()
        port: int = server.start()
        self._server = server
        return port

    def close(self) -> None:
        """Stop serving."""
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            server._httpd.server_close()  # which `stop` leaves listening

    @staticmethod
    def environ(place: WorkerEnvironment, opened: int) -> dict[str, str]:
        """What `horovodrun --gloo` gives to its worker at `place`, where the server listens on the port `opened`."""
        num_nodes = place.world_size // place.local_world_size
        variables = {
            "HOROVOD_RANK": place.rank,
            "HOROVOD_SIZE": place.world_size,
            "HOROVOD_LOCAL_RANK": place.local_rank,
            "HOROVOD_LOCAL_SIZE": place.local_world_size,
            "HOROVOD_CROSS_RANK": place.node_rank,
            "HOROVOD_CROSS_SIZE": num_nodes,
            "HOROVOD_HOSTNAME": f"node-{place.node_rank}",  # a name for the ranks of one node, which nobody looks up
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_LOG_LEVEL": os.environ.get("HOROVOD_LOG_LEVEL", "fatal"),  # its errors come as exceptions
            ADDRESS: place.master_addr,
            PORT: opened,
        }
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or (_loopback() if num_nodes == 1 else None)
        if interface:
            variables["HOROVOD_GLOO_IFACE"] = interface
        return {name: str(value) for name, value in variables.items()}


def _loopback() -> str | None:
    """Else Gloo takes the address of the host's name, which need not be reachable or even known."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
