"""Reports of Ray workers on their training processes, without Ray."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from distributed.backends._ray.launch import _Launch
from distributed.backends._ray.rendezvous import LauncherConnections, seals
from distributed.backends._ray.reports import ProcessReporter, missing
from distributed.launching.heartbeat import NUM_VALUES, Board, Phase
from distributed.launching.loader_stacks import WorkerStacks
from distributed.launching.seal import LINE_BYTES
from distributed.launching.stacks import ProcessStacks, line_in_script
from distributed.launching.worker_reports import WorkerReports, answers_of
from distributed.runs.processes import descendants
from tests.conftest import poll

pytestmark = pytest.mark.timeout(60)

# A training process: its second argument says what it does after it has reported a step.
PROCESS = """
import ctypes, json, os, signal, sys, time
from distributed.launching.heartbeat import Board, Phase, heartbeat
from distributed.launching.loader_stacks import join_as_loader

Board(1, json.loads(sys.argv[1])).join(0)

def stands_here():
    while True:
        time.sleep(0.01)

def loads():
    if os.fork() == 0:
        join_as_loader(3)
        stands_here()
    stands_here()

def moves():
    for step in range(8, 1000):
        time.sleep(0.01)
        heartbeat().mark(Phase.CALLBACKS, step)

with heartbeat().fit():
    heartbeat().begin(4, compiles=False, timeout_s=2.5)
    heartbeat().mark(Phase.CALLBACKS, 7)
    stop, crash = lambda: os.kill(os.getpid(), signal.SIGSTOP), lambda: ctypes.string_at(0)
    {"loop": stands_here, "load": loads, "move": moves, "stop": stop, "crash": crash}[sys.argv[2]]()
