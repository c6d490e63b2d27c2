"""A new engine is one file and one registry entry."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def run(directory: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script of this directory as a command does, with `directory` as its working directory."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    return subprocess.run(
        [sys.executable, str(HERE / script), *arguments],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def printed(done: subprocess.CompletedProcess[str]) -> Any:
    """Return the JSON in the last line that a script printed."""
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_an_engine_of_one_file_and_one_registry_entry_trains_and_resumes(tmp_path: Path) -> None:
    found = printed(run(tmp_path, "toy_job.py"))
    losses = found["losses"]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert found["steps"] == 64, "the second run goes on from the first one's checkpoint"
    assert max(abs(a - b) for a, b in zip(found["weights"], [1, -2, 3], strict=True)) < 1e-3
    assert found["evaluated"] < losses[-1] and found["predicted"] < 1e-2
    assert found["refused"].startswith("mixed_precision='bf16' does not work with backend='toy'")
    assert found["on_gpus"].startswith("device='cuda' does not work with backend='toy': it trains on CPUs only")
    assert found["unused"].startswith("metrics does not work with backend='toy'")
    assert found["exported"] == found["weights"]
    assert not found["has_torch"]


def test_the_conformance_suite_says_in_one_line_that_it_has_no_models_for_it(tmp_path: Path) -> None:
    done = run(tmp_path, "toy_command.py", "distributed.testing", "toy:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: backend='toy' trains neither torch modules nor Keras models")
    assert done.stderr.count("\n") == 1
    done = run(tmp_path, "toy_command.py", "distributed.testing", "toy:1,2")
    assert done.stderr == "error: backend='toy' does not work with 2 processes, it runs one: write toy:1\n"


def test_a_run_that_was_killed_and_restarted_ends_with_the_same_bits(tmp_path: Path) -> None:
    whole = printed(run(tmp_path, "toy_killed.py"))

    command = [
        *("distributed.cli", "train", "--script", str(HERE / "toy_killed.py")),
        *("--run-dir", "run", "--max-restarts", "1", "--", "--killed"),
    ]
    done = run(tmp_path, "toy_command.py", *command)

    assert printed(done) == whole
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["restart_count"] for event in events if event["event"] == "started"] == [0, 1]
    assert [event["step"] for event in events if event["event"] == "resumed"] == [10]
