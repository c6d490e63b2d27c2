"""Decide which worker hangs and when from what workers say, and read from its stacks where a worker is."""

from __future__ import annotations

import faulthandler
import io
import multiprocessing.process
import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from distributed.launching import hang_check, stacks
from distributed.launching.causes import Failure
from distributed.launching.hang_check import HangCheck
from distributed.launching.hangs import HangWatch, Suspects, culprit
from distributed.launching.heartbeat import NUM_VALUES, Board, Heartbeat, Phase, Progress, progress_in
from distributed.launching.loader_stacks import LoaderProcess, WorkerStacks, awaited
from distributed.launching.request import LaunchRequest
from distributed.launching.stacks import ProcessStacks, line_in_script, seen_from_outside, waits_in, why_silent
from distributed.launching.verdicts import Verdict, Verdicts
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory

TRAINING, CALLBACKS, DATA = Phase.TRAINING, Phase.CALLBACKS, Phase.DATA


def at(beats, step, phase=TRAINING, *, is_slow=False, fit=1, timeout_s=0.0):
    return Progress(beats, fit, step, phase, is_slow, timeout_s, 0)


def watched(watch, seconds, progress, poll_s=0.1):
    """Return what the watch says after it has looked at workers that stand at `progress` for `seconds`."""
    found = watch.look(progress, 0.0)
    for _ in range(round(seconds / poll_s)):
        found = watch.look(progress, poll_s)
    return found


def test_the_rank_that_is_behind_is_named_and_not_those_that_wait_for_it():
    watch = HangWatch(3.0)
    progress = {0: at(31, 8), 1: at(28, 7, CALLBACKS), 2: at(31, 8)}
    assert watched(watch, 2.9, progress) is None
    found = watched(watch, 0.2, progress)
    assert found.ranks == (1,) and found.has_others_ahead and found.progress.words == "in step 7 (callbacks)"
    assert found.still_s == pytest.approx(3.1)


def test_ranks_at_the_same_place_are_all_suspects():
    found = watched(HangWatch(3.0), 3.1, {0: at(31, 8), 1: at(31, 8)})
    assert found.ranks == (0, 1) and not found.has_others_ahead


def test_a_rank_that_moves_is_not_named_nor_those_that_wait_for_it():
    """Rank 1 validates alone for a minute, while rank 0 waits for it in the next update."""
    watch = HangWatch(3.0)
    for beat in range(60):
        assert watched(watch, 1.0, {0: at(900, 9), 1: at(100 + beat, 8, Phase.VALIDATION, is_slow=True)}) is None


@pytest.mark.parametrize("phase", [Phase.START, Phase.VALIDATION, Phase.SAVING, Phase.END])
def test_what_is_slow_by_its_nature_may_take_ten_times_as_long(phase):
    watch, progress = HangWatch(3.0), {0: at(31, 8, phase, is_slow=True), 1: at(31, 8, phase, is_slow=True)}
    assert watched(watch, 29.0, progress) is None
    assert watched(watch, 2.0, progress).ranks == (0, 1)


def test_the_limit_of_what_is_slow_by_its_nature_is_a_setting():
    slow, quick = {0: at(31, 8, Phase.SAVING, is_slow=True)}, {0: at(31, 8)}
    assert watched(HangWatch(3.0, 5.0), 4.9, slow) is None
    assert watched(HangWatch(3.0, 5.0), 5.2, slow).ranks == (0,)
    assert watched(HangWatch(3.0, 0.0), 10_000, slow, poll_s=1.0) is None  # no limit
    assert watched(HangWatch(3.0, 0.0), 3.2, quick).ranks == (0,)


def test_nothing_hangs_outside_of_a_fit_nor_the_ranks_that_wait_for_a_script():
    assert watched(HangWatch(1.0), 1000, {0: at(31, 8, Phase.SCRIPT), 1: at(40, 8)}, poll_s=1.0) is None
    assert watched(HangWatch(1.0), 1000, {0: at(0, 0, Phase.SCRIPT, fit=0)}, poll_s=1.0) is None
    assert HangWatch(1.0).look({}, 5.0) is None  # all workers have ended


