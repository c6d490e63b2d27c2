"""The rendezvous of the launcher over Ray with its workers, without Ray."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import selectors
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distributed.backends._ray.hellos import gpus_beside, objection
from distributed.backends._ray.rendezvous import STREAMS, LauncherConnections, WorkerConnections, connect, seals
from distributed.backends._ray.worker import _report_end
from distributed.launching import seal
from distributed.launching import sealed_listener as listener_module
from distributed.launching.seal import Seal
from distributed.launching.sealed_listener import HELLO, SealedListener
from tests.conftest import poll

pytestmark = pytest.mark.timeout(30)


# A rendezvous server of one worker lives as long as its process.
JOB = """
import os, queue, types
from distributed.backends._ray.rendezvous import RendezvousServer, connect
from distributed.launching.stopping import Signals, Stop

begun = queue.Queue()
events, _ = os.pipe()
with Signals() as signals:
    server = RendezvousServer(signals, Stop(10.0), lambda **_: None, lambda workers: begun.put(list(workers)), lambda *_: None, lambda *_: None)
    server.listener.listen("127.0.0.1")
    server.listener.open()
    server.start(types.SimpleNamespace(events=events))
    for is_restart in (True, False):
        worker = connect("127.0.0.1", server.listener.port, server.token, {"rank": 0, "world_size": 1})
        assert begun.get(timeout=10) == [0]
        server.end_attempt(restart=is_restart)
        assert next(worker.read()) == {"op": "end", "restart": is_restart}
    late = connect("127.0.0.1", server.listener.port, server.token, {"rank": 0, "world_size": 1})
    for each in late.sockets.values():
        each.settimeout(10)
        assert each.recv(100) == b""
    assert begun.empty() and server.listener.num_refused == 0
    print("turned away", flush=True)
    os._exit(0)
"""


def test_whoever_ray_starts_after_the_end_is_turned_away(run_python):
    done = run_python(["-c", JOB])
    assert done.returncode == 0 and done.stdout == "turned away\n", done.output


CLOSED = """
import os, signal, threading, types
from distributed.backends._ray.rendezvous import RendezvousServer
from distributed.launching.stopping import Signals, Stop

events, _ = os.pipe()
with Signals() as signals:
    server = RendezvousServer(signals, Stop(10.0), lambda **_: None, lambda workers: None, lambda *_: None, lambda *_: None)
    select, has_seen = server._selector.select, threading.Event()

    def selected(timeout):
        ready = select(timeout)
        has_seen.set()
        return ready

    server._selector.select = selected
    server.start(types.SimpleNamespace(events=events))
    server._lock.acquire()
    os.kill(os.getpid(), signal.SIGCHLD)
    assert has_seen.wait(10)  # the thread knows of the signal, and waits for the lock
    server.close()
server._lock.release()
server._thread.join(10)
print("ended", not server._thread.is_alive())
"""


def test_a_signal_that_comes_last_is_not_read_from_a_descriptor_that_is_closed(run_python):
    done = run_python(["-c", CLOSED])
    assert done.stdout == "ended True\n" and done.stderr == "", done.output


SILENT = """
import errno, os, queue, time, types
from distributed.backends._ray.rendezvous import RendezvousServer, connect
from distributed.launching.stopping import Signals, Stop

begun, ends = queue.Queue(), queue.Queue()
events, _ = os.pipe()
with Signals() as signals:
    nothing = lambda *_: None
    server = RendezvousServer(signals, Stop(10.0), lambda **message: ends.put(message), lambda workers: begun.put(workers), nothing, nothing)
    server.listener.listen("127.0.0.1")
    server.listener.open()
    server.start(types.SimpleNamespace(events=events))
    for error in (errno.ETIMEDOUT, errno.ECONNRESET):
        here, *there = (
            connect("127.0.0.1", server.listener.port, server.token, {"rank": rank, "world_size": 3, "node": node})
            for rank, node in enumerate("abb")
        )
        workers, saved = begun.get(timeout=10), server.silent()

        class Broken:
            def __init__(self, socket):
                self.fileno, self.close, self.sendall = socket.fileno, socket.close, socket.sendall

            def recv(self, size):
                raise OSError(error, os.strerror(error))

        lost = workers[1]
        real, lost.sockets["commands"] = lost.sockets["commands"], Broken(lost.sockets["commands"])
        there[0].send(status=0)  # so that the server reads
        assert ends.get(timeout=10)["local_rank"] == 1
        silent = server.silent()
        server.end_attempt(restart=True)
        print(saved, silent, next(here.read()).get("silent"), flush=True)
    os._exit(0)
