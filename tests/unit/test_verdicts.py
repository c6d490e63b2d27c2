"""What a launcher says when a signal stops its run, and how the run can go on."""

from __future__ import annotations

import io
import json
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from distributed.backends._ray.launch import _Launch
from distributed.backends._ray.rendezvous import RendezvousServer
from distributed.config.registry import hint_of
from distributed.launching.elastic import WorkerCount
from distributed.launching.forkserver import ForkServer
from distributed.launching.heartbeat import Board
from distributed.launching.request import LaunchRequest
from distributed.launching.stopping import Signals, Stop
from distributed.launching.verdicts import Verdict, Verdicts
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import REGROUP_SIGNAL
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


def test_a_stop_during_the_last_uploads_says_so_and_does_not_offer_to_continue(run):
    write_result(run.path / "result.json", {"status": "running"})
    screen = io.StringIO()
    found = verdicts(run, screen, again="python -m distributed.cli train --resume")
    found.begin({0: 0}, 0)
    found.add({"op": "event", "kind": "uploads", "is_over": False, "rank": 0})
    found.add({"op": "stop", "signum": signal.SIGINT, "is_first": True, "interrupts": 1, "is_starting": False})
    found.add({"op": "event", "kind": "uploads", "is_over": True, "rank": 0})
    found.add({"op": "exit", "local_rank": 0, "status": 0, "time": time.time()})
    assert found.judge(0) is Verdict.DONE
    found.show_end(found.exit_code())
    assert screen.getvalue() == "SIGINT: stopping after the uploads\n"


@pytest.mark.parametrize(
    ("num_begun", "num_to_begin", "is_starting"),
    [(0, 0, True), (1, 1, True), (2, 0, False), (3, 1, True), (4, 0, False)],
)
def test_the_launcher_says_whether_workers_are_still_missing(run, num_begun, num_to_begin, is_starting):
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        server = ForkServer(LaunchRequest(str(run.path), nproc_per_node=2), ours, 0, Signals(), Board(2))
        server._num_begun, server._num_to_begin = num_begun, num_to_begin
        server._take_signal(signal.SIGINT)
        assert json.loads(theirs.recv(4096))["is_starting"] is is_starting


def test_a_scheduler_that_asks_a_finished_run_to_save_does_not_make_it_fail():
    code = (
        "import os, signal; from distributed.launching.stopping import Signals\n"
        "with Signals(): pass\n"
        "os.kill(os.getpid(), signal.SIGUSR1)\n"
        "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False
    )
    assert (done.returncode, done.stdout) == (0, "True\n"), done


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


def regrouping(run, screen, *interrupted, processes=2, **more):
    """Return the verdicts on an attempt, some workers of which have ended so that another number of them can start."""
    found = verdicts(run, screen, nproc_per_node=processes, **more)
    found.begin({rank: rank for rank in range(processes)}, 0)
    for rank in interrupted:
        found.add({"op": "event", "kind": "interrupted", "rank": rank, "signum": int(REGROUP_SIGNAL)})
        found.add({"op": "exit", "local_rank": rank, "status": 1, "time": time.time()})
    return found


def test_a_worker_that_does_not_end_for_a_regroup_is_given_up_after_timeout_s(run, capsys):
    found = regrouping(run, io.StringIO(), 0, timeout_s=0.3, monitor_interval=0.05)
    assert found.judge(1) is Verdict.AT_WORK
    time.sleep(0.4)
    assert found.judge(1) is Verdict.REGROUP
    assert (
        capsys.readouterr().err
        == "warning: killing rank 1, which did not end within 0.3 s (timeout_s) after the others\n"
    )