def test_an_update_that_takes_three_times_as_long_as_the_others_is_no_hang():
    watch = HangWatch(2.0)
    for step in range(10, 20):
        watched(watch, 1.5, {0: at(3 * step, step)})
    assert watched(watch, 4.5, {0: at(60, 20)}) is None
    assert watched(watch, 4.0, {0: at(60, 20)}).ranks == (0,)


def test_saves_between_updates_do_not_make_the_limit_longer():
    watch = HangWatch(2.0)
    for step in range(10, 30):
        watched(watch, 0.2, {0: at(3 * step, step)})
        if step % 10 == 0:
            watched(watch, 15.0, {0: at(3 * step + 1, step, Phase.SAVING, is_slow=True)})
    assert watched(watch, 2.2, {0: at(100, 30)}).ranks == (0,)


ALL, ONE = Suspects((0, 1, 2), at(31, 8), 3.0, False), Suspects((2,), at(31, 8), 3.0, True)
ALONE = Suspects((2,), at(31, 8), 3.0, False)


@pytest.mark.parametrize(
    ("suspects", "silent", "waiting", "found"),
    [
        (ONE, [], [2], 2),  # it is behind
        (ONE, [0], [2], 2),  # rank 0 is further
        (ALL, [1], [2], 1),  # it is stopped, and rank 0 may be in the middle of a call
        (ALL, [1, 2], [], 1),
        (ALL, [], [1, 2], 0),
        (ALL, [], [0, 1], 2),
        (ALL, [], [2], None),
        (ALL, [], [0, 1, 2], None),
    ],
)
def test_one_rank_is_singled_out_if_something_sets_it_apart(suspects, silent, waiting, found):
    assert culprit(suspects, silent, waiting) == found


@pytest.mark.parametrize(
    ("suspects", "silent", "waiting", "found"),
    [(ALONE, [], [2], None), (ALONE, [2], [], 2), (ALONE, [], [], 2), (ONE, [], [2], 2)],
    ids=["waits", "silent", "elsewhere", "behind"],
)
def test_one_rank_that_may_wait_for_another_node_is_not_singled_out(suspects, silent, waiting, found):
    assert culprit(suspects, silent, waiting, may_wait_elsewhere=True) == found


def test_a_rank_for_which_others_have_waited_in_vain_is_named_at_any_place():
    watch = HangWatch(60.0)
    watched(watch, 2.0, {0: at(31, 8), 1: at(29, 8, Phase.SAVING, is_slow=True), 2: at(31, 8)})
    found = watch.standing([1, 2], 2.0)
    assert found.ranks == (1,) and found.has_others_ahead
    assert (
        watch.standing([2], 2.0).ranks == (2,) and not watch.standing([2], 2.0).has_others_ahead
    )  # it may have waited too
    watched(watch, 2.0, {0: at(31, 8), 1: at(29, 8, timeout_s=2.0), 2: at(31, 8)})
    assert watch.standing([1, 2], 300.0).ranks == (1,)  # the script has set another limit
    assert watch.standing([2], 300.0) is None and watch.standing([], 0.0) is None


# ------------------------------------------------------------------ what a worker says


def test_the_launcher_reads_what_the_worker_writes():
    board, heartbeat = Board(2), Heartbeat()
    heartbeat.attach(board._slot(1))
    assert (board.progress(1).pid, board.progress(1).fit) == (os.getpid(), 0)
    with heartbeat.fit():
        assert (board.progress(1).fit, board.progress(1).phase, board.progress(1).is_slow) == (1, Phase.START, True)
        heartbeat.begin(6, compiles=False, timeout_s=2.5)
        for step, is_slow in ((7, True), (8, True), (9, False)):
            heartbeat.mark(TRAINING, step)
            assert (board.progress(1).step, board.progress(1).is_slow) == (step, is_slow)
        assert board.progress(1).timeout_s == 2.5
        before = board.progress(1).beats
        heartbeat.mark(Phase.SAVING, 9, is_slow=True)
        assert board.progress(1).beats == before + 1 and board.progress(1).is_slow
    assert (board.progress(1).phase, board.progress(1).step) == (Phase.SCRIPT, 9)
    assert board.progress(0) == progress_in([0] * NUM_VALUES)  # the other worker has said nothing
    board.clear()
    assert board.progress(1) == board.progress(0)