"""


def test_a_node_that_does_not_answer_is_told_from_a_worker_that_has_gone(run_python):
    done = run_python(["-c", SILENT])
    assert done.stdout == "{} {'b': [1, 2]} {'b': [1, 2]}\n{} {} None\n", done.output


UNEVEN = """
import json, os, queue, types
from distributed.backends._ray.rendezvous import RendezvousServer, connect
from distributed.launching.stopping import Signals, Stop

begun = queue.Queue()
events, side = os.pipe()
with Signals() as signals:
    server = RendezvousServer(signals, Stop(10.0), lambda **_: None, lambda workers: begun.put(list(workers)), lambda *_: None, lambda *_, **__: None)
    server.listener.listen("127.0.0.1")
    server.listener.open()
    server.start(types.SimpleNamespace(fileno=lambda: events, events=events, read=lambda: [json.loads(os.read(events, 1000))]))

    def join(rank, attempt):
        return connect("127.0.0.1", server.listener.port, server.token, {"rank": rank, "world_size": 2, "attempt": attempt})

    def is_sent_back(worker):
        return next(worker.read()) == {"op": "end", "restart": True}

    first, lost = join(0, 1), join(1, 1)
    assert begun.get(timeout=10) == [0, 1]
    server.end_attempt(restart=True)

    first, lost = join(0, 2), connect("127.0.0.1", server.listener.port, server.token, {"rank": 1, "world_size": 3, "attempt": 2})
    for each in lost.sockets.values():
        each.close()
    print("lost after it had connected", is_sent_back(first), is_sent_back(join(1, 2)))
    first = join(0, 3)
    os.write(side, json.dumps({"news": "lost", "attempt": 3}).encode())
    print("lost before it connected", is_sent_back(first), is_sent_back(join(1, 3)))
    both = join(0, 4), join(1, 4)
    print("begun", begun.get(timeout=10), begun.empty(), flush=True)
    os._exit(0)
"""


def test_the_others_start_again_if_a_worker_is_lost_before_all_have_connected(run_python):
    done = run_python(["-c", UNEVEN])
    said = "lost after it had connected True True\nlost before it connected True True\nbegun [0, 1] True\n"
    assert done.returncode == 0 and done.stdout == said, done.output


BROKEN = """
import os, queue, types
from distributed.backends._ray.rendezvous import RendezvousServer, connect
from distributed.launching.stopping import Signals, Stop

begun, said, told = queue.Queue(), queue.Queue(), queue.Queue()
events, _ = os.pipe()
with Signals() as signals:
    note = lambda news, error=None: said.put((news, error))
    server = RendezvousServer(signals, Stop(10.0), lambda **message: told.put(message), lambda workers: begun.put(workers), lambda *_: 1 / 0, note)
    server.listener.listen("127.0.0.1")
    server.listener.open()
    server.start(types.SimpleNamespace(events=events))
    worker = connect("127.0.0.1", server.listener.port, server.token, {"rank": 0, "world_size": 1})
    begun.get(timeout=10)
    worker.send(values=[])
    print(said.get(timeout=10))
    print(told.get(timeout=10)["status"], next(worker.read()), flush=True)
    server._thread.join(10)
    os._exit(0)
"""


REFUSED = """
import os, queue, types
from distributed.launching.worker_reports import WorkerReports
from distributed.backends._ray.rendezvous import RendezvousServer, connect
from distributed.launching.stopping import Signals, Stop

