"""Lose workers, nodes and links of runs on several machines, and check what `distributed why` says on node 0 and elsewhere."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from distributed.cli.why import lines_of
from distributed.runs.why import read_why
from tests.cli.test_many_nodes import Job
from tests.conftest import Started, poll
from tests.faults.test_faults import JOB, numbered
from tests.machines import Machines

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def why(home: Path) -> str:
    (run,) = home.glob("runs/*")
    return " ".join(" ".join(lines_of(read_why(run))).split())


def test_a_killed_worker_of_another_node_is_named_with_its_node_and_step(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    job = Job(make_machines(2), start, wait_s=0.03)
    job.until_step(40)
    os.kill(job.worker(1), signal.SIGKILL)
    job.weights()
    for said in (why(job.machines.homes[0]), why(job.machines.homes[1])):
        found = re.search(
            r"finished at step (\d+).* failed once before, last: rank 1 on node 1 \(node1\) was killed by signal 9 \(SIGKILL\)",
            said,
        )
        assert found is not None, said
        assert re.search(r"where rank 1, node 1, step \d+ \([a-z ]+\)", said), said


def test_a_lost_node_is_named_while_it_is_missing_and_after_its_return(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    job = Job(make_machines(2), start, wait_s=0.03)
    job.until_step(40)
    os.kill(job.nodes[1].pid, signal.SIGKILL)
    poll(lambda: "waiting 120 s for it or its replacement" in job.text(0), 20, lambda: job.text(0))
    assert "node 1 was lost" in why(job.machines.homes[0])
    job.nodes[1] = job.begin(1)
    job.weights()
    assert "finished" in (said := why(job.machines.homes[0])) and "node 1 was lost and has joined again" in said, said


def test_a_link_that_stays_down_is_named_on_both_sides(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    job = Job(make_machines(2), start, "--set", "node_timeout=5", wait_s=0.03)
    job.until_step(20)
    job.machines.link(1, "down")
    assert [node.finish(60).returncode for node in job.nodes] == [1, 1]
    said = [why(home) for home in job.machines.homes]
    assert "failed" in said[0] and "node 1 (node1, 10.99.0.2) did not come back within 5 s (node_timeout)" in said[0], (
        said[0]
    )
    assert "failed" in said[1] and "node 0 (10.99.0.1) is lost: it did not answer for 5 s (node_timeout)" in said[1], (
        said[1]
    )


HANGS = {
    "stop": ("rank 1 on node 1 (node1) hangs in step 3 (callbacks)", "it is stopped (SIGSTOP)", "rank 1, node 1, step 3"),
    "loop-loader": (
        "rank 1 on node 1 (node1) hangs in step 3 (reading data)", "its loader process 0 stands still", "line {time.sleep(0.01)},",
    ),
    "order": (
        "ranks 0, 1 stand still in step 3", "rank 0 in broadcast at", "line {dist.broadcast(},",
        "rank 1 in all_gather at train.py, line {# the others call},",
    ),
    "stays-away": (
        "ranks 0, 1 stand still in step 3", "rank 0 in barrier at", "line {dist.barrier()},", "rank 1 in all_gather at",
    ),
}  # fmt: skip


@pytest.mark.parametrize("fault", HANGS)
def test_a_hang_is_named_with_the_stacks_of_the_ranks_of_all_nodes(
    make_machines: Callable[[int], Machines], start: Callable[..., Started], fault: str
) -> None:
    job = Job(make_machines(2), start, "--set", "hang_timeout=2", "--", fault, script=JOB.read_text())
    ended = [node.finish(120) for node in job.nodes]
    assert [each.returncode for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    said, position = why(job.machines.homes[0]), 0
    for part in map(numbered, HANGS[fault]):
        position = said.find(part, position)
        assert position >= 0, f"{part!r} is missing in:\n{said}"
    (run,) = job.machines.homes[0].glob("runs/*")
    kept = {file.name: file.read_text() for file in run.glob("logs/stacks-*/*")}
    assert {"rank-0.txt", "rank-1.txt"} <= kept.keys() and "rank 1 on node 1 (node1), process" in kept["rank-1.txt"]
    assert not list(job.machines.homes[1].glob("runs/*/logs/stacks-*"))


def test_the_rank_of_another_node_for_which_a_collective_has_waited_too_long_is_named(
    make_machines: Callable[[int], Machines], start: Callable[..., Started]
) -> None:
    flags = ("--set", "timeout_s=10", "--set", "hang_timeout=60", "--", "loop-callback")
    job = Job(make_machines(2), start, *flags, script=JOB.read_text())
    ended = [node.finish(120) for node in job.nodes]
    assert [each.returncode for each in ended] == [0, 0], "\n".join(each.output for each in ended)
    said = why(job.machines.homes[0])
    assert re.search(
        r"rank 1 on node 1 \(node1\) hangs in step 3 \(callbacks\): no progress for ([89]|1[0-2]) s \(timeout_s=10\)",
        said,
    ), said
    assert re.search(r"where rank 1, node 1, step 3 \(callbacks\), at \S+train.py, line \d+, in loop_for_ever", said), (
        said
    )
