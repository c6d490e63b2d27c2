"""DDP orders its buckets anew after the first update: with three ranks a resume must sum in the order of the whole run."""

from __future__ import annotations

from pathlib import Path

import numpy

JOB = Path(__file__).parent / "jobs" / "buckets.py"


def test_three_processes_and_several_buckets_resume_bit_for_bit(run_cli, tmp_path):
    weights = []
    for step in (0, 10):  # never killed, and killed one step after a checkpoint
        out = tmp_path / f"{step}.npz"
        command = ["train", "--script", str(JOB), "--nproc-per-node", "3", "--run-dir", str(tmp_path / f"run-{step}")]
        done = run_cli([*command, "--", str(out), str(step)])
        assert done.returncode == 0, done.output
        assert ("restarting" in done.stderr) == (step > 0)
        weights.append(dict(numpy.load(out)))
    whole, resumed = weights
    assert all((whole[name] == resumed[name]).all() for name in whole)
