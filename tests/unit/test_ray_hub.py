"""Where the launcher over Ray and its workers meet, without Ray."""

from __future__ import annotations

import select
import socket
import threading

import pytest

from distributed.backends._ray.hub import STREAMS
from distributed.backends._ray.worker import _hand_in

pytestmark = pytest.mark.timeout(30)


# A hub of one worker lives as long as its process.
JOB = """
import os, queue, types
from distributed.backends._ray.hub import Hub, connect
from distributed.launching.stopping import Signals, Stop

begun = queue.Queue()
reports, _ = os.pipe()
with Signals() as signals:
    hub = Hub(1, signals, Stop(10.0), lambda **_: None, lambda guests: begun.put(list(guests)), lambda *_: None)
    hub.start(types.SimpleNamespace(reports=reports))
    for is_restart in (b"true", b"false"):
        guest = connect("127.0.0.1", hub.port, hub.token, {"rank": 0})
        assert begun.get(timeout=10) == [0]
        hub.dismiss(restart=is_restart == b"true")
        assert guest["orders"].recv(100) == b'{"op": "end", "restart": ' + is_restart + b"}\\n"
    late = connect("127.0.0.1", hub.port, hub.token, {"rank": 0})
    for each in late.values():
        each.settimeout(10)
        assert each.recv(100) == b""
    assert begun.empty()
    print("turned away", flush=True)
    os._exit(0)
"""


def test_whoever_ray_starts_after_the_end_is_turned_away(run_python):
    done = run_python(["-c", JOB])
    assert done.returncode == 0 and done.stdout == "turned away\n", done.output


BROKEN = """
import os, queue, types
from distributed.backends._ray.hub import Hub, connect
from distributed.launching.stopping import Signals, Stop

begun, said, told = queue.Queue(), queue.Queue(), queue.Queue()
reports, _ = os.pipe()
with Signals() as signals:
    note = lambda news, error=None: said.put((news, error))
    hub = Hub(1, signals, Stop(10.0), lambda **message: told.put(message), lambda guests: begun.put(guests), note)
    hub.start(types.SimpleNamespace(reports=reports))
    guest = connect("127.0.0.1", hub.port, hub.token, {"rank": 0})
    begun.get(timeout=10)
    guest["orders"].sendall(b"no JSON\\n")
    print(said.get(timeout=10))
    print(told.get(timeout=10)["status"], guest["orders"].recv(100), flush=True)
    hub._thread.join(10)
    os._exit(0)
"""


def test_an_exception_in_its_thread_ends_the_workers_and_is_seen(run_python):
    done = run_python(["-c", BROKEN])
    news, told = done.stdout.splitlines()
    assert news.startswith("('failed', 'the launcher cannot hear its workers any more (JSONDecodeError")
    assert told == """-9 b'{"op": "kill"}\\n'"""
    assert "Traceback" in done.stderr and "JSONDecodeError" in done.stderr


def test_the_end_is_said_when_the_output_has_been_read():
    pairs = {kind: socket.socketpair() for kind in ("orders", *STREAMS)}
    mine, launchers = ({kind: pair[side] for kind, pair in pairs.items()} for side in (0, 1))
    mine["control"].sendall(b"why")
    worker = threading.Thread(target=_hand_in, args=(mine, 1))
    worker.start()
    for kind in ("stdout", "stderr"):
        assert launchers[kind].recv(10) == b""
        launchers[kind].close()
    assert launchers["control"].recv(10) == b"why"
    assert select.select([launchers["orders"]], [], [], 0.3)[0] == []
    assert launchers["control"].recv(10) == b""
    launchers["control"].close()
    assert launchers["orders"].recv(100) == b'{"status": 1}\n'
    worker.join()
    for each in (*mine.values(), launchers["orders"]):
        each.close()