def out_of_memory(found, micro_batch, rank=1):
    """Return the verdict after a rank has run out of memory in step 3 of the first fit."""
    found.begin({0: 0, 1: 1}, 0)
    found.add({
        "op": "event", "kind": "error", "rank": rank, "type": "TrainingError", "message": f"rank {rank} is out of memory in step 3: x",
        "traceback": "", "time": time.time(), "exit_code": 1, "is_message_enough": True, "micro_batch": micro_batch, "reached": [1, 3],
    })  # fmt: skip
    found.add({"op": "exit", "local_rank": rank, "status": 1, "time": time.time()})
    return found.judge(0)


def test_smaller_micro_batches_are_tried_without_counting_the_restarts(run, capsys):
    found = verdicts(run, io.StringIO(), max_restarts=0)
    for size in (4, 2, 1):
        assert out_of_memory(found, size) is Verdict.RESTART and found.is_free
    assert run.largest_micro_batch(1) == 1 and run.largest_micro_batch(2) == 0
    said = capsys.readouterr().err.splitlines()
    assert (
        said[2]
        == "warning: rank 1 is out of memory in step 3: x: restarting with micro-batches of at most 1 sample (auto_micro_batch)"
    )
    assert out_of_memory(found, 0) is Verdict.OVER and not found.is_free  # nothing smaller is left


def test_a_run_whose_micro_batches_do_not_become_smaller_ends(run):
    found = verdicts(run, io.StringIO(), max_restarts=0)
    assert out_of_memory(found, 4) is Verdict.RESTART
    assert out_of_memory(found, 4) is Verdict.OVER


def test_a_stop_after_such_a_restart_has_the_code_of_the_signal(run):
    found = verdicts(run, io.StringIO(), max_restarts=0)
    assert out_of_memory(found, 4) is Verdict.RESTART
    found.begin({0: 0, 1: 1}, 1)
    found.add({"op": "stop", "signum": signal.SIGINT, "is_first": True, "interrupts": 1, "is_starting": False})
    assert found.exit_code() == 130


def events_of(run):
    return [event["event"] for event in run.read_events()]


def test_only_a_restart_after_a_failure_is_one_in_the_journal(run):
    found = regrouping(run, io.StringIO(), 1, 0)
    assert found.judge(1) is Verdict.REGROUP
    found.begin({0: 0, 1: 1}, 1)
    assert events_of(run) == []  # the main process has written it
    found.begin({0: 0}, 2)  # a worker was killed
    found.begin({0: 0}, 3, is_regroup=True)  # a node was lost
    assert events_of(run) == ["regrouped", "regrouped"]
    found.begin({0: 0}, 4)
    assert events_of(run) == ["regrouped", "regrouped", "restarted"]
    verdicts(run, io.StringIO()).begin({0: 0}, 1)  # the first attempt was lost before it began
    assert events_of(run)[3:] == ["restarted"]


def without_the_others(found, nodes, left):
    """Return the verdict on an attempt in which rank 0 says that it has lost the connection to another rank."""
    found.begin({0: 0, 1: 1}, 0, nodes)
    found.add({
        "op": "event", "kind": "error", "rank": 0, "type": "ConnectionResetError", "message": "", "traceback": "", "time": time.time(),
        "exit_code": 1, "is_message_enough": False,
    })  # fmt: skip
    found.add({"op": "exit", "local_rank": 0, "status": 1, "time": time.time()})
    return found.judge(left)


@pytest.mark.parametrize("fewest", [1, None])
def test_a_lost_connection_is_shown_without_a_count_because_a_lost_node_is_no_restart(run, capsys, fewest):
    found = verdicts(run, io.StringIO(), num_nodes=2, min_nodes=fewest, max_restarts=1)
    found.node = 0
    assert without_the_others(found, dict.fromkeys((0, 1), "node 0 (a)"), 1) is Verdict.RESTART
    assert capsys.readouterr().err == "warning: rank 0 on node 0 (a) lost the connection to another rank: restarting\n"


