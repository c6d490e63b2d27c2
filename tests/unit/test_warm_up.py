"""The launcher imports, for the workers of a restart, a backend that their script has chosen."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import signal
import socket
import subprocess

import pytest

from distributed.config.registry import REGISTRY
from distributed.launching.forkserver import ForkServer
from distributed.launching.heartbeat import Board
from distributed.launching.request import LaunchRequest
from distributed.launching.stopping import Signals

reported = []  # messages that the agent got during the import
running = {}  # the worker, and the agent's end of the channel


def import_slowly(request):
    """Let the worker end during the import, and wait for what the agent hears of it."""
    os.kill(running["worker"].pid, signal.SIGKILL)
    if select.select([running["channel"]], [], [], 20)[0]:
        reported.append(json.loads(running["channel"].recv(4096)))


@pytest.fixture
def server(tmp_path, monkeypatch):
    changed = dataclasses.replace(REGISTRY["deepspeed"], preload=(), warm_up="tests.unit.test_warm_up:import_slowly")
    monkeypatch.setitem(REGISTRY, "deepspeed", changed)
    reported.clear()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    agent, worker = (subprocess.Popen(["sleep", "60"]) for _ in range(2))
    running.update(worker=worker, channel=theirs)
    with ours, theirs, Signals() as signals:
        server = ForkServer(LaunchRequest(str(tmp_path)), ours, agent.pid, signals, Board(1))
        server._workers[worker.pid] = 3
        yield server
    for each in (agent, worker):
        each.kill()
        each.wait()


def test_the_agent_learns_at_once_of_a_worker_that_ends_during_the_import(server):
    running["channel"].send(json.dumps({"op": "warm up", "backend": "deepspeed"}).encode())
    assert server._take_order()
    (message,) = reported
    assert (message["op"], message["local_rank"], message["status"]) == ("exit", 3, -signal.SIGKILL)
    assert not server._workers


def test_nothing_is_imported_after_a_stop_signal(server):
    server._stop.add(signal.SIGTERM)
    server._warm_up("deepspeed")
    assert reported == [] and server._workers
