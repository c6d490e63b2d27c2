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
