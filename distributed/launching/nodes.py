"""Addresses of the nodes of a run: where the workers of each node listen for those of the other nodes.

Workaround (torch 2.13, pytorch/pytorch#8664; may go when gloo chooses its address by the route to the other ranks): gloo listens at
the address that the host name resolves to. On Debian this is a loopback address (127.0.1.1 in /etc/hosts), which no other machine can
reach. On a machine with several networks, the address may be in a network that the other nodes are not in.
"""

from __future__ import annotations

import array
import contextlib
import dataclasses
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.launching.listening import is_loopback, loopback_interface, reachable_address

_SIOCGIFCONF = 0x8912  # Linux's ioctl that lists the IPv4 addresses of all interfaces
_ENTRY = struct.Struct("16s4x4s16x")  # struct ifreq on 64 bits: a name, and the address in a sockaddr_in
_MAX_ENTRIES = 1024
_MOST_NAMED = 8  # nodes in a line
_RETRY_S = 0.5  # seconds between two lookups of a name


@dataclasses.dataclass(frozen=True)
class Node:
    """Addresses of a node, as the node sends them to the other nodes."""

    name: str  # host name
    listens_at: str | None  # the address that the host name resolves to on the node itself; None if it resolves to none
    address: str | None  # the node's address on the route to `master_addr`; None if there is no route

    def to_dict(self) -> dict[str, str | None]:
        """Return the fields as a dictionary that can be converted to JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> Node:
        """Return the node that `to_dict` described, or raise TypeError."""
        name, listens_at, address = (content.get(field) for field in ("name", "listens_at", "address"))
        if not all(isinstance(each, str | None) for each in (listens_at, address)):
            raise TypeError("an address is a text")
        return cls(str(name), listens_at, address)

    @property
    def is_unreachable_by_name(self) -> bool:
        """True if a socket that listens at the address of the host name can be reached from the node itself only."""
        return self.listens_at is None or is_loopback(self.listens_at)


def this_node(master_addr: str) -> Node:
    """Return the addresses of this node for the other nodes."""
    name = socket.gethostname()
    address = None
    with contextlib.suppress(OSError):
        address = reachable_address(master_addr)
    return Node(name, _address_of_name(name), address)


def wait_for_name(host: str, seconds: float, notice: Callable[[str], None]) -> bool:
    """Wait until `host` resolves to an address, and return whether it did within `seconds`. Show a notice if it must wait."""
    deadline, is_shown = time.monotonic() + seconds, False
    while True:
        with contextlib.suppress(socket.gaierror):
            socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            return True
        if time.monotonic() >= deadline:
            return False
        if not is_shown:
            notice(f"waiting for an address of node 0 ({host})")
            is_shown = True
        time.sleep(_RETRY_S)


def numbered(nodes: Mapping[int, Node]) -> list[Node]:
    """Return the nodes in a list whose index is the node rank. A missing rank gets a node that passes all checks."""
    if not nodes:
        return []
    first = next(iter(nodes.values()))
    absent = Node("", "0.0.0.0", first.address)  # nothing listens at this address
    return [nodes.get(rank, absent) for rank in range(max(nodes) + 1)]


def names_of(nodes: Mapping[int, str]) -> str:
    """Return the node ranks with the names of the nodes in one line, such as "nodes: 0 (host-a), 1 (host-b)"."""
    named = [f"{rank} ({name})" for rank, name in sorted(nodes.items())]
    more = len(named) - _MOST_NAMED
    return f"nodes: {', '.join(named[:_MOST_NAMED])}" + (f" and {more} more" if more > 0 else "")


def are_one_machine(nodes: Sequence[Node]) -> bool:
    """Return whether all `nodes` are on one machine, as in a test of a start with several nodes."""
    return len({node.address for node in nodes}) == 1


def own_address(nodes: Sequence[Node], rank: int) -> str | None:
    """Return the address at which the other nodes reach this node, or None if it is not known. `rank` is this node's rank.

    On node 0, `master_addr` may resolve to a loopback address. In this case, return the address on the route to another node.
    """
    own = nodes[rank].address
    if own is not None and not is_loopback(own):
        return own
    for other in nodes:
        if other.address is not None and not is_loopback(other.address):
            with contextlib.suppress(OSError):
                return reachable_address(other.address)
    return None


def interface_environ(nodes: Sequence[Node], rank: int) -> dict[str, str]:
    """Return the variables that make gloo and NCCL listen at an interface that the other nodes reach. `rank` is this node's rank.

    Return no variables if gloo listens there anyway, if all nodes are on one machine, or if the user has set gloo's interface.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or are_one_machine(nodes):
        return {}
    address, by_name = own_address(nodes, rank), nodes[rank].listens_at
    interface = None if address is None else interface_of(address)
    chosen_by_gloo = None if by_name is None else interface_of(by_name)
    if interface is None or interface in (loopback_interface(), chosen_by_gloo):
        return {}
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME", interface)}


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
        ifconf = struct.pack("iL", len(buffer), buffer.buffer_info()[0])
        (size,) = struct.unpack_from("i", fcntl.ioctl(probe, _SIOCGIFCONF, ifconf))
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