begun, ends, reports = queue.Queue(), queue.Queue(), WorkerReports(print, print)
events, _ = os.pipe()
with Signals() as signals:
    end = lambda op, local_rank, status, time, is_lost: ends.put((local_rank, status, is_lost))
    server = RendezvousServer(signals, Stop(10.0), end, lambda workers: begun.put(workers), reports.add, print)
    server.listener.listen("127.0.0.1")
    server.listener.open()
    server.start(types.SimpleNamespace(events=events))
    one, other = (connect("127.0.0.1", server.listener.port, server.token, {"rank": rank, "world_size": 2}) for rank in (0, 1))
    begun.get(timeout=10)
    one.send(values=["no number"])
    print(*ends.get(timeout=10))
    other.send(values=[1] * 14)
    print(next(other.read()), reports.progress(1).beats)
    other.send(status=0)
    print(*ends.get(timeout=10), flush=True)
    os._exit(0)
"""


def test_a_worker_that_sends_what_no_worker_sends_is_dropped_alone(run_python):
    done = run_python(["-c", REFUSED])
    assert done.stdout == "0 -9 True\n{'op': 'seen'} 1\n1 0 False\n", done.output


def test_an_exception_in_its_thread_ends_the_workers_and_is_seen(run_python):
    done = run_python(["-c", BROKEN])
    news, told = done.stdout.splitlines()
    assert news.startswith("('failed'") and "the launcher stopped listening to its workers (ZeroDivisionError" in news
    assert told == "-9 {'op': 'kill'}"
    assert "Traceback" in done.stderr and "ZeroDivisionError" in done.stderr


# What strangers do to a rendezvous server with a worker; afterwards the worker's own words still count.
STRANGERS = """
import os, pickle, queue, socket, types
from distributed.backends._ray.rendezvous import RendezvousServer, connect
from distributed.launching.stopping import Signals, Stop

class Evil:
    def __reduce__(self):
        return os.mkdir, ("evil",)

begun, told = queue.Queue(), queue.Queue()
events, _ = os.pipe()
with Signals() as signals:
    begin = lambda workers: begun.put(list(workers))
    server = RendezvousServer(signals, Stop(10.0), lambda **message: told.put(message), begin, lambda *_: None, print)
    server.listener.listen("127.0.0.1")
    server.listener.open()
    server.start(types.SimpleNamespace(events=events))
    address = ("127.0.0.1", server.listener.port)
    words = [
        '{"kind": "commands", "worker": "1", "token": "é"}\\n'.encode(), b"[" * 4000 + b"\\n", b"[" * 100_000, bytes(range(256)),
        b"{}\\n", b"0" * 64 + b" " + b"[" * 4000 + b"\\n", b"\\n", b"\\xff" * 64 + b" {}\\n", pickle.dumps(Evil()) + b"\\n",
    ]
    strangers = []
    for word in words:
        strangers.append(socket.create_connection(address))
        strangers[-1].sendall(word)
    for each in strangers:
        each.settimeout(10)
        try:
            assert each.recv(100) == b""
        except ConnectionResetError:  # it had more to say
            pass
    idle = [socket.create_connection(address) for _ in range(300)]
    half = socket.create_connection(address)
    half.sendall(b"0123")
    worker = connect(*address, server.token, {"rank": 0, "world_size": 1})
    assert begun.get(timeout=10) == [0]
    worker.send(status=7)
    print(told.get(timeout=10)["status"], server.listener.num_refused >= len(words) + 40, os.listdir(), flush=True)
    worker.sockets["commands"].sendall(b"not sealed\\n")
    assert worker.sockets["commands"].recv(10) == b""
    os._exit(0)
"""


def test_strangers_are_sent_away_and_counted_and_the_worker_is_heard(run_python, tmp_path):
    """A token that is not ASCII, brackets, pickles, more connections than it waits for."""
    done = run_python(["-c", STRANGERS], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "7 True []\n", done.output


@pytest.fixture
def listener(monkeypatch):
    monkeypatch.setattr(listener_module, "_LINE_S", 0.5)
    with selectors.DefaultSelector() as selector:
        made = SealedListener(selector, "secret", lambda connection, hello: admitted.append((connection, hello)))
        admitted = made.admitted = []
        made.listen("127.0.0.1")
        made.open()
        yield made
        for connection, _ in admitted:
            connection.close()
        made._socket.close()


def serve(listener, until, limit_s=10.0):
    """Run the work of the server's thread until `until()` is true."""
    deadline = time.monotonic() + limit_s
    while not until() and time.monotonic() < deadline:
        for key, _ in listener._selector.select(min(0.1, listener.patience_s or 0.1)):
            key.data(key.fileobj)
        listener.send_late_away()
    assert until()


