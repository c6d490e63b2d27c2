"""What a launcher says when a signal stops its run, and how the run can go on."""

from __future__ import annotations

import io
import json
import signal
import socket
import threading
import types

import pytest

from distributed.backends._ray.launch import _Launch
from distributed.backends._ray.rendezvous import RendezvousServer
from distributed.launching.forkserver import ForkServer
from distributed.launching.request import LaunchRequest
from distributed.launching.stopping import Signals, Stop
from distributed.launching.verdicts import Verdicts
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory
from distributed.runs.summary import write_result


@pytest.fixture
def run(tmp_path):
    (tmp_path / "run").mkdir()
    return RunDirectory(tmp_path / "run")


def verdicts(run, screen, **more):
    return Verdicts(LaunchRequest(str(run.path), script="train.py", **more), run, Display(screen, live=False))


@pytest.mark.parametrize(
    ("is_starting", "results", "said"),
    [
        (True, {}, "SIGINT: stopping the start\n"),
        (True, {"result.json": "running"}, "SIGINT: stopping the start\n"),  # of an attempt that was restarted
        (False, {"result.json": "running"}, "SIGINT: stopping after this step\n"),
        (False, {"result.json": "finished", "fit-2/result.json": "running"}, "SIGINT: stopping after this step\n"),
        (False, {"result.json": "finished"}, "SIGINT: stopping the workers\n"),  # a script that has more to do
        (False, {}, "SIGINT: stopping the workers\n"),
    ],
)
def test_a_stop_says_what_it_ends(run, is_starting, results, said):
    for name, status in results.items():
        (run.path / name).parent.mkdir(exist_ok=True)
        write_result(run.path / name, {"status": status})
    screen = io.StringIO()
    verdicts(run, screen).add(
        {"op": "stop", "signum": signal.SIGINT, "is_first": True, "interrupts": 1, "is_starting": is_starting}
    )
    assert screen.getvalue() == said


@pytest.mark.parametrize(("num_begun", "is_starting"), [(0, True), (1, True), (2, False), (3, True), (4, False)])
def test_the_launcher_says_whether_workers_are_still_missing(run, num_begun, is_starting):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = ForkServer(LaunchRequest(str(run.path), nproc_per_node=2), ours, 0, Signals())
        server._num_begun = num_begun
        server._take_signal(signal.SIGINT)
        assert json.loads(theirs.recv(4096))["is_starting"] is is_starting


@pytest.mark.parametrize("is_starting", [True, False])
def test_the_launcher_over_ray_says_whether_workers_are_still_missing(is_starting):
    told = []
    with Signals() as signals:
        server = object.__new__(RendezvousServer)
        server._signals, server._stop, server._lock = signals, Stop(10.0), threading.RLock()
        server._send, server._add_news = lambda **message: told.append(message), lambda news: None
        server._joined = {} if is_starting else {0: types.SimpleNamespace(send=lambda **_: None)}
        signal.raise_signal(signal.SIGINT)
        server._read_signals(None)
    assert told[0]["is_starting"] is is_starting


def test_a_start_over_ray_that_was_stopped_shows_how_to_go_on(run):
    screen, launch = io.StringIO(), object.__new__(_Launch)
    launch._run, launch._error, launch._stop = run, None, Stop(1.0)
    launch._verdicts = verdicts(run, screen, again="python -m distributed.cli train --resume")
    launch._stop.add(signal.SIGINT)
    assert launch._never_begun() == 130
    assert screen.getvalue() == "to continue it:\n  python -m distributed.cli train --resume\n"
