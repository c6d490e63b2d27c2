"""Where sockets of ours listen, and who gets an answer."""

from __future__ import annotations

import os
import socket
import subprocess

import pytest

from distributed.launching import listening
from distributed.launching.listening import is_own_peer, listen_at


def test_it_listens_at_the_address_of_the_host_alone() -> None:
    for host in ("localhost", "127.0.0.1"):
        with listen_at(host, 0) as listener:
            assert listener.getsockname()[0] in ("127.0.0.1", "::1")


@pytest.mark.parametrize(("is_alone", "expected"), [(False, "0.0.0.0"), (True, "127.0.1.1")])
def test_a_name_that_is_loopback_only_here_is_listened_for_everywhere_where_others_come(
    is_alone: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(listening.socket, "getaddrinfo", lambda *a, **k: found)
    with listen_at("node0", 0, is_alone=is_alone) as listener:
        assert listener.getsockname()[0] == expected


def test_an_address_of_no_interface_is_one_that_is_translated() -> None:
    with listen_at("192.0.2.1", 0) as listener:  # of RFC 5737: never anybody's
        assert listener.getsockname()[0] == "0.0.0.0"


def test_a_taken_port_is_not_opened_elsewhere() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        listen_at("127.0.0.1", taken.getsockname()[1])


def test_processes_of_this_user_are_own_peers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        connection, _ = server.accept()
        with connection:
            assert is_own_peer(connection)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start a process of another user")
def test_processes_of_other_users_are_not() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}; read -t 60 <&3"
        with subprocess.Popen(["/bin/bash", "-c", command], user=65534, group=65534, cwd="/") as stranger:
            connection, _ = server.accept()
            with connection:
                assert not is_own_peer(connection)
            stranger.wait(60)
