"""Sockets that listen on one interface, and the check that a connection comes from a process of this user."""

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
    """Return a socket bound to `port` on the interface that has the address of `host`.

    The socket is bound on all interfaces if no interface has this address (behind network address translation), or if `host` is
    a name that resolves to loopback: other machines may resolve the name to another address (Debian's /etc/hosts). With
    `is_alone`, which means that there is no other node, such a name is bound to loopback, as localhost always is.

    `family` limits the addresses of `host` to IPv4 or IPv6. Raises OSError if the port is taken or `host` is not known.
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


def may_listen_at(host: str, port: int) -> bool:
    """Return whether `host` is this machine, and nobody listens at the port yet. Raises OSError if `host` is not known."""
    if not is_own_host(host):
        return False
    try:
        listen_at(host, port).close()
    except OSError as error:
        return error.errno != errno.EADDRINUSE
    return True


def is_own_host(host: str) -> bool:
    """Return whether `host` is this machine. Raises OSError if `host` is not known."""
    found, _, _, _, where = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    return _is_of_this_machine(found, where)


def is_loopback(address: str) -> bool:
    """Return whether `address` belongs to the loopback interface."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def reachable_address(target: str | None) -> str:
    """Return the address of this machine on the route to the host `target`, or 127.0.0.1 if `target` is None."""
    if target is None:
        return "127.0.0.1"
    family, kind, _, _, where = socket.getaddrinfo(target, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:  # connecting a UDP socket sends nothing
        probe.connect(where)
        address: str = probe.getsockname()[0]
        return address


def loopback_interface() -> str | None:
    """Return the name of the loopback interface, or None if this machine has none."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)


def loopback_environ() -> dict[str, str]:
    """Return the variables that make the workers of one node communicate over loopback, unless the user has set them.

    Workaround (torch 2.13, pytorch/pytorch#8664; may go when gloo chooses its address by the route to the other ranks): without
    these variables, gloo listens at the address that the host name resolves to.
    """
    name = loopback_interface()
    return {"GLOO_SOCKET_IFNAME": name} if name and "GLOO_SOCKET_IFNAME" not in os.environ else {}


def is_own_peer(connection: socket.socket) -> bool:
    """Return whether the process at the other end of a TCP connection belongs to this user or to root.

    Also return True if that process is on another machine, because its user cannot be determined. Return False if the other end
    is closed, because its user is then not known.
    """
    peer, here = connection.getpeername(), connection.getsockname()
    if not _is_of_this_machine(connection.family, peer):
        return True
    owners = {owner for local, remote, owner in _connections() if local == peer[1] and remote == here[1]}
    return owners <= {os.getuid(), 0} and bool(owners)


def _connections() -> Iterator[tuple[int, int, int]]:
    """Yield (local port, remote port, user id) of each established TCP connection of this machine."""
    for table in filter(Path.exists, map(Path, _TABLES)):
        for line in table.read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] != _ESTABLISHED:  # Linux lists root as the owner of a socket that its process has closed
                continue
            yield _port(fields[1]), _port(fields[2]), int(fields[7])


def _is_of_this_machine(family: int, where: tuple[Any, ...]) -> bool:
    """Return whether an interface of this machine has the address in `where`: only then can a socket be bound to it."""
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
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # let "::" accept IPv4 connections
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)  # type: ignore[arg-type]
    except OSError:
        listener.close()
        raise
    return listener
