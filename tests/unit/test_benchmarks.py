"""The benchmarks run, and compare like with like."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"

# A model of three buckets: three backward passes with all their all-reduces, then with only the last one's.
COUNT = """
import os, sys
sys.path.insert(0, os.environ["BENCHMARKS"])
import torch
import torch.distributed as dist
from all_reduces import count_all_reduces
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo", init_method="file://" + os.path.abspath("store"), rank=int(sys.argv[1]), world_size=2)
layers = [torch.nn.Linear(512, 512) for _ in range(3)]
model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=1)
inputs = torch.ones(2, 512)

def plain():
    for _ in range(3):
        model(inputs).sum().backward()

def accumulated():
    with model.no_sync():
        for _ in range(2):
            model(inputs).sum().backward()
    model(inputs).sum().backward()

plain()
print("counts", count_all_reduces(plain), count_all_reduces(accumulated))
dist.barrier()
del model
dist.destroy_process_group()
"""


def rows_of(table: str) -> dict[str, list[str]]:
    """First cell -> the other cells, of every Markdown table row in a text."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split("|")] for line in table.splitlines() if line.startswith("|")
    ]
    return {row[0]: row[1:] for row in rows}


@pytest.mark.parametrize("workload", ["mlp", "gpt"])
def test_trainer_and_hand_written_loop_end_in_identical_weights(run_python, workload, tmp_path):
    done = run_python([str(BENCHMARKS / "overhead.py"), "--workload", workload, "--quick"], timeout=120, cwd=tmp_path)

    assert done.returncode == 0, done.output
    weights = {name: cells[-1] for name, cells in rows_of(done.stdout).items() if cells[-1] in ("identical", "DIFFER")}
    assert set(weights) == {
        "hand-written", "hand-written again", "Trainer, defaults", "Trainer, callbacks, metrics, log",
    }  # fmt: skip
    assert set(weights.values()) == {"identical"}, done.output


@pytest.fixture
def benchmark_modules(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_startup_times_both_and_counts_memory(benchmark_modules):
    import startup

    for name in (startup.BASE, startup.OURS):
        run = startup.run_once(startup.CONTESTANTS[name])
        assert 0 < run["first"] < run["whole"]
        assert run["pss"] > 100  # three processes at least, two of them with torch


def test_ratios_are_taken_within_a_round(benchmark_modules):
    import overhead

    turns = [{"mean": 2.0}, {"mean": 30.0}, {"mean": 9.0}]
    base = [{"mean": 1.0}, {"mean": 10.0}, {"mean": 3.0}]

    assert overhead.ratios(turns, base, "mean") == "3.00 (2.00-3.00)"


def test_all_reduces_are_counted_per_bucket(start, tmp_path):
    (tmp_path / "count.py").write_text(COUNT)
    env = {"BENCHMARKS": str(BENCHMARKS), "OMP_NUM_THREADS": "1"}

    ranks = [start([sys.executable, "count.py", rank], cwd=tmp_path, env=env) for rank in range(2)]

    for rank in ranks:
        done = rank.finish()
        assert done.returncode == 0, done.output
        assert "counts 9 3" in done.stdout, done.output
