"""Sockets that listen: on the interface that the others use, and for this user's processes alone where that can be known."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_ESTABLISHED = "01"


def listen_at(host: str, port: int, *, is_alone: bool = False, family: int = socket.AF_UNSPEC) -> socket.socket:
    """Return a socket bound to `port` on the interface that has the address of `host`, and on all where none has it.

    None has it behind a translation of addresses. A name that means the loopback interface on this machine can mean another
    one elsewhere (Debian's /etc/hosts), so that counts only for localhost itself, or where this node `is_alone`.
    Raises OSError where the port is taken or `host` is not known.
    """
    found, kind, protocol, _, where = socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)[0]
    if is_alone or host in ("localhost", where[0]) or not is_loopback(str(where[0])):
        try:
            return _bound(found, kind, protocol, where)
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    if family == socket.AF_UNSPEC:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    return _bound(family, socket.SOCK_STREAM, 0, ("", port))


def is_loopback(address: str) -> bool:
    """Return whether only processes of this machine reach `address`."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable_address(target: str | None) -> str:
    """Return the address of this machine under which the host `target` reaches it, or loopback's if `target` is None."""
    if target is None:
        return "127.0.0.1"
    family, kind, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # sends nothing
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, or None where there is none."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def loopback_environ() -> dict[str, str]:
    """Return the variables with which the workers of one node talk over loopback, where the user did not set them.

    By itself Gloo listens at the address of the host's name.
    """
    name = loopback_interface()
    return {"GLOO_SOCKET_IFNAME": name} if name and "GLOO_SOCKET_IFNAME" not in os.environ else {}


def is_own_peer(connection: socket.socket) -> bool:
    """Return whether a process of this user, or of root, is at the other end of a TCP connection within this machine.

    True of connections from other machines too: who is there cannot be known.
    """
    peer, here = connection.getpeername(), connection.getsockname()
    if not _is_of_this_machine(connection.family, peer):
        return True
    owners = {owner for local, remote, owner in _connections() if local == peer[1] and remote == here[1]}
    return owners <= {os.getuid(), 0} and bool(owners)


def _connections() -> Iterator[tuple[int, int, int]]:
    """The (local port, remote port, user) of each TCP connection that Linux lists."""
    for table in filter(Path.exists, map(Path, _TABLES)):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != _ESTABLISHED:  # a connection that is closed at one end counts as root's
                continue
            yield _port(fields[1]), _port(fields[2]), int(fields[7])


def _is_of_this_machine(family: int, where: tuple[Any, ...]) -> bool:
    """Return whether an interface of this machine has the address in `where`: no socket can be bound to another one."""
    host, _, *rest = where
    try:
        _bound(family, socket.SOCK_STREAM, 0, (host, 0, *rest)).close()
    except OSError:
        return False
    return True


def _port(address: str) -> int:
    return int(address.rpartition(":")[2], 16)


def _bound(family: int, kind: int, protocol: int, where: object) -> socket.socket:
    listener = socket.socket(family, kind, protocol)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # "::" is reached over IPv4 too
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)  # type: ignore[arg-type]
    except OSError:
        listener.close()
        raise
    return listener