def test_with_compile_any_update_may_compile_again():
    heartbeat = Heartbeat()
    with heartbeat.fit():
        heartbeat.begin(0, compiles=True, timeout_s=2.5)
        heartbeat.mark(TRAINING, 50)
        assert heartbeat.progress.is_slow
        heartbeat.mark(DATA, 51)
        assert not heartbeat.progress.is_slow


# ------------------------------------------------------------------ stacks


def stacks_of(act):
    """Return the stacks of this process as `act` calls the function that it is given."""
    with tempfile.TemporaryFile() as file:
        act(lambda *_: faulthandler.dump_traceback(file, all_threads=True))
        return os.pread(file.fileno(), 1 << 16, 0).decode()


def main_thread(*frames):
    lines = "".join(f'  File "{name}", line 9 in {function}\n' for name, function in frames)
    other = 'Thread 0x00007e (most recent call first):\n  File "/home/me/other.py", line 3 in loop\n\n'
    return f"{other}Current thread 0x00007f (most recent call first):\n{lines}"


PACKAGES = Path(pytest.__file__).parents[1]
SCRIPT, PYTHON, OURS = ("/home/me/train.py", "step"), (threading.__file__, "wait"), (hang_check.__file__, "agree")
AUTOGRAD, TENSOR = f"{PACKAGES}/torch/autograd", (f"{PACKAGES}/torch/_tensor.py", "backward")
BACKWARD = [(f"{AUTOGRAD}/graph.py", "_engine_run_backward"), (f"{AUTOGRAD}/__init__.py", "backward"), TENSOR]
C10D, WRAPPER = f"{PACKAGES}/torch/distributed/distributed_c10d.py", f"{PACKAGES}/torch/distributed/c10d_logger.py"


@pytest.mark.parametrize(
    ("frames", "function"),
    [
        ([SCRIPT, OURS, SCRIPT], ""),
        ([PYTHON, SCRIPT, OURS], ""),  # a lock of the script
        ([PYTHON, (f"{PACKAGES}/requests/api.py", "get"), SCRIPT, OURS], ""),
        ([*BACKWARD, OURS, SCRIPT], "backward"),
        ([(C10D, "all_gather"), (WRAPPER, "wrapper"), (f"{PACKAGES}/a/b.py", "evaluate"), SCRIPT], "all_gather"),
        ([(C10D, "_wait"), (WRAPPER, "wrapper"), SCRIPT], "_wait"),
        ([(f"{PACKAGES}/torch/nn/modules/linear.py", "forward"), SCRIPT, (C10D, "barrier"), OURS], ""),
        ([PYTHON, OURS, SCRIPT], "agree"),  # for the other ranks, or for a device
        ([(f"{PACKAGES}/torch/utils/data/dataloader.py", "_get_data"), OURS, SCRIPT], ""),
        ([], ""),
    ],
)
def test_a_rank_that_waits_for_others_is_told_from_one_that_hangs(frames, function):
    stacks = main_thread(*frames)
    assert waits_in(stacks) == function
    assert line_in_script(stacks) == (f"{SCRIPT[0]}, line 9, in step" if frames else "")