@pytest.mark.parametrize("num_nodes", [1, 2])  # 1 if Ray chooses the nodes
def test_a_lost_connection_on_a_ray_cluster_is_restarted_and_counts_before_the_lost_node_is_seen(
    run, capsys, num_nodes
):
    found = verdicts(run, io.StringIO(), num_nodes=num_nodes, max_restarts=2)
    assert without_the_others(found, {0: "a", 1: "b"}, 2) is Verdict.RESTART
    expected = "rank 0 on a lost the connection to another rank: restarting (1 of 2)"
    assert capsys.readouterr().err == f"warning: {expected}\n"
    assert without_the_others(found, {0: "a", 1: "b"}, 0) is Verdict.OVER
    assert found.failure["then"] == "no restart is left (max_restarts=2)"


def test_a_lost_connection_of_a_single_node_is_not_restarted(run):
    found = verdicts(run, io.StringIO(), max_restarts=2)
    assert without_the_others(found, {}, 2) is Verdict.OVER


def test_a_lost_connection_of_an_elastic_run_on_ray_is_no_restart_because_the_news_of_the_node_decide(run):
    found = verdicts(run, io.StringIO(), nproc_per_node=2, min_nproc_per_node=1, max_restarts=2)
    assert without_the_others(found, {0: "a", 1: "b"}, 2) is Verdict.OVER


@pytest.mark.parametrize(
    ("stop", "interrupted", "node_rank", "leaves"),
    [
        (signal.SIGTERM, REGROUP_SIGNAL, 1, True),
        (signal.SIGTERM, None, 1, True),  # its workers were killed
        (signal.SIGTERM, signal.SIGTERM, 1, False),  # the workers of all nodes agreed on the end
        (None, signal.SIGTERM, 1, False),
        (signal.SIGINT, REGROUP_SIGNAL, 1, False),
        (signal.SIGTERM, REGROUP_SIGNAL, 0, False),
    ],
)
def test_a_node_leaves_only_if_the_others_go_on(run, stop, interrupted, node_rank, leaves):
    found = verdicts(run, io.StringIO(), num_nodes=2, min_nodes=1, node_rank=node_rank)
    found.begin({0: 1}, 0)
    if stop:
        found.add({"op": "stop", "signum": stop, "is_first": False, "interrupts": 1, "is_starting": False})
    if interrupted:
        found.add({"op": "event", "kind": "interrupted", "rank": 1, "signum": int(interrupted)})
    found.add({"op": "exit", "local_rank": 0, "status": 1 if interrupted else -9, "time": time.time() - 60})
    assert found.judge(0) is Verdict.OVER
    assert found.leaves is leaves


def test_ranks_that_save_during_a_stop_are_given_time_after_a_death_whatever_the_clock_says(run):
    found = verdicts(run, io.StringIO(), monitor_interval=0.01)
    found.begin({0: 0, 1: 1}, 0)
    found.add({"op": "stop", "signum": signal.SIGTERM, "is_first": True, "interrupts": 1, "is_starting": False})
    found.add({"op": "exit", "local_rank": 1, "status": -9, "time": time.time() - 86400})
    assert found.judge(0) is Verdict.AT_WORK
    found.add({"op": "exit", "local_rank": 0, "status": 143, "time": time.time()})
    assert found.judge(0) is Verdict.OVER


def failed(found, attempt, left, *, signum=9, rank=1, reached=(1, 8), exception=None):
    """Return the verdict on an attempt that fails in this way."""
    found.begin({0: 0, 1: 1}, attempt)
    if exception is not None:
        found.add({
            "op": "event", "kind": "error", "rank": rank, "type": exception, "message": f"{time.time()}", "traceback": "",
            "time": time.time(), "exit_code": 1, "is_message_enough": False, "reached": list(reached),
        })  # fmt: skip
    status = 1 if exception is not None else -signum
    found.add({"op": "exit", "local_rank": rank, "status": status, "time": time.time(), "reached": reached})
    return found.judge(left)


