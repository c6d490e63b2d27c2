"""A new engine is one file and one registry row."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_an_engine_of_one_file_and_one_registry_row_trains_and_resumes(tmp_path: Path) -> None:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parents[1])])}
    done = subprocess.run(
        [sys.executable, str(HERE / "toy_job.py")],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    losses = found["losses"]
    assert len(losses) == 4 and losses == sorted(losses, reverse=True)
    assert found["steps"] == 64, "the second run goes on from the first one's checkpoint"
    assert max(abs(a - b) for a, b in zip(found["weights"], [1, -2, 3], strict=True)) < 1e-3
    assert found["evaluated"] < losses[-1] and found["predicted"] < 1e-2
    assert found["refused"].startswith("mixed_precision='bf16' does not work with backend='toy'")
    assert found["unused"].startswith("metrics does not work with backend='toy'")
    assert found["exported"] == found["weights"]
    assert not found["has_torch"]
