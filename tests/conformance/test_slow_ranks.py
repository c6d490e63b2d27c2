"""A rank that slows the others down is named once. Real workers train, and the launcher adds up their times."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path

import pytest

from tests.conformance.runs import FULL
from tests.conftest import free_port, needs_backend, patient

JOB = Path(__file__).parent / "jobs" / "slow_ranks.py"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def named(run_cli, tmp_path):
    """Return a function that trains on two processes, and returns the ranks that were named and the output."""

    def run(*cases, flags=()):
        command = [
            "train",
            "--script",
            str(JOB),
            "--nproc-per-node",
            "2",
            "--run-dir",
            str(tmp_path / "run"),
            *flags,
            "--",
            *cases,
        ]
        done = run_cli(command, timeout=120)
        assert done.returncode == 0, done.output[-3000:]
        return [line for line in done.stderr.splitlines() if "slows the others down" in line]

    return run


@pytest.mark.parametrize(
    "backend", ["pytorch-ddp", *(pytest.param(name, marks=FULL) for name in ("fsdp", "deepspeed", "ray"))]
)
def test_a_rank_with_a_slow_loader_and_one_with_slow_passes_are_named(named, tmp_path, backend):
    needs_backend(backend)
    first, second = named("loader", "step", flags=("--backend", backend))
    assert first.startswith("warning: rank 1 slows the others down: in ") and "(data " in first
    assert second.startswith("warning: rank 0 slows the others down: in ")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    loader, step = [event for event in events if event["event"] == "slow_rank"]
    assert loader["rank"] == 1 and loader["data"] > 0.5 and loader["communication"] < 0.3
    assert step["rank"] == 0 and step["compute"] > 0.5 and step["communication"] < 0.3
    assert "slow rank" in (tmp_path / "run" / "report.html").read_text()


def test_a_slow_node_with_one_rank_is_named_on_node_0(start, tmp_path):
    port = str(free_port())

    def begin(node):
        command = ["train", "--script", str(JOB), "--num-nodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"]
        flags = ["--master-addr", "127.0.0.1", "--master-port", port, "--run-dir", str(tmp_path / "run")]
        return start([sys.executable, "-m", "distributed.cli", *command, *flags, "--", "loader"])

    launchers = [begin(1), begin(0)]
    other, main = (launcher.finish(patient(120)) for launcher in launchers)
    assert main.returncode == other.returncode == 0, main.output + other.output
    (line,) = [line for line in main.stderr.splitlines() if "slows the others down" in line]
    assert line.startswith(f"warning: rank 1 on node 1 ({socket.gethostname()}) slows the others down: in ")
    assert "slows the others down" not in other.output
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    (event,) = [event for event in events if event["event"] == "slow_rank"]
    assert (event["rank"], event["host"]) == (1, socket.gethostname()) and event["data"] > 0.5


@FULL
@pytest.mark.parametrize("flags", [(), ("--backend", "fsdp"), ("--backend", "deepspeed")])
def test_ranks_that_are_equally_slow_or_slow_for_ten_updates_only_are_not_named(named, flags):
    assert named("equal", "briefly", flags=flags) == []


@FULL
def test_no_rank_of_many_short_runs_is_named(named):
    assert named(*["short"] * 20) == []