"""


@contextlib.contextmanager
def reported(
    directory: Any, what: str, *, is_seen: bool = True
) -> Iterator[tuple[WorkerReports, subprocess.Popen[bytes], ProcessReporter]]:
    """Run the process as rank 1. Yield what the launcher knows, the process, and what reports on it."""
    script = directory / "process.py"
    script.write_text(PROCESS)
    there, here = socket.socketpair()
    board, seal = Board(1), seals("token", "worker")
    process = subprocess.Popen([sys.executable, str(script), str(board.files), what], pass_fds=board.files)
    reporter = ProcessReporter(LauncherConnections({"commands": there}, *seals("token", "worker")), process, board)
    reports = WorkerReports(lambda op, number: reporter.send_stacks(number), missing)

    def listen() -> None:
        with here.makefile("rb") as lines:
            for line in lines:
                reports.add(1, seal[1].open(line) or {})
                if is_seen:
                    reporter.go_on()

    listener = threading.Thread(target=listen, daemon=True)
    listener.start()
    reporter.start()
    try:
        yield reports, process, reporter
    finally:
        for pid in descendants(process.pid):
            os.kill(pid, signal.SIGKILL)
        process.kill()
        process.wait()
        reporter.end()
        there.close()
        listener.join(10)
        here.close()
        board.close()


def reached(reports: WorkerReports) -> Callable[[], bool]:
    return lambda: reports.progress(1).phase is Phase.CALLBACKS


def test_the_launcher_knows_the_progress_and_gets_the_stacks(tmp_path):
    with reported(tmp_path, "loop") as (reports, process, _):
        poll(reached(reports), 20, lambda: str(reports.progress(1)))
        progress = reports.progress(1)
        assert (progress.fit, progress.step, progress.timeout_s, progress.pid) == (1, 7, 2.5, process.pid)
        assert reports.progress(0).pid == 0  # the other rank has sent nothing
        for _ in range(2):
            (worker,) = reports.inspect({1: process.pid}).values()
            assert line_in_script(worker.process.stacks).endswith(", in stands_here")
            assert worker.process.pid == process.pid and worker.loaders == []


def test_a_process_that_is_stopped_is_said_to_be(tmp_path):
    with reported(tmp_path, "stop") as (reports, process, _):
        poll(reached(reports), 20, lambda: str(reports.progress(1)))
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        (worker,) = reports.inspect({1: process.pid}).values()
        assert worker.process.stacks == "" and worker.process.why == ", it is stopped (SIGSTOP)"


def test_the_stacks_of_a_crash_are_in_the_last_report(tmp_path):
    with reported(tmp_path, "crash") as (reports, process, reporter):
        assert process.wait() == -signal.SIGSEGV
        last = reporter.end()
        reports.add(1, last)
    assert (reports.progress(1).step, reports.progress(1).phase) == (7, Phase.CALLBACKS)
    assert "Segmentation fault" in reports.crash(1) and line_in_script(reports.crash(1)).endswith(", in <lambda>")


def test_the_stacks_of_loader_processes_arrive_too(tmp_path):
    with reported(tmp_path, "load") as (reports, process, _):
        poll(reached(reports), 20, lambda: str(reports.progress(1)))
        (worker,) = poll(lambda: with_loaders(reports, process.pid), 20, lambda: "no loader process")
        assert [(each.number, each.process.pid) for each in worker.loaders] == [(3, *descendants(process.pid))]
        assert line_in_script(worker.loaders[0].process.stacks).endswith(", in stands_here")


def with_loaders(reports, pid):
    found = [*reports.inspect({1: pid}).values()]
    return found if found[0].loaders else []


def test_a_launcher_that_reads_nothing_gets_one_report(tmp_path, monkeypatch):
    monkeypatch.setattr("distributed.backends._ray.reports._REPORT_S", 0.02)
    with reported(tmp_path, "move", is_seen=False) as (reports, _, reporter):
        poll(lambda: reports._values, 20, lambda: "no report")
        first = reports.progress(1).step
        board = reporter._board
        poll(lambda: board.progress(0).step > first + 100, 20, lambda: str(board.progress(0)))
        assert reports.progress(1).step == first
        reporter.go_on()
        poll(lambda: reports.progress(1).step > first, 20, lambda: "no second report")


@pytest.mark.parametrize("what", ["end", "begin"])
def test_nobody_waits_for_a_worker_that_has_ended_or_an_attempt_that_is_over(what):
    def ask(**_: Any) -> None:
        reports.end(3) if what == "end" else reports.begin()

    reports = WorkerReports(ask, missing)
    (worker,) = reports.inspect({3: 99}).values()  # else it takes 30 s
    assert worker.process.stacks == "" and (worker.process.why == ", it has ended") == (what == "end")


@pytest.mark.parametrize("begins", [False, True])
def test_a_hang_of_an_attempt_that_is_over_is_not_blamed_on_the_next_one(begins):
    blamed: list[Any] = []

    reports = WorkerReports(lambda **_: None, missing)

    class Hangs:
        def find(self, ranks: Any) -> str:
            if begins:
                reports.begin()
            return "rank 1 hangs"

    launch: Any = object.__new__(_Launch)
    launch._reports, launch._hangs = reports, Hangs()
    launch._verdicts = SimpleNamespace(watched={}, blame=blamed.append)
    launch._slow = SimpleNamespace(look=lambda ranks: None)
    launch._look_at_progress()
    assert blamed == ([] if begins else ["rank 1 hangs"])


def test_no_attempt_begins_while_a_hang_is_blamed():
    reports, ends = WorkerReports(lambda **_: None, missing), list[int]()
    begin = threading.Thread(target=lambda: (reports.begin(), ends.append(reports.attempt)))
    with reports.held(0) as is_same:
        begin.start()
        begin.join(0.2)
        assert is_same and begin.is_alive() and ends == []
    begin.join(10)
    assert ends == [1]
    with reports.held(0) as is_same:
        assert not is_same


def test_a_worker_that_does_not_answer_is_told_from_a_process_that_does_not(monkeypatch):
    monkeypatch.setattr("distributed.launching.worker_reports._ANSWER_S", 0.1)
    (worker,) = WorkerReports(lambda **_: None, missing).inspect({3: 99}).values()
    assert worker.process.pid == 99 and worker.process.why == ", its Ray worker does not answer"


def test_a_late_answer_to_an_earlier_request_is_not_used(monkeypatch):
    monkeypatch.setattr("distributed.launching.worker_reports._ANSWER_S", 0.1)
    stacks = {"pid": 99, "stacks": "Thread 0x1", "why_silent": "", "from_outside": ""}
    late = {"stacks": stacks, "loader": None}
    reports = WorkerReports(lambda op, number: reports.add(0, {**late, "number": number - 1}), missing)
    (worker,) = reports.inspect({0: 99}).values()
    assert worker.process.stacks == ""


@pytest.mark.parametrize(
    "answer",
    [
        {"values": []}, {"values": 3}, {"values": ["1"] * NUM_VALUES}, {"values": [True] * NUM_VALUES},
        {"values": [9] * NUM_VALUES}, {"values": [1] * (NUM_VALUES - 1) + [1 << 63]},
        {"stacks": {}},
        {"stacks": {"pid": 1}, "number": 1, "loader": None}, {"stacks": {"pid": 1, "stacks": ["a"]}, "number": 1, "loader": None},
        {"stacks": {"pid": "1", "stacks": ""}, "number": 1, "loader": None},
        {"stacks": {"pid": 1, "stacks": "\ud800"}, "number": 1, "loader": None}, {"values": [-1] * NUM_VALUES},
    ],
)  # fmt: skip
def test_what_no_worker_sends_is_refused(answer):
    refused: list[Exception] = []

    def ask(**_: Any) -> None:
        try:
            reports.add(0, answer)
        except (ValueError, TypeError, KeyError) as error:
            refused.append(error)
        reports.end(0)

    reports = WorkerReports(ask, missing)
    (worker,) = reports.inspect({0: 99}).values()
    assert len(refused) == 1 and worker.process.stacks == "" and reports.progress(0).beats == 0


def test_the_next_attempt_begins_with_nothing():
    reports = WorkerReports(lambda **_: None, missing)
    reports.add(0, {"values": [1] * NUM_VALUES, "crash": "Fatal"})
    assert reports.progress(0).beats == 1 and reports.crash(0) == "Fatal"
    reports.begin()
    assert reports.progress(0).beats == 0 and reports.crash(0) == ""


@pytest.mark.parametrize(("character", "most"), [("x", 80_000), ("\N{MATHEMATICAL BOLD CAPITAL A}", 30_000)])
def test_long_stacks_are_cut_so_that_a_line_has_room_for_them(character, most):
    text = character * 100_000
    process = ProcessStacks(1, f"{text}end", "", f"begin{text}")
    (answer,) = answers_of(WorkerStacks(process, []))
    assert answer["stacks"]["stacks"] == character * (most - 3) + "end"
    assert answer["stacks"]["from_outside"] == "begin" + character * (most - 5)
    assert len(json.dumps(answer)) < LINE_BYTES
