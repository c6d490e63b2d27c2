"""Checkpoints without the frozen parameters travel between backends and numbers of processes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from distributed.checkpoints.shards import read_weights
from distributed.checkpoints.verifying import verify
from tests.conformance.runs import FULL, newest
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "adapters.py"
TRAINED = {"down.weight", "down.bias", "up.weight", "up.bias", "head.weight", "head.bias", "scale"}
pytestmark = pytest.mark.timeout(480)
# Each stage resumes from the checkpoint of the one before: backend, number of processes, flags.
IN_FLOAT64 = [("pytorch-ddp", 2, ()), ("fsdp", 2, ()), ("single", 1, ())]
LONG = [("horovod", 2, ()), ("ray", 2, ()), ("fsdp", 3, ()), ("pytorch-ddp", 3, ()), ("single", 1, ())]
ZERO = [("deepspeed", 2, ("--set", f"deepspeed.zero_stage={stage}")) for stage in (3, 2, 1, 0)]


def start(run_cli, out, name, backend, processes, flags, updates, dtype, checkpoint):
    """Train up to `updates`, and return what the ranks saw and the newest checkpoint."""
    command = ["train", "--script", JOB, "--backend", backend, "--nproc-per-node", processes, "--device", "cpu", *flags]
    command += ["--run-dir", out / f"run-{name}", "--", out, name, updates, dtype, checkpoint]
    done = run_cli([*map(str, command)], timeout=200)
    assert done.returncode == 0, done.output[-3000:]
    seen = [json.loads((out / f"{name}-{rank}.json").read_text()) for rank in range(processes)]
    return seen, newest(Path(seen[0]["run_dir"]))


def travel(run_cli, out, stages, dtype, tolerance):
    """Assert that each stage continues the one before, and that the last one, `single`, ends like an uninterrupted run."""
    checkpoint, frozen = "-", set()
    for number, (backend, processes, flags) in enumerate(stages, 1):
        needs_backend(backend)
        seen, checkpoint_after = start(
            run_cli, out, str(number), backend, processes, flags, 4 * number, dtype, checkpoint
        )
        for each in seen:
            assert each["steps"] == 4 * number
            assert ("norm.bias has other values here" in each["refused"]) == (number > 1)
            assert "\n" not in each["refused"]
        manifest = verify(checkpoint_after)
        assert manifest.backend == backend and manifest.world_size == processes
        assert {tensor.name for tensor in read_weights(checkpoint_after)} == TRAINED
        frozen.add(json.dumps(manifest.frozen))
        checkpoint = checkpoint_after
    assert len(frozen) == 1  # the same digest everywhere
    whole, other = load_file(out / "whole.safetensors"), load_file(out / f"{len(stages)}.safetensors")
    assert whole.keys() == other.keys() > TRAINED
    assert max(numpy.abs(whole[name] - other[name]).max() for name in whole) < tolerance
    assert all(numpy.array_equal(whole[name], other[name]) for name in whole.keys() - TRAINED)


@pytest.mark.parametrize("stages", [IN_FLOAT64, pytest.param(LONG, marks=FULL)], ids=["short", "long"])
def test_they_travel_in_float64(run_cli, tmp_path, stages):
    travel(run_cli, tmp_path, stages, "float64", 1e-9)


@pytest.mark.full
def test_they_travel_between_the_stages_of_deepspeed(run_cli, tmp_path):
    travel(run_cli, tmp_path, [*ZERO, ("single", 1, ())], "float32", 1e-5)