def test_who_does_not_finish_the_first_line_in_time_is_sent_away(listener):
    with (
        socket.create_connection(("127.0.0.1", listener.port)) as half,
        socket.create_connection(("127.0.0.1", listener.port)),
    ):
        half.sendall(b"0123")
        serve(listener, lambda: listener.num_refused == 2)
        half.settimeout(5)
        assert half.recv(10) == b"" and listener.patience_s is None and listener.admitted == []


def test_a_connection_that_is_gone_before_it_is_accepted_sends_nobody_away(listener):
    with socket.create_connection(("127.0.0.1", listener.port)):
        serve(listener, lambda: listener._strangers)
        listener._accept(listener._socket)  # BlockingIOError: nobody waits there
        assert len(listener._strangers) == 1 and listener.num_refused == 0
    serve(listener, lambda: listener.num_refused == 1)


@pytest.mark.parametrize("reason", [errno.EMFILE, errno.ENFILE])
def test_without_a_descriptor_left_the_oldest_stranger_gives_way(listener, monkeypatch, reason):
    with socket.create_connection(("127.0.0.1", listener.port)) as oldest:
        serve(listener, lambda: listener._strangers)
        monkeypatch.setattr(listener, "_socket", Full(reason))
        listener._accept(None)
        oldest.settimeout(5)
        assert oldest.recv(10) == b"" and listener.num_refused == 1
        listener._accept(None)  # and where nobody can give way, nothing happens
        monkeypatch.undo()


class Full:
    """A listener of a process that has no descriptor left."""

    def __init__(self, reason):
        self.reason = reason

    def accept(self):
        raise OSError(self.reason, os.strerror(self.reason))


def test_a_first_line_may_come_in_pieces(listener):
    line = Seal("secret", HELLO).close({"kind": "commands"})
    with socket.create_connection(("127.0.0.1", listener.port)) as slow:
        for piece in (line[:10], line[10:-1], line[-1:]):
            slow.sendall(piece)
            serve(listener, lambda: True)
            time.sleep(0.05)
        serve(listener, lambda: listener.admitted)
    assert listener.admitted[0][1] == {"kind": "commands"} and listener.num_refused == 0


def test_it_listens_at_the_address_that_it_is_given_alone(listener):
    name = listener._socket.getsockname()[0]
    assert name in ("127.0.0.1", "::ffff:127.0.0.1")
    with socket.socket() as elsewhere:
        assert elsewhere.connect_ex(("127.0.0.2", listener.port)) != 0


def test_lines_cannot_be_changed_moved_repeated_or_sent_back():
    commands, answers = seals("secret", "worker")
    first, second = commands.close({"op": "kill"}), commands.close({"op": "end"})
    assert b"secret" not in first + second
    for lines in ([second], [first, first], [first.replace(b"kill", b"quit")], [b"kill\n"], [b"\n"], [b"\xff \xff\n"]):
        reader, _ = seals("secret", "worker")
        assert [reader.open(line) for line in lines][-1] is None, lines
    assert answers.open(first) is None and seals("secret", "another")[0].open(first) is None
    assert seals("other secret", "worker")[0].open(first) is None
    reader, _ = seals("secret", "worker")
    assert [reader.open(first), reader.open(second)] == [{"op": "kill"}, {"op": "end"}]


@pytest.mark.parametrize("depth", [65, 4000])
def test_a_line_of_brackets_is_refused_and_not_parsed(listener, monkeypatch, depth):
    monkeypatch.setattr(seal.json, "loads", lambda _: pytest.fail("it was parsed"))
    brackets = b"[" * depth
    with contextlib.ExitStack() as strangers:
        for line in (brackets, b"0" * 64 + b" " + brackets, b'{"kind": ' + brackets):
            stranger = strangers.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            stranger.sendall(line + b"\n")
        serve(listener, lambda: listener.num_refused == 3)
    assert listener.admitted == []


