"""A run directory is proved usable, belongs to one run, and keeps a journal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from distributed.errors import ConfigError, ResourceError
from distributed.runs.directory import RunDirectory, choose_run_dir
from distributed.runs.why import read_why
from distributed.training.remote import failure

HOLD = """
import sys
from distributed.runs.directory import RunDirectory
RunDirectory(sys.argv[1]).lock()
print("held", flush=True)
sys.stdin.read()
"""

ORPHAN = """
import os, sys, time
from distributed.runs.directory import RunDirectory
RunDirectory(sys.argv[1]).lock()
worker = os.fork()
if worker:
    print(worker, flush=True)
else:
    os.close(1)
    time.sleep(60)
"""


def test_a_name_says_script_and_time_and_is_never_the_same():
    first, second = choose_run_dir("code/train.py"), choose_run_dir("code/train.py")

    assert re.fullmatch(r"runs/train-\d{8}-\d{6}-[0-9a-f]{4}", str(first))
    assert first != second


def test_a_line_of_the_journal_that_is_no_event_is_ignored(tmp_path):
    run = RunDirectory(tmp_path)
    run.events.write_text('null\n7\n["event"]\n{"time": 1.0}\n{"time": 2.0, "event": "started"}\n{"time": 3')
    assert run.read_events() == [{"time": 2.0, "event": "started"}]
    assert run.last_failure(0) is None


def test_fit_names_the_cause_that_why_names(tmp_path):
    """Each node writes its failure into the journal, in any order, and then node 0 may write that another node has ended."""
    run = RunDirectory(tmp_path)
    run.lock()
    run.event("started", restart_count=0)
    run.event("worker_failed", rank=0, cause="rank 0 failed with KeyError", then="restarting (1 of 3)")
    run.event("restarted", restart_count=1)
    run.event("worker_failed", rank=0, node=0, cause="rank 0 on node 0 (a) lost the connection to another rank")
    run.event("worker_failed", rank=1, node=1, cause="rank 1 on node 1 (b) was killed by signal 9 (SIGKILL)")
    run.event("node_failed", cause="node 1 (b) has ended")
    (tmp_path / "result.json").write_text('{"status": "failed"}')
    run.unlock()
    cause = run.last_failure(0)["cause"]
    assert cause == "rank 1 on node 1 (b) was killed by signal 9 (SIGKILL)"
    assert read_why(tmp_path).problem.cause == cause
    assert str(failure(1, run)).startswith(cause)


def test_fit_names_a_lost_node_and_no_log_of_the_rank_that_only_noticed_it(tmp_path):
    run = RunDirectory(tmp_path)
    text, lost = (
        "rank 0 on node 0 (a) lost the connection to another rank",
        "node 1 (b) has ended, or its connection broke",
    )
    run.event("worker_failed", rank=0, node=0, cause=text, kind="exception", traceback="Traceback ...")
    run.event("node_lost", node=1, cause=lost)
    assert str(failure(1, run)) == lost
    run.event("node_failed", cause="node 1 (b) did not come back within 5 s (node_timeout)")
    assert str(failure(1, run)) == "node 1 (b) did not come back within 5 s (node_timeout)"


def test_a_finder_before_the_run_does_not_make_it_an_earlier_one(tmp_path):
    for name in ("learning-rate", "learning-rate-2"):
        (tmp_path / name).mkdir()
    RunDirectory(tmp_path).check(resume=False)
    RunDirectory(tmp_path).check_resumable()
    (tmp_path / "learning-rates").mkdir()
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory(tmp_path).check(resume=False)


def test_resuming_a_directory_that_is_not_there_names_the_nearest_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("runs/digits", "runs/gpt-small"):
        (tmp_path / name).mkdir(parents=True)
        RunDirectory(name).event("finished")
    (tmp_path / "runs" / "digitss").mkdir()  # nearer, and no run
    for typo in ("runs/digtis", "run/digits", str(tmp_path / "runs" / "digit")):
        with pytest.raises(
            ConfigError, match=r"does not exist, .*did you mean '.*runs/digits'\?.*: correct --run-dir, or drop --res"
        ):
            RunDirectory(typo).check_resumable()
        assert not Path(typo).exists()
    with pytest.raises(ConfigError, match=r"'other' does not exist, but --resume continues an existing run: correct"):
        RunDirectory("other").check_resumable()
    RunDirectory("runs/digitss").check_resumable()  # empty: the first of attempts that all say --resume
    RunDirectory("runs/digits").check_resumable()


def test_a_checked_directory_is_left_empty(tmp_path):
    run = RunDirectory(tmp_path / "a" / "b")

    run.check(resume=False)

    assert list(run.path.iterdir()) == []


def test_an_earlier_run_needs_resume(tmp_path):
    run = RunDirectory(tmp_path)
    run.event("finished")

    with pytest.raises(ConfigError, match=r"is not empty: add --resume .* --run-dir"):
        run.check(resume=False)
    run.check(resume=True)


def test_a_file_is_no_directory(tmp_path):
    (tmp_path / "file").touch()

    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigError, match="is not a directory: name another with --run-dir"):
            RunDirectory(path).check(resume=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)

    with pytest.raises(ConfigError, match="cannot be written"):
        RunDirectory(tmp_path).check(resume=False)


def test_a_full_disk_is_refused_with_its_numbers(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)

    with pytest.raises(ConfigError, match=r"is full: 65536 bytes needed, \d+ free"):
        RunDirectory(tmp_path).check(resume=False)
    assert list(tmp_path.iterdir()) == []


def test_a_live_run_keeps_others_out_and_a_dead_one_does_not(tmp_path):
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "held\n"
        for use in (lambda run: run.check(resume=True), lambda run: run.lock()):
            with pytest.raises(ResourceError, match=f"is in use by process {holder.pid} on "):
                use(RunDirectory(tmp_path))
        holder.kill()
    run = RunDirectory(tmp_path)
    run.check(resume=False)
    run.lock()


def test_a_directory_is_free_when_the_last_worker_of_a_killed_launcher_is_gone(tmp_path):
    """A launcher that dies first leaves the lock to its workers, for as long as they take to follow it."""
    launcher = subprocess.Popen([sys.executable, "-c", ORPHAN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    with launcher:
        assert launcher.stdout is not None
        worker = int(launcher.stdout.readline())
        assert launcher.wait(10) == 0
        timer = threading.Timer(0.3, os.kill, (worker, signal.SIGKILL))
        timer.start()
        RunDirectory(tmp_path).check(resume=True)
        RunDirectory(tmp_path).lock()
        timer.join()


def test_events_are_whole_lines(tmp_path):
    run = RunDirectory(tmp_path)

    run.event("started", world_size=2)
    run.event("worker_failed", rank=1, cause="two\nlines")

    lines = [json.loads(line) for line in run.events.read_text().splitlines()]
    assert [(line["event"], line.get("rank")) for line in lines] == [("started", None), ("worker_failed", 1)]
    assert lines[0]["time"] <= lines[1]["time"]
