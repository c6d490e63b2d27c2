"""One rank runs out of memory in an update: the run fails with the fix, or goes on with smaller micro-batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from tests.conformance.runs import FULL

JOB = Path(__file__).parent / "jobs" / "out_of_memory.py"
AUTO = ("--set", "auto_micro_batch=true")
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def train(run_cli, tmp_path):
    """Return a function that trains on two processes with 8 samples per rank and update, and returns the run and its directory."""

    def run(kind, largest, *flags, code=0, backend="pytorch-ddp", world=2, name="run", sizes=("8", "1")):
        directory = tmp_path / name
        command = [
            "train", "--script", str(JOB), "--backend", backend, "--nproc-per-node", str(world), "--run-dir", str(directory),
            "--max-restarts", "0", "--checkpoint-every-n-steps", "2", "--batch-size", sizes[0], "--set", "monitor=loss",
            "--gradient-accumulation-steps", sizes[1], *flags, "--", kind, str(largest),
        ]  # fmt: skip
        done = run_cli(command, timeout=120)
        assert done.returncode == code, done.output[-3000:]
        return done, directory

    return run


def weights(directory):
    """Return the name of the newest checkpoint, and its arrays by file, rank and name."""
    newest = sorted((directory / "checkpoints").glob("step-*"))[-1]
    files = sorted((newest / "model").glob("*.safetensors"))
    assert files
    return newest.name, {(file.name, name): array for file in files for name, array in load_file(file).items()}


def failures(directory):
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    return [event.get("micro_batch") for event in events if event["event"] == "worker_failed"]


def test_the_run_fails_and_names_the_rank_and_the_fix(train):
    done, _ = train("torch", 2, code=1)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: rank 1 is out of memory in step 3: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert "lower batch_size=8 (with global_batch_size set, the results stay the same)" in line


@pytest.mark.parametrize(
    ("backend", "world"),
    [
        ("pytorch-ddp", 2),
        *(pytest.param(*each, marks=FULL) for each in (("single", 1), ("fsdp", 2), ("horovod", 2))),
    ],
)
def test_half_the_micro_batch_gives_the_weights_of_a_run_that_began_with_it(train, backend, world):
    done, directory = train("torch", 2, *AUTO, backend=backend, world=world)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    assert [line.partition(": restarting with ")[2] for line in warnings] == [
        "micro-batches of at most 4 samples (auto_micro_batch)", "micro-batches of at most 2 samples (auto_micro_batch)",
    ]  # fmt: skip
    assert warnings[0].startswith(
        f"warning: rank {world - 1} is out of memory in step 3: CUDA out of memory. Tried to allocate 2.00 GiB"
    )
    assert failures(directory) == [4, 2]
    assert f"= batch_size 2 x gradient_accumulation_steps 4 x data_parallel_size {world}" in done.output
    _, other = train("torch", 2, backend=backend, world=world, name="other", sizes=("2", "4"))
    (step, ours), (other_step, theirs) = weights(directory), weights(other)
    assert step == other_step and ours.keys() == theirs.keys()
    assert max(numpy.abs(ours[name] - theirs[name]).max() for name in ours) < 1e-9


@FULL
def test_without_a_checkpoint_the_run_begins_anew_and_a_resume_keeps_the_size(train):
    done, directory = train("host", 4, *AUTO, "--set", "checkpoint_every_n_steps=null", "--max-steps", "4")
    assert done.output.count("restarting with micro-batches of at most 4 samples") == 1
    again, _ = train("host", 4, *AUTO, "--resume", "--max-steps", "6")
    assert "out of memory" not in again.output and "batch_size 4 x gradient_accumulation_steps 2" in again.output
    assert weights(directory)[0] == "step-00000006"


@FULL
def test_one_sample_that_does_not_fit_ends_the_run(train):
    done, directory = train("torch", 0, *AUTO, code=1)
    assert [line for line in done.stderr.splitlines() if line.startswith("error: rank 1 is out of memory in step 3: ")]
    assert failures(directory) == [4, 2, 1, None]