READS, LOOPS = (
    (f"{PACKAGES}/torch/utils/data/dataloader.py", "_get_data"),
    (f"{PACKAGES}/torch/utils/data/_utils/worker.py", "_worker_loop"),
)
RECEIVES = (f"{PACKAGES}/torch/multiprocessing/reductions.py", "rebuild_storage_fd")
FORKED = [
    (multiprocessing.process.__file__, "_bootstrap"),
    READS,
    OURS,
    SCRIPT,
]  # frames of the rank, below those of its child
IDLE, READING = (
    main_thread(PYTHON, LOOPS, *FORKED),
    main_thread(PYTHON, ("/home/me/data.py", "__getitem__"), OURS, LOOPS, *FORKED),
)
IN_LIBRARY = main_thread((f"{PACKAGES}/torchvision/datasets/folder.py", "__getitem__"), OURS, LOOPS, *FORKED)


@pytest.mark.parametrize(
    ("rank", "loaders", "number", "line"),
    [
        (main_thread(PYTHON, READS, OURS, SCRIPT), [IDLE, READING], 1, "/home/me/data.py, line 9, in __getitem__"),
        (main_thread(PYTHON, RECEIVES, PYTHON, READS, OURS, SCRIPT), [READING, IDLE], 0, "/home/me/data.py, line 9, in __getitem__"),
        (main_thread(PYTHON, READS, OURS, SCRIPT), [IDLE, IN_LIBRARY], 1, ""),
        (main_thread(PYTHON, READS, OURS, SCRIPT), [READING, ""], 1, ""),  # stopped
        (main_thread(PYTHON, READS, OURS, SCRIPT), [IDLE, IDLE], None, ""),
        (main_thread(SCRIPT, OURS, SCRIPT), [READING, ""], None, ""),  # the rank does not wait for a batch
        ("", [READING, ""], None, ""),
    ],
)  # fmt: skip
def test_the_loader_process_for_which_a_rank_waits_is_named_with_its_line(rank, loaders, number, line):
    found = awaited(
        WorkerStacks(answer(1, rank), [LoaderProcess(i, answer(0, text)) for i, text in enumerate(loaders)])
    )
    assert (found and found.number) == number and line_in_script(found.process.stacks if found else "") == line


def test_a_loader_process_that_has_reset_its_handler_is_not_named():
    loaders = [LoaderProcess(0, ProcessStacks.of(os.getpid(), "")), LoaderProcess(1, answer(0, READING))]
    assert awaited(WorkerStacks(answer(1, main_thread(READS, SCRIPT)), loaders)).number == 1


def test_stacks_are_read_as_python_writes_them():
    stacks = stacks_of(lambda dump: dump())
    assert not waits_in(stacks)
    assert line_in_script(stacks).startswith(f"{__file__}, line ") and line_in_script(stacks).endswith(", in <lambda>")


@pytest.mark.skipif(os.geteuid() != 0, reason="py-spy may read the processes of others as root only")
def test_py_spy_shows_where_a_stopped_process_is(tmp_path):
    script = tmp_path / "stopped.py"
    script.write_text(
        "import os, signal\ndef stands_here():\n    os.kill(os.getpid(), signal.SIGSTOP)\nstands_here()\n"
    )
    with subprocess.Popen([sys.executable, str(script)]) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert why_silent(process.pid) == "it is stopped (SIGSTOP)"
            assert re.search(r"stands_here \(.*stopped\.py:3\)", seen_from_outside(process.pid))
        finally:
            process.kill()


def test_without_py_spy_nothing_is_seen_from_outside(monkeypatch):
    monkeypatch.setattr(stacks.shutil, "which", lambda *_, **__: None)
    assert seen_from_outside(os.getpid()) == ""


# ------------------------------------------------------------------ the check of an agent


def answer(pid, stacks):
    """Return what a process answers, or a stopped one if `stacks` is ""."""
    return ProcessStacks(pid, stacks, "" if stacks else "it is stopped (SIGSTOP)")