@pytest.mark.parametrize("how", [{}, {"exception": "ValueError"}])
def test_the_third_failure_in_a_row_without_progress_is_the_last(run, capsys, how):
    found = verdicts(run, io.StringIO(), max_restarts=8, restart_on_exception=True, nproc_per_node=2)
    assert failed(found, 0, 8, reached=(1, 5), **how) is Verdict.RESTART  # at another step
    assert [failed(found, 1 + i, 7 - i, **how) for i in range(3)] == [Verdict.RESTART, Verdict.RESTART, Verdict.OVER]
    note = "stopped, because the same failure came 3 times at step 8 (max_restarts=8)"
    assert run.read_events()[-1]["cause"].endswith(f"; {note}")
    found.show_end(1)
    assert note in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "third",
    [
        {"reached": (1, 9)},  # the run has made progress
        {"reached": (2, 8)},  # in a later fit
        {"rank": 0},
        {"signum": 11},
        {"exception": "ValueError"},
    ],
)
def test_another_failure_begins_the_count_again(run, third):
    found = verdicts(run, io.StringIO(), max_restarts=8, restart_on_exception=True, nproc_per_node=2)
    assert [failed(found, i, 8 - i, **how) for i, how in enumerate([{}, {}, third, {}, {}])] == [Verdict.RESTART] * 5


def test_a_failure_outside_of_a_fit_is_never_the_same_as_another(run):
    """A script without a Trainer may make progress of which nothing is known."""
    found = verdicts(run, io.StringIO(), max_restarts=8, nproc_per_node=2)
    assert {failed(found, i, 8 - i, reached=(0, 0)) for i in range(5)} == {Verdict.RESTART}


def test_what_was_repeated_too_often_before_the_first_step_says_so(run):
    found = verdicts(run, io.StringIO(), max_restarts=8, nproc_per_node=2)
    assert [failed(found, i, 8 - i, reached=(1, 0)) for i in range(3)][-1] is Verdict.OVER
    assert "3 times before the first step" in run.read_events()[-1]["cause"]


ABORT = (
    "terminate called after throwing an instance of 'c10::{}'\n  what():  {}\nframe #0: c10::Error::Error() + 0x9d\n"
)
ASSERTED = "CUDA error: device-side assert triggered"


def write_log(run, text):
    """Append what rank 0 has written to its log, as the launcher does."""
    run.logs.mkdir(exist_ok=True)
    with (run.logs / "rank-0.log").open("a") as file:
        file.writelines(f"[rank 0 12:00:00] {line}\n" for line in text.splitlines())


def abort(run, found, attempt, text, restarts_left=3):
    """Let the only worker abort in an attempt after it has written `text`, and return the verdict."""
    found.begin({0: 0}, attempt)
    write_log(run, text)
    found.add({"op": "exit", "local_rank": 0, "status": -signal.SIGABRT, "time": time.time(), "reached": (1, 10)})
    return found.judge(restarts_left)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("AcceleratorError", ASSERTED),
        (
            "DistBackendError",
            f"[PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated: {ASSERTED}",
        ),
    ],
)
def test_an_error_of_a_kernel_that_aborts_a_worker_is_told_and_made_again_with_its_line(run, capsys, kind, text):
    found = verdicts(run, io.StringIO())
    assert abort(run, found, 0, ABORT.format(kind, text)) is Verdict.RESTART
    assert found.environ == {"CUDA_LAUNCH_BLOCKING": "1"}
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: rank 0 was killed by signal 6 (SIGABRT): ") and "PG" not in said
    assert said.endswith(
        f"{ASSERTED}: restarting (1 of 3) with CUDA_LAUNCH_BLOCKING=1, so that the traceback shows the failing line"
    )
    # The second abort has no message. That of the first attempt must not be taken for it.
    assert abort(run, found, 1, "Aborted") is Verdict.RESTART
    assert found.environ == {} and "(SIGABRT): restarting" in capsys.readouterr().err