def test_a_first_line_that_was_heard_before_is_refused(listener):
    """As somebody sends it who has listened to the network, at once or much later, alone or with more behind it."""
    line = Seal("secret", HELLO).close({"kind": "commands", "worker": "1-a"})
    replays = [line, line + b"\n", line.replace(b"commands", b"stdout"), line.upper(), b" " + line]
    with contextlib.ExitStack() as connections:
        for each in (line, *replays):
            connection = connections.enter_context(socket.create_connection(("127.0.0.1", listener.port)))
            connection.sendall(each)
            serve(listener, lambda: len(listener.admitted) == 1)
        serve(listener, lambda: listener.num_refused == len(replays))
    assert len(listener.admitted) == 1
    other = Seal("secret", HELLO).close({"kind": "commands", "worker": "1-b"})
    with socket.create_connection(("127.0.0.1", listener.port)) as worker:
        worker.sendall(other)
        serve(listener, lambda: len(listener.admitted) == 2)


@pytest.mark.parametrize(("depth", "is_read"), [(65, True), (100_000, False)])
def test_a_worker_that_nests_its_words_does_not_end_the_server(depth, is_read):
    """In a thread, as the server reads them: its stack is smaller."""
    deep = b'{"status":' + b"[" * depth + b"]" * depth + b"}"
    line = Seal("secret", "name")._next_proof(deep) + b" " + deep + b"\n"
    with ThreadPoolExecutor(1) as thread:
        found = thread.submit(Seal("secret", "name").open, line).result()
    assert (found is not None) == is_read


def test_what_is_nested_too_deep_is_not_parsed():
    deep = b"[" * 5000 + b"]" * 5000
    line = Seal("secret", "name")._next_proof(deep) + b" " + deep + b"\n"
    assert Seal("secret", "name").open(line) is None


def test_a_worker_obeys_nobody_who_does_not_know_the_secret():
    """As where another process has taken the port of a launcher that ended."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        launcher = connect("127.0.0.1", stranger.getsockname()[1], "secret", {"rank": 0, "world_size": 1})
        first = stranger.accept()[0]
        assert b"secret" not in first.recv(4096)
        first.sendall(b'{"op": "start", "environ": {"LD_PRELOAD": "evil.so"}}\n')
        assert list(launcher.read()) == []
        for each in (first, *launcher.sockets.values()):
            each.close()


def test_the_end_is_said_when_the_output_has_been_read():
    pairs = {kind: socket.socketpair() for kind in ("commands", *STREAMS)}
    mine, launchers = ({kind: pair[side] for kind, pair in pairs.items()} for side in (0, 1))
    mine["control"].sendall(b"why")
    worker = threading.Thread(
        target=_report_end, args=(LauncherConnections(mine, *seals("secret", "worker")), 1, {"values": [7]})
    )
    worker.start()
    for kind in ("stdout", "stderr"):
        assert launchers[kind].recv(10) == b""
        launchers[kind].close()
    assert launchers["control"].recv(10) == b"why"
    assert select.select([launchers["commands"]], [], [], 0.3)[0] == []
    assert launchers["control"].recv(10) == b""
    launchers["control"].close()
    assert seals("secret", "worker")[1].open(launchers["commands"].recv(200)) == {"status": 1, "values": [7]}
    worker.join()
    for each in (*mine.values(), launchers["commands"]):
        each.close()


def test_the_end_is_said_even_if_a_stream_broke():
    """As on a network that loses packets: a connection that carried nothing may be lost, and the one for commands not."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        launcher = connect("127.0.0.1", server.getsockname()[1], "secret", {"rank": 0, "world_size": 1})
        accepted = [server.accept()[0] for _ in launcher.sockets]
    theirs = dict(zip(launcher.sockets, accepted, strict=True))
    for each in theirs.values():
        each.recv(4096)
    theirs["stdout"].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # `close` resets it
    for kind in STREAMS:
        theirs[kind].close()
    poll(lambda: select.select([launcher.sockets["stdout"]], [], [], 0.0)[0], 10, lambda: "the reset did not arrive")
    with pytest.raises(OSError, match="not connected"):
        launcher.sockets["stdout"].shutdown(socket.SHUT_WR)
    _report_end(launcher, 0, {})
    assert b'"status": 0' in theirs["commands"].recv(4096)
    for each in (*launcher.sockets.values(), theirs["commands"]):
        each.close()


