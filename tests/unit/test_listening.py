"""Where sockets of ours listen, and who gets an answer."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess

import pytest

from distributed.launching import listening
from distributed.launching.listening import is_own_peer, listen_at


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


def own_address() -> str:
    """The address of this machine on the way to others, or "" where it has none. Nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))
        return str(probe.getsockname()[0])
    return ""


OWN_ADDRESS = own_address()
needs_own_address = pytest.mark.skipif(not OWN_ADDRESS, reason="this machine has no address but loopback")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
LOOPBACK = ("127.0.0.1", "127.0.0.2", *(["::1"] if has_ipv6() else []))
needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 on its loopback interface")


def test_it_listens_at_the_address_of_the_host_alone() -> None:
    for host in ("localhost", "127.0.0.1"):
        with listen_at(host, 0) as listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")


def reached(listener: socket.socket) -> set[str]:
    """The addresses of this machine at which `listener` is reached."""
    listener.listen()
    port, found = listener.getsockname()[1], set()
    for address in LOOPBACK:
        with contextlib.suppress(OSError), socket.create_connection((address, port), timeout=5):
            found.add(address)
    return found


@needs_ipv6
def test_an_ipv6_address_is_listened_at_alone() -> None:
    with listen_at("::1", 0) as listener:
        assert reached(listener) == {"::1"}


@pytest.mark.parametrize("where", [("127.0.1.1", 0), pytest.param(("::1", 0, 0, 0), marks=needs_ipv6)])
def test_a_name_that_is_loopback_only_here_is_listened_for_everywhere_where_others_come(
    where: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    family = socket.AF_INET6 if ":" in where[0] else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", where)]
    with monkeypatch.context() as patch:
        patch.setattr(listening.socket, "getaddrinfo", lambda *a, **k: found)
        everywhere, alone = listen_at("node0", 0), listen_at("node0", 0, is_alone=True)
    with everywhere, alone:
        assert reached(everywhere) == set(LOOPBACK)
        assert alone.getsockname()[0] == where[0]


@pytest.mark.parametrize("address", ["198.51.100.1", pytest.param("2001:db8::1", marks=needs_ipv6)])
def test_an_address_of_no_interface_is_one_that_is_translated(address: str) -> None:
    with listen_at(address, 0) as listener:  # of RFC 5737 and RFC 3849: never anybody's
        assert reached(listener) == set(LOOPBACK)


def test_a_taken_port_is_not_opened_elsewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", taken.getsockname()[1])


ADDRESSES = [
    pytest.param("127.0.0.1", "127.0.0.1", id="loopback"),
    pytest.param("::", "127.0.0.1", id="all interfaces", marks=needs_ipv6),
    pytest.param("::1", "::1", id="ipv6", marks=needs_ipv6),
    pytest.param("0.0.0.0", OWN_ADDRESS, id="address of the machine", marks=needs_own_address),
]


@pytest.mark.parametrize(("bound", "address"), ADDRESSES)
def test_processes_of_this_user_are_own_peers(bound: str, address: str) -> None:
    with _server(bound) as server, socket.create_connection((address, server.getsockname()[1])):
        connection, _ = server.accept()
        with connection:
            assert is_own_peer(connection)


@needs_root
@pytest.mark.parametrize(("bound", "address"), ADDRESSES)
def test_processes_of_other_users_are_not(bound: str, address: str) -> None:
    with _server(bound) as server, stranger(address, server, "read -t 60 <&3") as process:
        connection, _ = server.accept()
        with connection:
            assert not is_own_peer(connection)
        process.wait(60)


@needs_root
@pytest.mark.parametrize(("bound", "address"), ADDRESSES)
def test_another_user_that_has_closed_its_end_is_none(bound: str, address: str) -> None:
    """The socket that it left belongs to root."""
    with _server(bound) as server, stranger(address, server, "printf 'GET / HTTP/1.0\\r\\n\\r\\n' >&3") as process:
        process.wait(60)
        connection, _ = server.accept()
        with connection:
            assert connection.recv(100).startswith(b"GET") and not is_own_peer(connection)


def _server(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, dualstack_ipv6=address == "::")


def stranger(address: str, server: socket.socket, then: str) -> subprocess.Popen[bytes]:
    """A process of the user nobody that connects to `server` and does `then`, in the words of bash."""
    command = f"exec 3<>/dev/tcp/{address}/{server.getsockname()[1]}; {then}"
    return subprocess.Popen(["/bin/bash", "-c", command], user=65534, group=65534, cwd="/")