def test_an_error_of_a_kernel_is_made_again_only_once(run, capsys):
    found, text = verdicts(run, io.StringIO()), ABORT.format("AcceleratorError", ASSERTED)
    assert abort(run, found, 0, text) is Verdict.RESTART
    assert abort(run, found, 1, text, restarts_left=2) is Verdict.OVER
    found.finish()
    error = f"error: rank 0 was killed by signal 6 (SIGABRT): {ASSERTED}"
    assert capsys.readouterr().err.splitlines()[1:] == [error, f"hint: {hint_of(ASSERTED)}"]


def test_an_error_of_a_kernel_without_a_restart_ends_with_what_to_do(run, capsys):
    found = verdicts(run, io.StringIO(), max_restarts=0)
    assert abort(run, found, 0, ABORT.format("AcceleratorError", ASSERTED), restarts_left=0) is Verdict.OVER
    assert found.environ == {}
    assert found.finish() == 1
    *_, error, hint = capsys.readouterr().err.splitlines()
    then = "max_restarts=0; set CUDA_LAUNCH_BLOCKING=1 to see the failing line in the traceback"
    assert error == f"error: rank 0 was killed by signal 6 (SIGABRT): {ASSERTED}; {then}"
    assert hint == f"hint: {hint_of(ASSERTED)}" and "an index is out of range" in hint


def test_fewer_workers_do_not_help_against_the_error_of_a_kernel(run, capsys):
    request = LaunchRequest(str(run.path), script="train.py", nproc_per_node=2, min_nproc_per_node=1)
    for text, verdict in (("Aborted", Verdict.REGROUP), (ABORT.format("AcceleratorError", ASSERTED), Verdict.RESTART)):
        found = Verdicts(request, run, Display(io.StringIO(), live=False), WorkerCount(request))
        assert abort(run, found, 0, text) is verdict
        assert found.environ == ({} if verdict is Verdict.REGROUP else {"CUDA_LAUNCH_BLOCKING": "1"})


def say(kind, message):
    """Return what the only worker tells about an error."""
    return {
        "op": "event", "kind": kind, "rank": 0, "time": time.time(), "type": "AcceleratorError", "message": message,
        "traceback": "here", "exit_code": 1, "is_message_enough": False,
    }  # fmt: skip


def raise_asserted(found, attempt, restarts_left, kind):
    """Let the only worker tell of the error of a kernel, and abort. Return the verdict."""
    found.begin({0: 0}, attempt)
    found.add(say(kind, f"{ASSERTED}\nSearch for it"))
    found.add({"op": "exit", "local_rank": 0, "status": -signal.SIGABRT, "time": time.time()})
    return found.judge(restarts_left)


@pytest.mark.parametrize("kind", ["error", "raises"])
def test_an_error_of_a_kernel_that_python_raised_is_made_again_once(run, capsys, monkeypatch, kind):
    monkeypatch.delenv("CUDA_LAUNCH_BLOCKING", raising=False)
    found = verdicts(run, io.StringIO())
    assert raise_asserted(found, 0, 3, kind) is Verdict.RESTART and found.environ == {"CUDA_LAUNCH_BLOCKING": "1"}
    assert raise_asserted(found, 1, 2, kind) is Verdict.OVER and found.environ == {}
    (said,) = capsys.readouterr().err.splitlines()  # without the advice that torch adds to the message
    assert said == (
        f"warning: rank 0 failed with AcceleratorError: {ASSERTED}: restarting (1 of 3) with CUDA_LAUNCH_BLOCKING=1,"
        " so that the traceback shows the failing line"
    )
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    assert raise_asserted(verdicts(run, io.StringIO()), 0, 3, kind) is Verdict.OVER


def test_an_error_that_a_worker_has_caught_is_not_its_failure(run):
    found = verdicts(run, io.StringIO())
    found.begin({0: 0}, 0)
    found.add(say("raises", "CUDA error: x"))
    assert found.judge(3) is Verdict.AT_WORK
    found.add({"op": "exit", "local_rank": 0, "status": 0, "time": time.time()})
    assert found.judge(3) is Verdict.DONE
