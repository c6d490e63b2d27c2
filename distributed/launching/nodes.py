"""Addresses of the nodes of a run: where the workers of each one listen for those of the others.

Torch's gloo listens at the address that the host name resolves to. On Debian that is a loopback address (127.0.1.1 in /etc/hosts),
which no other machine reaches.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributed.launching.listening import is_loopback, loopback_interface, reachable_address

_SIOCGIFCONF = 0x8912  # of Linux: the IPv4 addresses of all interfaces
_ENTRY = struct.Struct("16s4x4s16x")  # struct ifreq on 64 bits: a name, and the address in a sockaddr_in
_MAX_ENTRIES = 1024


@dataclasses.dataclass(frozen=True)
class Node:
    """Addresses of a node, as it tells them to the others."""

    name: str  # its host name
    listens_at: str | None  # the address that the host name resolves to on the node itself; None if it resolves to none
    address: str | None  # its address on the route to `master_addr`; None if there is no route

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, content: bytes) -> Node:
        """Return the node that `to_json` wrote. Raises ValueError, TypeError, AttributeError or RecursionError for anything else."""
        name, listens_at, address = (json.loads(content).get(field) for field in ("name", "listens_at", "address"))
        if not all(isinstance(each, str | None) for each in (listens_at, address)):
            raise TypeError("an address is a text")
        return cls(str(name), listens_at, address)

    @property
    def is_unreachable_by_name(self) -> bool:
        """True if what listens at the address of the host name is reached from this node only."""
        return self.listens_at is None or is_loopback(self.listens_at)


def this_node(master_addr: str) -> Node:
    """Return what the others must know of this node."""
    name = socket.gethostname()
    address = None
    with contextlib.suppress(OSError):
        address = reachable_address(master_addr)
    return Node(name, _address_of_name(name), address)


def are_one_machine(nodes: Sequence[Node]) -> bool:
    """Return whether all `nodes` run on one machine, as in a rehearsal."""
    return len({node.address for node in nodes}) == 1


def own_address(nodes: Sequence[Node], rank: int) -> str | None:
    """Return the address at which the other nodes reach the node `rank`, which is this one, or None if it is not known.

    Node 0 may know `master_addr` as a loopback address only. The way to another node then tells its address.
    """
    own = nodes[rank].address
    if own is not None and not is_loopback(own):
        return own
    for other in nodes:
        if other.address is not None and not is_loopback(other.address):
            with contextlib.suppress(OSError):
                return reachable_address(other.address)
    return None


def gloo_environ(nodes: Sequence[Node], rank: int) -> dict[str, str]:
    """Return the variables that make torch's gloo on node `rank`, which is this one, listen where the other nodes reach it.

    Empty if the host name leads there already, if all nodes are one machine, or if the user has set the interface.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or are_one_machine(nodes) or not nodes[rank].is_unreachable_by_name:
        return {}
    address = own_address(nodes, rank)
    interface = None if address is None else interface_of(address)
    return {"GLOO_SOCKET_IFNAME": interface} if interface not in (None, loopback_interface()) else {}


def interface_of(address: str) -> str | None:
    """Return the name of the interface that has `address`, or None if none has it or the system is not Linux."""
    wanted, _, zone = address.partition("%")
    if zone:
        return zone
    with contextlib.suppress(OSError):
        return next((name for name, found in _addresses() if found == wanted), None)
    return None


def _addresses() -> Iterator[tuple[str, str]]:
    """Yield (interface, address) for each address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        buffer = array.array("B", bytes(_MAX_ENTRIES * _ENTRY.size))
        order = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        (size,) = struct.unpack_from("i", fcntl.ioctl(probe, _SIOCGIFCONF, order))
    for label, packed in _ENTRY.iter_unpack(buffer.tobytes()[:size]):
        yield label.partition(b"\0")[0].decode(), socket.inet_ntoa(packed)
    for line in Path("/proc/net/if_inet6").read_text().splitlines():
        digits, *_, name = line.split()
        yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))


def _address_of_name(name: str) -> str | None:
    """Return the first address that `name` resolves to and that this machine has. Gloo chooses the same one."""
    with contextlib.suppress(OSError):
        for family, kind, protocol, _, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
                return str(where[0])
    return None