def silent(pids):
    """Return workers that do not answer, for a reason that is not known."""
    return {index: WorkerStacks(ProcessStacks(pid, ""), []) for index, pid in pids.items()}


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Return what makes a HangCheck of two ranks, their board and its clock."""
    clock = [0.0]
    monkeypatch.setattr(hang_check.time, "monotonic", lambda: clock[0])
    board = Board(2)

    def make(inspect=silent, **more):
        request = LaunchRequest(str(tmp_path), nproc_per_node=2, **more)
        is_one = request.num_nodes == 1
        names = ["", ""] if is_one else ["node 0 (a)", "node 1 (b)"]
        return HangCheck(
            request, RunDirectory(tmp_path), board, inspect, names.__getitem__, "" if is_one else " on node 0"
        )

    return make, board, clock


def stand(board, clock, found, seconds):
    for _ in range(round(seconds / 0.1)):
        clock[0] += 0.1
        if (failure := found.find([0, 1])) is not None:
            return failure
    return None


def train(board, *steps):
    for index, step in enumerate(steps):
        heartbeat = Heartbeat()
        heartbeat._beats = 3 * step
        heartbeat.attach(board._slot(index))
        board._slot(index)[4] = 1
        heartbeat.mark(TRAINING, step)
        board._slot(index)[8] = 0


def test_a_hang_names_rank_step_and_the_directory_with_a_file_for_each_rank(check, tmp_path):
    make, board, clock = check
    train(board, 9, 8)
    found = stand(board, clock, make(hang_timeout=2.0), 3)
    (directory,) = (tmp_path / "logs").glob("stacks-*")
    assert (found.rank, found.kind, found.reached) == (1, "hang", (1, 8))
    assert (
        str(found)
        == f"rank 1 hangs in step 8 (training): no progress for 2 s (hang_timeout=2); stacks are in {directory}"
    )
    assert {path.name for path in directory.iterdir()} == {"rank-0.txt", "rank-1.txt"}
    assert (
        (directory / "rank-1.txt")
        .read_text()
        .startswith("rank 1, process 0: in step 8 (training)\n\nThe process did not")
    )


@pytest.mark.parametrize(
    ("loader", "rest"),
    [(READING, ", it is at /home/me/data.py, line 9, in __getitem__; stacks"), (IN_LIBRARY, "; stacks"), ("", ", it is stopped (SIGSTOP); stacks")],
)  # fmt: skip
def test_a_hang_in_a_loader_process_names_it_and_keeps_its_stacks(check, tmp_path, loader, rest):
    make, board, clock = check
    rank = main_thread(PYTHON, READS, OURS, SCRIPT)
    loaders = {
        0: [LoaderProcess(0, answer(5, READING))],
        1: [
            LoaderProcess(0, answer(6, IDLE)),
            LoaderProcess(1, answer(7, loader)),
            LoaderProcess(1, answer(8, IDLE)),
        ],
    }
    inspect = lambda pids: {index: WorkerStacks(answer(0, rank), loaders[index]) for index in pids}  # noqa: E731
    train(board, 9, 8)
    found = stand(board, clock, make(inspect, hang_timeout=2.0), 3)
    assert (
        f"rank 1 hangs in step 8 (training): no progress for 2 s (hang_timeout=2), its loader process 1 stands still{rest}"
        in str(found)
    )
    assert found.location == (line_in_script(loader) or f"{SCRIPT[0]}, line 9, in step")
    (directory,) = (tmp_path / "logs").glob("stacks-*")
    assert {path.name for path in directory.iterdir()} == {
        "rank-0.txt", "rank-1.txt", "rank-0-loader-0.txt", "rank-1-loader-0.txt", "rank-1-loader-1.txt",
    }  # fmt: skip
    kept = (directory / "rank-1-loader-1.txt").read_text()
    assert kept.startswith(
        "loader process 1 of rank 1, process 7\n\n" + (loader or "The process did not answer: it is stopped")
    )
    assert "loader process 1 of rank 1, process 8\n\n" in kept  # of another loader


def test_ranks_whose_loader_processes_all_stand_are_listed_with_their_lines(check):
    make, board, clock = check

    def inspect(pids):
        waits = answer(0, main_thread(READS, OURS, SCRIPT))
        return {index: WorkerStacks(waits, [LoaderProcess(index, answer(5, READING))]) for index in pids}

    train(board, 9, 9)
    found = stand(board, clock, make(inspect, hang_timeout=2.0), 3)
    assert found.location == (
        "rank 0 in loader process 0 at /home/me/data.py, line 9, in __getitem__, rank 1 in loader process 1 at data.py, line 9,"
        " in __getitem__"
    )


@pytest.mark.parametrize(
    ("slow", "limit"), [(None, "no progress for 20 s (10 times hang_timeout=2)"), (4.0, "4 s (hang_timeout_slow=4)")]
)
def test_a_hang_in_a_save_names_its_own_limit(check, slow, limit):
    make, board, clock = check
    train(board, 9, 8)
    board._slot(1)[3] = 1  # what it does is slow by its nature
    assert limit in str(stand(board, clock, make(hang_timeout=2.0, hang_timeout_slow=slow), 21))


@pytest.mark.parametrize("off", [None, 0.0])
def test_without_hang_timeout_nobody_hangs(check, off):
    make, board, clock = check
    train(board, 9, 8)
    found = make(hang_timeout=off, timeout_s=1.0)
    assert stand(board, clock, found, 5) is None and found.find_late([0, 1]) is None


def test_the_time_in_which_the_agent_itself_was_stopped_does_not_count(check):
    make, board, clock = check
    train(board, 9, 8)
    found = make(hang_timeout=10.0)
    stand(board, clock, found, 1)
    clock[0] += 3600  # the machine or the container was paused
    assert stand(board, clock, found, 5) is None


def test_one_rank_that_collectives_have_waited_for_is_named_without_its_stacks(check):
    make, board, clock = check
    train(board, 9, 8)
    found = make(lambda pids: {}, hang_timeout=60.0, timeout_s=5.0)
    assert stand(board, clock, found, 6) is None
    late = found.find_late([1])
    assert (late.rank, late.message) == (1, "rank 1 hangs in step 8 (training): no progress for 6 s (timeout_s=5)")
    train(board, 9, 9)
    assert stand(board, clock, found, 6) is None and found.find_late([0, 1]) is None  # either may be the cause
    assert found.find_late([1]) is None  # it may have waited too


def test_ranks_that_go_on_while_their_stacks_are_read_do_not_hang(check, tmp_path):
    make, board, clock = check
    train(board, 9, 8)

    def inspect(pids):
        train(board, 9, 9)
        return silent(pids)

    found = make(inspect, hang_timeout=2.0)
    assert stand(board, clock, found, 3) is None and not list((tmp_path / "logs").glob("stacks-*"))


def test_ranks_of_several_nodes_are_named_with_their_node_and_their_lines(check):
    make, board, clock = check
    train(board, 9, 9)
    places = [main_thread((C10D, name), ("/home/me/train.py", "evaluate")) for name in ("broadcast", "all_gather")]

    def inspect(pids):
        return {rank: WorkerStacks(answer(pid, places[rank]), []) for rank, pid in pids.items()}

    found = stand(board, clock, make(inspect, hang_timeout=2.0, num_nodes=2), 3)
    assert found.message.startswith("ranks 0, 1 stand still in step 9 (training): no progress for 2 s (hang_timeout=2)")
    assert found.message.endswith(" on node 0")
    assert found.location == (
        "rank 0 in broadcast at /home/me/train.py, line 9, in evaluate, rank 1 in all_gather at train.py, line 9, in evaluate"
    )
    train(board, 9, 8)
    found = stand(board, clock, make(inspect, hang_timeout=2.0, num_nodes=2), 3)
    assert found.message.startswith("rank 1 on node 1 (b) hangs in step 8 (training)")


def test_a_hang_is_found_again_only_after_as_many_seconds(check):
    make, board, clock = check
    train(board, 9, 8)
    found, begin = make(hang_timeout=2.0), clock[0]
    assert stand(board, clock, found, 3) is not None and stand(board, clock, found, 1.8) is None
    assert stand(board, clock, found, 1) is not None and clock[0] - begin > 4


def test_a_rank_that_was_not_asked_for_its_stacks_does_not_count_as_stopped(check):
    make, board, clock = check
    train(board, 9, 9)

    def inspect(pids):
        line = main_thread(("/home/me/train.py", "evaluate"))
        return {
            0: WorkerStacks(answer(1, line), []), 1: WorkerStacks(ProcessStacks(2, "", "its launcher does not answer", was_asked=False), [])
        }  # fmt: skip

    assert stand(board, clock, make(inspect, hang_timeout=2.0), 3).rank == 0


def test_the_limit_stays_as_long_after_a_hang_as_the_updates_take(check):
    make, board, clock = check
    found = make(hang_timeout=2.0)
    for step in range(10, 20):
        train(board, step, step)
        assert stand(board, clock, found, 1.5) is None
    assert stand(board, clock, found, 7.6) is not None
    assert stand(board, clock, found, 7.0) is None and stand(board, clock, found, 0.7) is not None


def test_nobody_is_blamed_while_the_stacks_are_not_known(check, tmp_path):
    make, board, clock = check
    train(board, 9, 8)
    answers = [{}, {}, silent({0: 1, 1: 2})]
    found = make(lambda pids: answers.pop(0), hang_timeout=2.0)
    assert stand(board, clock, found, 3).rank == 1 and answers == []
    assert len(list((tmp_path / "logs").glob("stacks-*"))) == 1


def test_a_hang_restarts_the_run_and_is_the_cause_if_no_restart_is_left(tmp_path, capsys):
    run = RunDirectory(tmp_path)
    found = Verdicts(LaunchRequest(str(tmp_path), max_restarts=1), run, Display(io.StringIO(), live=False))
    for left, verdict in ((1, Verdict.RESTART), (0, Verdict.OVER)):
        found.begin({0: 0, 1: 1}, 1 - left)
        assert found.watched == {0: 0, 1: 1}
        found.blame(Failure(1, "hang", 1.0, message="rank 1 hangs in step 8", reached=(1, 8 - left)))
        assert found.watched == {0: 0}
        assert found.judge(left) is verdict
        found.add({"op": "exit", "local_rank": 1, "status": -9, "time": 2.0})
    found.show_end(1)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "warning: rank 1 hangs in step 8: restarting (1 of 1)"
    assert said[-1] == "error: rank 1 hangs in step 8; no restart is left (max_restarts=1)"


def test_the_rank_that_stood_still_is_the_cause_and_not_the_one_that_waited_for_it(tmp_path):
    found = Verdicts(LaunchRequest(str(tmp_path)), RunDirectory(tmp_path), Display(io.StringIO(), live=False))
    found.begin({0: 0, 1: 1}, 0)
    hang = Failure(1, "hang", 1.0, message="rank 1 hangs")
    found.find_hang = lambda: hang
    lost = {
        "op": "event", "kind": "error", "rank": 0, "message": "Timed out waiting 300000ms for recv", "type": "RuntimeError",
        "traceback": "", "exit_code": 1, "is_message_enough": False, "time": 5.0, "reached": [1, 9],
    }  # fmt: skip
    found.add({**lost})
    assert found.judge(3) is Verdict.RESTART and found.cause is hang
    found.begin({0: 0, 1: 1}, 1)
    found.add({**lost, "message": "a real error", "type": "ValueError"})
    assert found.judge(2) is Verdict.OVER and found.cause.type == "ValueError"


def test_nobody_is_watched_while_the_workers_save_and_end(tmp_path):
    found = Verdicts(LaunchRequest(str(tmp_path)), RunDirectory(tmp_path), Display(io.StringIO(), live=False))
    found.begin({0: 0, 1: 1}, 0)
    found.add({"op": "stop", "signum": 15, "is_first": True, "interrupts": 0, "is_starting": False})
    assert found.watched == {}
