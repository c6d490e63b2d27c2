"""In the batch-size finder the rank with the least memory decides, and no rank waits for one that ran out of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

JOB = str(Path(__file__).parent / "jobs" / "size_finder.py")
pytestmark = pytest.mark.timeout(600)


def test_a_size_fits_when_it_does_on_every_rank(run_python, tmp_path):
    done = run_python([JOB, "1"], timeout=240, cwd=tmp_path)
    assert done.returncode == 0, done.output[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("SEEN "))
    seen = json.loads(line.removeprefix("SEEN "))
    assert seen["several"] == 16
    assert "batch_size=16: fits" in done.output
    assert "batch_size=32: rank 1 is out of memory: " in done.output and "can't allocate memory" in done.output
    assert "To need less" not in done.output  # the finder lowers the size itself
    assert seen["beyond the data"] == 100
    said = "batch_size=200: the data gives the first update 100 samples, not 200"
    assert said in done.output
    assert seen["is_untouched"] and seen["left"] == [] and seen["trained"] == 1