def test_a_network_that_loses_some_packets_does_not_break_an_idle_connection():
    """One of ten probes or answers is lost where 5 % of the packets are lost in each direction. All of those of ten seconds never are."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        launcher = connect("127.0.0.1", server.getsockname()[1], "secret", {"rank": 0, "world_size": 1})
        first = launcher.sockets["stdout"]
        idle, interval = (
            first.getsockopt(socket.IPPROTO_TCP, each) for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL)
        )
        limit_s = first.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) / 1000
        assert limit_s == 10 and 0.0975 ** ((limit_s - idle) // interval) < 1e-7
        for each in launcher.sockets.values():
            each.close()


def test_a_child_may_open_the_port_for_its_parent(listener):
    """Ray's process does: it alone knows at which address the cluster sees this machine."""
    with selectors.DefaultSelector() as selector:
        made = SealedListener(selector, "secret", lambda connection, hello: connection.close())
        child = os.fork()
        if child == 0:
            made.listen("127.0.0.1")
            os._exit(0)
        os.waitpid(child, 0)
        made.open()
        with socket.create_connection(("127.0.0.1", made.port)) as worker:
            worker.sendall(Seal("secret", HELLO).close({}))
            ((key, _),) = selector.select(10)
            key.data(key.fileobj)
            assert worker.recv(10) == b"" and made.num_refused == 0
        made._socket.close()


def workers_that_say(*hellos):
    found = {}
    for rank, hello in enumerate(hellos):
        hello = {
            "rank": rank,
            "sees_run": True,
            "versions": {"distributed-trainer": "0.1.0", "torch": "2.13.0"},
            **hello,
        }
        found[rank] = WorkerConnections(*seals("token", str(rank)), hello=hello)
    return found


def test_a_node_that_does_not_see_the_run_or_has_another_version_is_named():
    assert objection(workers_that_say({"host": "a"}, {"host": "b"}), Path("runs/1")) is None
    blind = workers_that_say({"host": "a"}, {"host": "b", "sees_run": False})
    assert objection(blind, Path("runs/1")) == (
        "run directory 'runs/1' is not visible to rank 1 on b: run from a directory that all nodes of the cluster share"
    )
    old = workers_that_say(
        {"host": "a"}, {"host": "b", "versions": {"distributed-trainer": "0.1.0", "torch": "2.12.0"}}
    )
    assert objection(old, Path("runs/1")) == (
        "the node of rank 1 (b) differs from that of rank 0: torch 2.12.0 there and 2.13.0 on a"
    )


def test_a_rank_has_the_same_gpu_whichever_task_of_its_node_ray_gave_it():
    """Ray numbers the GPUs of a node, or names them as CUDA_VISIBLE_DEVICES does."""
    first = workers_that_say(*({"node": "a", "gpus": [gpu]} for gpu in ("10", "2")), {"node": "b", "gpus": ["0"]})
    again = workers_that_say(*({"node": "a", "gpus": [gpu]} for gpu in ("2", "10")), {"node": "b", "gpus": ["0"]})
    for workers in (first, again):
        seen = [gpus_beside(worker, workers.values()) for worker in workers.values()]
        assert seen == [{"CUDA_VISIBLE_DEVICES": "2,10"}] * 2 + [{"CUDA_VISIBLE_DEVICES": "0"}]
    named = workers_that_say(*({"node": "a", "gpus": [gpu]} for gpu in ("GPU-8a", "GPU-1c")))
    assert gpus_beside(named[0], named.values()) == {"CUDA_VISIBLE_DEVICES": "GPU-1c,GPU-8a"}
    without = workers_that_say({"node": "a", "gpus": []})
    assert gpus_beside(without[0], without.values()) == {}
