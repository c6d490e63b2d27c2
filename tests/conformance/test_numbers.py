"""The same numbers at every world size: one process is the reference, 2, 3 and 4 must agree with it."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

JOB = Path(__file__).parent / "jobs" / "numbers.py"
EXACT = [
    "adamw", "sgd-schedule-clip", "accumulation", "accumulation-clip", "sum-count", "unreduced", "tiny-last", "stream", "empty-slices",
]  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_cli_once):
    """world size -> case -> arrays; each world size is started once."""
    found = {}
    for world in (1, 2, 3, 4):
        out = tmp_path_factory.mktemp(f"world-{world}")
        done = run_cli_once(
            [
                "train",
                "--script",
                str(JOB),
                "--nproc-per-node",
                str(world),
                "--run-dir",
                str(out / "run"),
                "--",
                str(out),
            ],
            timeout=300,
        )
        assert done.returncode == 0, done.output[-3000:]
        found[world] = {path.stem: dict(numpy.load(path)) for path in out.glob("*.npz")}
    return found


def difference(one, other):
    """Largest absolute difference over all final weights."""
    names = [name for name in one if name[0].isdigit()]
    assert len(names) == 4
    return max(numpy.abs(one[name] - other[name]).max() for name in names)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", EXACT)
def test_weights_and_losses_agree_with_one_process_in_float64(results, case, world):
    one, many = results[1][case], results[world][case]
    assert one["steps"] == many["steps"] > 0
    assert difference(one, many) < 1e-9
    for name in ("loss", "val_loss", "again", "accuracy", "predicted", "first"):
        assert numpy.abs(one[name] - many[name]).max(initial=0.0) < 1e-9, name


@pytest.mark.parametrize("world", [2, 3, 4])
def test_in_fp32_no_further_from_one_process_than_three_times_what_cutting_the_batch_moves(results, world):
    seeds = range(4)
    moved = [difference(results[1][f"fp32-{seed}"], results[world][f"fp32-{seed}"]) for seed in seeds]
    floor = [difference(results[1][f"fp32-{seed}"], results[1][f"fp32-{seed}-cut-{world}"]) for seed in seeds]
    assert 0 < max(moved) <= 3 * max(floor)
    for seed in seeds:
        assert abs(results[1][f"fp32-{seed}"]["first"] - results[world][f"fp32-{seed}"]["first"]) < 1e-6


def test_accumulation_gives_the_same_weights_as_one_big_batch(results):
    assert difference(results[1]["adamw"], results[1]["accumulation"]) < 1e-9
    assert difference(results[4]["adamw"], results[2]["accumulation"]) < 1e-9


def test_a_stream_gives_the_same_as_a_map_in_order(results):
    """Not the same as shuffled: a comparison that could not fail would prove nothing."""
    assert difference(results[1]["adamw"], results[1]["stream"]) > 1e-6
