"""Run the rendezvous of Horovod's workers over Gloo: a small HTTP server and some environment variables.

The launcher runs the server, because a script that calls `hvd.init()` itself needs the variables before it starts. Each
attempt gets a new server, because a restarted worker would otherwise read the addresses of dead workers. Imports no
framework.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from typing import Any

from distributed.errors import ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.listening import is_loopback, is_own_peer, listen_at, loopback_interface
from distributed.launching.nodes import Node, are_one_machine

ADDRESS, PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"


class Rendezvous:
    """The server of one launch."""

    def __init__(self) -> None:
        self._server: Any = None

    def open(self, host: str, *, is_alone: bool) -> int:
        """Start a server for a new attempt at the address of `host`, where the workers connect, and return its port.

        With `is_alone`, which means that all workers are on this node, only processes of this user get an answer.
        """
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        try:
            listener = listen_at(host, 0, is_alone=is_alone, family=socket.AF_INET)
        except socket.gaierror as error:
            raise ResourceError(
                f"Horovod's workers find each other over IPv4, and {host!r} has no IPv4 address ({error.strerror}): set"
                " master_addr, or MASTER_ADDR, to one of the machine of rank 0"
            ) from None

        class Server(RendezvousHTTPServer):  # type: ignore[misc]
            def server_bind(self) -> None:
                self.socket.close()  # type: ignore[has-type]  # one that is bound to nothing
                self.socket, self.server_address = listener, listener.getsockname()

            def verify_request(self, request: Any, client_address: Any) -> bool:
                return is_own_peer(request)

        self.close()
        server = Server(listener.getsockname(), RendezvousHandler, 0)
        threading.Thread(target=server.serve_forever, name="horovod-rendezvous", daemon=True).start()
        self._server = server
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Stop the server."""
        server, self._server = self._server, None
        if server is not None:
            server.shutdown()
            server.server_close()

    @staticmethod
    def check(nodes: Sequence[Node]) -> None:
        """Raise ResourceError if there are several machines and the host name of one does not resolve to its address.

        Workaround (Horovod 0.28.1, no upstream issue known; may go when process sets heed HOROVOD_GLOO_IFACE): Horovod
        gives it to its first Gloo context only. Those of its process sets, the global one too, listen at the address of
        the host name (GlooContext::InitializeForProcessSet in gloo_context.cc).
        """
        lost = [(rank, node) for rank, node in enumerate(nodes) if node.is_unreachable_by_name]
        if not lost or are_one_machine(nodes):
            return
        which = ", ".join(
            f"{node.name!r} resolves to {node.listens_at or 'none of its addresses'} on node {rank}"
            for rank, node in lost
        )
        lines = ", ".join(f"'{_address(node)} {node.name}' on node {rank}" for rank, node in lost)
        raise ResourceError(
            "Horovod's workers listen at the address of the host name, where the other nodes cannot reach them:"
            f" {which}. In /etc/hosts, replace the line of the host name by {lines}"
        )

    @staticmethod
    def environ(environment: WorkerEnvironment, opened: int) -> dict[str, str]:
        """Return the variables that `horovodrun --gloo` sets for its worker in `environment`, for a server on the port
        `opened`."""
        num_nodes = environment.world_size // environment.local_world_size
        variables = {
            "HOROVOD_RANK": environment.rank,
            "HOROVOD_SIZE": environment.world_size,
            "HOROVOD_LOCAL_RANK": environment.local_rank,
            "HOROVOD_LOCAL_SIZE": environment.local_world_size,
            "HOROVOD_CROSS_RANK": environment.node_rank,
            "HOROVOD_CROSS_SIZE": num_nodes,
            # any name that the ranks of one node share; Horovod does not resolve it
            "HOROVOD_HOSTNAME": f"node-{environment.node_rank}",
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HOROVOD_LOG_LEVEL": os.environ.get("HOROVOD_LOG_LEVEL", "fatal"),  # errors become exceptions
            ADDRESS: environment.master_addr,
            PORT: opened,
        }
        # Without HOROVOD_GLOO_IFACE Gloo listens at the address of the host name, which may be unreachable or unknown.
        interface = os.environ.get("GLOO_SOCKET_IFNAME") or (loopback_interface() if num_nodes == 1 else None)
        if interface:
            variables["HOROVOD_GLOO_IFACE"] = interface
        return {name: str(value) for name, value in variables.items()}


def _address(node: Node) -> str:
    """Return the address to write before the name of `node` in /etc/hosts, or "ADDRESS" if it is not known."""
    return "ADDRESS" if node.address is None or is_loopback(node.address) else node.address
