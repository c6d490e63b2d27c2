"""`distributed why` decides from the files of a run what became of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from distributed.cli.__main__ import run as run_command
from distributed.cli.why import lines_of
from distributed.config.registry import REGISTRY
from distributed.errors import ConfigError
from distributed.launching.causes import Failure, location_of, message_of
from distributed.launching.heartbeat import Heartbeat, Phase, phase_of
from distributed.launching.verdicts import _facts_of
from distributed.runs.directory import RunDirectory
from distributed.runs.fixes import FIXES, STANDING_STILL
from distributed.runs.remote import record_checkpoints
from distributed.runs.why import STANDING, read_why

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"
DEAD = "process 4194300 on {host}\n"  # above the largest process id of a usual Linux
KILLED = {
    "rank": 1, "cause": "rank 1 was killed by signal 9 (SIGKILL)", "kind": "signal", "in_step": 41, "phase": "training",
    "then": "restarting (1 of 3)",
}  # fmt: skip


def made(
    path: Path, *events: tuple[str, dict[str, Any]], status: str = "failed", ago: float = 0.0, **result: Any
) -> Path:
    """Write a run with these events, the last of them `ago` seconds ago, and return its directory."""
    path.mkdir(parents=True, exist_ok=True)
    now = time.time() - ago
    lines = [
        {"time": now - len(events) + place, "event": name, **detail} for place, (name, detail) in enumerate(events, 1)
    ]
    (path / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    known = {"steps": 40, "epochs": 1, "final_metrics": {"step": 40, "epoch": 1}, "world_size": 2}
    (path / "result.json").write_text(json.dumps({"status": status, **known, **result}))
    return path


def started(count: int = 0, step: int = 0) -> tuple[str, dict[str, Any]]:
    return "started", {"restart_count": count, "step": step}


def said(path: Path) -> str:
    lines = lines_of(read_why(path))
    assert all(len(line) <= 80 or " " not in line.strip() for line in lines[1:]), lines
    return " ".join(" ".join(lines).split())


def test_a_run_that_failed_for_good_names_the_last_failure_and_what_was_done_before(tmp_path: Path) -> None:
    over = {**KILLED, "then": "no restart is left (max_restarts=1)"}
    run = made(
        tmp_path / "run", started(), ("worker_failed", KILLED), ("restarted", {}), started(1, 30), ("worker_failed", over),
        checkpoint="checkpoints/step-00000030",
    )  # fmt: skip
    for step in (20, 30):
        (run / "checkpoints" / f"step-{step:08d}").mkdir(parents=True)
    text = said(run)
    assert (
        ": failed in step 41, epoch 1 cause rank 1 was killed by signal 9 (SIGKILL) where rank 1, step 41 (training)"
        in text
    )
    assert "then restarted once, from step 30; no restart is left (max_restarts=1) try Most often" in text
    assert text.endswith(f"continue with --run-dir {run} --resume, from step-00000030")
    (run / "checkpoints" / "step-00000030").rename(run / "checkpoints" / "damaged-step-00000030")
    assert said(run).endswith(f"continue with --run-dir {run} --resume, from step-00000020")
    shutil.rmtree(run / "checkpoints")
    assert "continue" not in said(run)


def test_a_checkpoint_that_is_not_in_the_run_directory_is_taken_as_it_was_recorded(tmp_path: Path) -> None:
    over = {**KILLED, "then": "max_restarts=0"}
    run = made(tmp_path / "run", started(), ("worker_failed", over), checkpoint="../elsewhere/step-00000030")
    assert "from step-00000030" in said(run)
    run = made(tmp_path / "other", started(), ("worker_failed", over), checkpoint="checkpoints/step-00000030")
    assert "continue" not in said(run)
    assert "continue" not in said(made(tmp_path / "none", started(), ("worker_failed", over), checkpoint=""))
    record_checkpoints(run, "s3://bucket/run/checkpoints", keep_latest_k=1, keep_best=False)
    assert "from step-00000030" in said(run)


def test_failures_of_an_earlier_launch_are_not_those_of_this_one(tmp_path: Path) -> None:
    over = {**KILLED, "then": "max_restarts=0"}
    run = made(
        tmp_path / "run",
        started(),
        ("worker_failed", over),
        started(0, 30),
        ("finished", {"epoch": 1}),
        status="finished",
    )
    assert said(run) == f"{run}: finished at step 40, epoch 1"
    other = {"rank": 0, "cause": "rank 0 failed with ImportError: no", "kind": "exception"}
    run = made(
        tmp_path / "again", started(), ("worker_failed", over), ("worker_failed", other)
    )  # before its first step
    assert "rank 0 failed with ImportError" in said(run) and read_why(run).num_failures == 1


def test_a_script_that_fails_after_a_fit_that_finished_has_failed(tmp_path: Path) -> None:
    failed = {
        "rank": 0,
        "cause": "rank 0 failed with KeyError: 'x'",
        "kind": "exception",
        "place": "train.py, line 9, in <module>",
    }
    run = made(tmp_path / "run", started(), ("finished", {}), ("worker_failed", failed), status="finished")
    assert ": failed at step 40" in said(run) and "rank 0, outside of a fit, at train.py, line 9, in <module>" in said(
        run
    )


def test_a_run_that_shows_no_progress_is_told_from_one_that_is_slow(tmp_path: Path) -> None:
    run = made(tmp_path / "run", started(), status="running", ago=400)
    directory = RunDirectory(run)
    directory.lock()
    try:
        rows = [{"time": time.time() - 400 + 2 * step - 80, "step": step, "epoch": 0} for step in range(41)]
        directory.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert read_why(run).verdict == STANDING
        text = said(run)
        assert (
            "standing still at step 40" in text
            and "no sign of progress for 6 min 40 s; its log lines usually come every 2 s" in text
        )
        assert "py-spy dump --pid PID" in text and "last sign of progress 6 min 40 s ago, at step 40" in text
        (run / "config.yaml").write_text("hang_timeout: 900\n")
        assert read_why(run).verdict == "running"
        (run / "config.yaml").unlink()
        directory.metrics.write_text("")  # no update has ended
        assert read_why(run).verdict == "running"
        (run / "config.yaml").write_text("hang_timeout_slow: 300\n")
        assert read_why(run).verdict == STANDING
        (run / "config.yaml").unlink()
        directory.event("slow_rank", cause="rank 1 slows the others down")
        directory.metrics.write_text("")
        assert read_why(run).verdict == "running"  # a sign of life
    finally:
        directory.unlock()


def test_a_clock_that_was_set_back_makes_nobody_stand_still(tmp_path: Path) -> None:
    run = made(tmp_path / "run", started(), status="running", ago=-86400)  # the events are of tomorrow
    directory = RunDirectory(run)
    directory.lock()
    try:
        assert read_why(run).verdict == "running" and "last sign of progress 0 s ago" in said(run)
    finally:
        directory.unlock()


def test_a_launcher_that_ended_without_a_last_word_is_named(tmp_path: Path) -> None:
    import socket

    run = made(
        tmp_path / "run", started(), ("checkpoint_saved", {"step": 40, "checkpoint": "step-00000040"}), status="running"
    )
    (run / ".lock").write_text(DEAD.format(host=socket.gethostname()))
    (run / "logs").mkdir()
    (run / "logs/rank-0.log").touch()
    text = said(run)
    assert (
        ": killed at step 40" in text
        and "the launcher (process 4194300 on " in text
        and "it was killed (SIGKILL)" in text
    )


def test_without_our_launcher_the_process_that_is_gone_is_rank_0(tmp_path: Path) -> None:
    import socket

    run = made(tmp_path / "run", started(), status="running")
    (run / ".lock").write_text(DEAD.format(host=socket.gethostname()))
    assert "cause rank 0 (process 4194300 on " in said(run) and "ended without recording a cause: it was" in said(run)
    (run / "logs").mkdir()
    (run / "logs/rank-0.log").touch()  # as of `train` under mpirun
    (run / "config.yaml").write_text("num_nodes: 2\nsources:\n  num_nodes: launcher\n")
    assert "cause rank 0 (process 4194300 on " in said(run)
    (run / "config.yaml").unlink()
    assert "cause the launcher (process 4194300 on " in said(run)


LOST = {
    "rank": 0, "node": 0, "cause": "rank 0 on node 0 (a) lost the connection to another rank", "kind": "exception", "in_step": 21,
    "phase": "training", "place": "train.py, line 9, in <module>", "then": "restarting",
}  # fmt: skip
GONE = ("node_lost", {"node": 1, "cause": "node 1 (b) has ended, or its connection broke"})


def test_a_lost_node_is_the_cause_of_a_lost_connection_before_it(tmp_path: Path) -> None:
    back = ("node_joined", {"node": 1, "host": "b"}), ("restarted", {}), started(1, 20), ("finished", {})
    run = made(tmp_path / "run", started(), ("worker_failed", LOST), GONE, *back, status="finished")
    assert said(run).endswith(
        "cause failed once before, last: node 1 (b) has ended, or its connection broke where node 1, step 21 (training)"
        " then node 1 was lost and has joined again; restarted once, from step 20"
    )
    over = ("node_failed", {"cause": "node 1 (b) did not come back within 5 s (node_timeout)"})
    run = made(tmp_path / "over", started(), ("worker_failed", LOST), GONE, over)
    assert "cause node 1 (b) did not come back within 5 s (node_timeout) then node 1 was lost" in said(run)
    killed = ("worker_failed", KILLED)
    run = made(tmp_path / "other", started(), killed, GONE)  # it explains no failure with a cause of its own
    assert "cause rank 1 was killed by signal 9 (SIGKILL)" in said(run)
    run = made(tmp_path / "ray", started(), ("worker_failed", LOST), ("node_lost", {"node": "b"}))  # has no cause
    assert "cause rank 0 on node 0 (a) lost the connection" in said(run)


def test_nodes_that_come_and_leave_are_told_from_lost_ones(tmp_path: Path) -> None:
    left = ("node_lost", {"node": 2, "cause": "node 2 (c, 10.0.0.3) was stopped by SIGTERM"})
    come = ("node_joined", {"node": 2, "host": "c"}), ("regrouped", {"step": 28}), started(2, 28)
    run = made(tmp_path / "run", started(), GONE, *come, status="finished")
    assert said(run).endswith("then node 1 was lost; node 2 joined; went on, from step 28")
    run = made(tmp_path / "left", started(), GONE, *come, left, ("finished", {}), status="finished")
    assert said(run).endswith("then node 1 was lost; node 2 was stopped by SIGTERM; went on, from step 28")


def test_what_the_launcher_was_about_to_do_is_told_as_done_afterwards(tmp_path: Path) -> None:
    failed = ("worker_failed", {**KILLED, "then": "going on with 2 processes"})
    assert "then going on with 2 processes" in said(made(tmp_path / "now", started(), failed, status="running"))
    again = ("regrouped", {}), started(1, 10), ("regrouped", {}), started(2, 40), ("finished", {})
    run = made(tmp_path / "fewer", started(), failed, *again, status="finished")
    assert "then went on with 2 processes, from step 10, step 40 try" in said(run)
    part = made(tmp_path / "part", started(), ("worker_failed", KILLED), started(1, 20), ("finished", {}))
    assert "then went on, from step 20 try" in said(part)  # only node 0 records `restarted`
    twice = ("restarted", {}), started(1, 10), failed, ("regrouped", {}), started(2, 30)
    run = made(tmp_path / "both", started(), ("worker_failed", KILLED), *twice, status="running")
    assert "then restarted once, went on with 2 processes, from step 10, step 30" in said(run)


def test_the_last_line_is_that_of_the_failed_attempt(tmp_path: Path) -> None:
    run = made(tmp_path / "run", started(), ("worker_failed", KILLED))
    (run / "logs").mkdir()
    note = (
        "[W1127 21:53:37.491149907 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    )
    (run / "logs/rank-1.log").write_text(
        f"[rank 1 21:53:36] reading\n[rank 1 21:53:37] {note}\n[rank 1 21:53:38] [rank1]:{note}\n"
    )
    problem = read_why(run).problem
    assert problem is not None and problem.last_output == "reading"
    made(
        run,
        started(),
        ("worker_failed", KILLED),
        ("restarted", {}),
        started(1, 30),
        ("finished", {}),
        status="finished",
    )
    problem = read_why(run).problem
    assert problem is not None and problem.last_output == ""


def test_a_node_that_a_signal_stopped_alone_has_saved(tmp_path: Path) -> None:
    run = made(tmp_path / "part", started(), ("regrouped", {"step": 34}))
    (run / "result.json").unlink()
    (run / ".part").write_text("node 2 of a run of a\nprocess 4194300 on another-host\n")
    assert said(run) == (
        f"{run}: interrupted at step 34, according to node 2 of a run of a cause stopped by a signal, after a checkpoint"
    )


def test_nodes_that_are_missing_get_other_advice_than_ranks(tmp_path: Path) -> None:
    cause = {"cause": "node 1 did not join within 15 s (start_timeout)"}
    text = said(made(tmp_path / "nodes", ("node_failed", cause), steps=0, epochs=0, final_metrics=None))
    assert "try If a node is missing, its command was not started" in text
    assert text.endswith("Run distributed doctor --num-nodes N --node-rank R --master-addr HOST on each node.")
    cause = {"cause": "rank 1 did not join within start_timeout=600 s: every rank must call fit()"}
    assert "try If ranks of one node are missing" in said(made(tmp_path / "ranks", ("worker_failed", cause)))


def test_a_lost_connection_is_not_the_cause_if_another_node_has_one(tmp_path: Path) -> None:
    lost = {
        "rank": 0,
        "node": 0,
        "cause": "rank 0 on node 0 (a) lost the connection to another rank",
        "then": "restarting",
    }
    again = ("restarted", {}), started(1, 30), ("finished", {})
    run = made(
        tmp_path / "run",
        started(),
        ("worker_failed", lost),
        ("worker_failed", {**KILLED, "node": 1}),
        *again,
        status="finished",
    )
    assert "failed once before, last: rank 1 was killed" in said(run) and "then restarted once, from step 30" in said(
        run
    )


def test_the_first_cause_of_a_launch_counts_and_not_what_ended_after_it(tmp_path: Path) -> None:
    """The lock of a directory is written at each launch."""
    over = {**KILLED, "node": 1, "then": "max_restarts=0"}
    other = {"rank": 0, "node": 0, "cause": "rank 0 on node 0 (a) failed with OSError: gone", "kind": "exception"}
    run = made(
        tmp_path / "run",
        started(),
        ("worker_failed", over),
        ("worker_failed", other),
        ("node_failed", {"cause": "node 1 has ended"}),
    )
    (run / ".lock").touch()
    os.utime(run / ".lock", (time.time(), time.time() - 60))
    assert "rank 1 was killed" in said(run)
    os.utime(run / ".lock", (time.time(), time.time() - 1.5))  # the last two events are of another launch
    assert "rank 0 on node 0 (a) failed with OSError" in said(run)


def test_failed_saves_and_damaged_checkpoints_are_named(tmp_path: Path) -> None:
    lost = ("save_failed", {"step": 4, "checkpoint": "step-00000004", "cause": "No space left on device"})
    run = made(tmp_path / "run", started(), lost, ("finished", {}), status="finished")
    (run / "checkpoints" / "damaged-step-00000002").mkdir(parents=True)
    assert "saves 1 failed, last step-00000004: No space left on device; set aside: damaged-step-00000002" in said(run)


def test_deleted_checkpoints_are_named(tmp_path: Path) -> None:
    deleted = ("checkpoints_deleted", {"path": str(tmp_path / "run/checkpoints/step-00000004")})
    run = made(tmp_path / "run", started(), deleted, ("finished", {}), status="finished")
    assert "saves deleted during the run: step-00000004" in said(run)


def test_a_node_is_named_and_so_is_the_end_by_a_signal(tmp_path: Path) -> None:
    run = made(
        tmp_path / "run", started(), ("node_failed", {"cause": "node 1 (b) has been lost: no sign of it for 30 s"})
    )
    assert "cause node 1 (b) has been lost" in said(run)
    run = made(tmp_path / "run", started(), ("worker_failed", {**KILLED, "node": 1, "then": "max_restarts=0"}))
    assert "where rank 1, node 1, step 41 (training)" in said(run)
    run = made(tmp_path / "run", started(), ("preempted", {"step": 40, "signal": 15}), status="interrupted")
    assert "interrupted at step 40, epoch 1 cause stopped by SIGTERM, after a checkpoint" in said(run)


def test_a_run_of_another_launcher_or_of_an_older_version_has_its_error(tmp_path: Path) -> None:
    run = made(tmp_path / "foreign", started(), error="ValueError: boom")
    assert said(run) == f"{run}: failed at step 40, epoch 1 cause ValueError: boom"
    old = {"rank": 0, "cause": "rank 0 exited with code 3"}
    assert "rank 0 exited with code 3" in said(made(tmp_path / "old", started(), ("worker_failed", old)))


def test_an_error_that_all_ranks_raised_is_of_the_rank_that_it_names(tmp_path: Path) -> None:
    nan = {
        "rank": 0,
        "cause": "step 5: the loss is nan on rank 3 (samples at positions 32 to 39 of the epoch)",
        "kind": "error",
    }
    assert read_why(made(tmp_path / "run", started(), ("worker_failed", nan))).problem.rank == 3  # type: ignore[union-attr]
    saves = {"rank": 1, "cause": "3 failed saves in a row: free disk space", "kind": "error"}
    assert read_why(made(tmp_path / "run", started(), ("worker_failed", saves))).problem.rank is None  # type: ignore[union-attr]


def test_json_has_the_same_and_no_run_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path / "run", started(), ("worker_failed", {**KILLED, "then": "max_restarts=0"}))
    assert run_command(["why", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["problem"]["rank"], found["problem"]["step"], found["problem"]["phase"]) == (
        "failed",
        1,
        41,
        "training",
    )
    with pytest.raises(
        ConfigError, match=r"is not a run directory: name a run, 'distributed runs \S*' lists those in it"
    ):
        run_command(["why", str(tmp_path)])
    with pytest.raises(ConfigError, match=r"'distributed why' works on directories of this machine"):
        run_command(["why", "s3://bucket/run"])


def test_every_fix_is_a_sentence_of_the_page() -> None:
    page = " ".join(re.sub(r"`|\[|\]\([^)]*\)", "", PAGE.read_text()).split()).lower()
    hints = [hint for name in ("single",) for part, hint in REGISTRY[name].hints.items() if part in PAGE.read_text()]
    sentences = [*(each for fix in FIXES.values() for each in fix), *STANDING_STILL]
    sentences += [each for hint in hints for each in re.split(r"(?<=\.) (?=[A-Z])", hint)]
    assert len(sentences) > 10 and [each for each in sentences if each.rstrip(".").lower() not in page] == []


# ------------------------------------------------------------------ what the journal gets to know


def test_an_error_keeps_the_phase_in_which_it_left_the_fit() -> None:
    heartbeat, error = Heartbeat(), ValueError("no")
    assert phase_of(error) is Phase.SCRIPT

    def train() -> None:
        with heartbeat.fit():
            heartbeat.mark(Phase.DATA, 3)
            raise error

    with pytest.raises(ValueError, match="no"):
        train()
    assert phase_of(error) is Phase.DATA and heartbeat.progress.phase is Phase.SCRIPT
    facts = _facts_of(
        Failure(1, "exit", 1.0, reached=(1, 3), phase=phase_of(error).in_fit, location="train.py, line 3, in f")
    )
    assert facts == {"kind": "exit", "in_step": 3, "phase": "reading data", "place": "train.py, line 3, in f"}
    assert _facts_of(Failure(1, "exit", 1.0, phase=Phase.SCRIPT.in_fit)) == {"kind": "exit"}


def test_the_location_of_an_error_is_in_the_users_code() -> None:
    def fail(error: Exception) -> Exception:
        try:
            raise error
        except type(error) as caught:
            return caught

    inner = fail(MemoryError())
    outer = ConfigError("too large")
    outer.__cause__ = inner
    assert location_of(inner).endswith(", in fail") and location_of(outer) == location_of(inner)
    frames = f'  File "{re.__file__}", line 3, in x\n  File "/a/t.py", line 12, in __getitem__\n'
    of_loader = f"Caught ValueError in DataLoader worker process 0.\nOriginal\n{frames}"
    assert location_of(fail(ValueError(of_loader))) == "/a/t.py, line 12, in __getitem__"
    assert location_of(SyntaxError("bad", ("/a/t.py", 4, 1, "x"))) == "/a/t.py, line 4"
    assert location_of(ValueError("never raised")) == ""

    class Broken(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    assert location_of(fail(Broken())).endswith(", in fail") and isinstance(message_of(Broken()), str)
