"""Our communication hooks on four processes are exact where they lose nothing, and send less where they compress."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.conformance.jobs.recording import distance, read

JOB = Path(__file__).parent / "jobs" / "comm_hooks.py"
WORLD = 4
pytestmark = pytest.mark.full  # test_resume_buckets.py trains with a hook by default
BUCKETS = [612, 544, 384]  # number of elements in each bucket, all even


@pytest.fixture(scope="module")
def ran(tmp_path_factory, run_cli_once):
    """Return what every case wrote on each rank, and the console's text."""
    out = tmp_path_factory.mktemp("hooks")
    command = ["train", "--script", str(JOB), "--backend", "pytorch-ddp", "--nproc-per-node", str(WORLD)]
    done = run_cli_once([*command, "--run-dir", str(out / "run"), "--", str(out)], timeout=270)  # on a busy machine
    assert done.returncode == 0, done.output[-3000:]
    return read(out, WORLD), done.stdout


@pytest.fixture
def seen(ran):
    """Return case -> what the main process saw, after checking that all ranks have the same weights."""
    for name, ranks in ran[0].items():
        assert all(rank.get("weights") == ranks[0].get("weights") for rank in ranks), name
    return {name: ranks[0] for name, ranks in ran[0].items()}


def test_a_hierarchical_sum_is_the_plain_one_but_for_rounding(seen):
    assert distance(seen["hierarchical"], seen["accumulated"]) < 1e-13
    assert distance(seen["one-node"], seen["plain"]) < 1e-13
    assert distance(seen["plain"], seen["accumulated"]) > 1e-13  # clipping has an effect, so the runs can differ


def test_a_hierarchical_sum_sends_a_share_of_each_bucket_across_the_groups(seen):
    found = seen["hierarchical-traced"]["seen"]
    assert found["c10d::_reduce_scatter_base_"] == [[size // 2, size] for size in BUCKETS]
    assert len(found["c10d::allreduce_"]) == len(BUCKETS)
    assert found["c10d::_allgather_base_"] == [[size, size // 2] for size in BUCKETS]


def test_the_groups_are_those_asked_for_or_the_nodes(ran):
    assert "ddp.comm_hook=hierarchical sums in 2 groups of 2\n" in ran[1]
    assert "ddp.comm_hook=hierarchical sums in 1 group of 4: the same as no hook\n" in ran[1]


def test_groups_that_do_not_divide_the_ranks_are_refused(seen):
    assert "ddp.hierarchical_group_size=3 does not divide world_size=4" in seen["hierarchical-of-three"]["error"]
    assert "has no effect without ddp.comm_hook='hierarchical'" in seen["hierarchical-alone"]["error"]


@pytest.mark.parametrize("hook", ["hierarchical", "topk"])
def test_a_hook_resumes_and_goes_on_in_a_second_fit_bit_for_bit(seen, hook):
    assert distance(seen[f"{hook}-resumed"], seen[f"{hook}-long"]) == 0
    assert distance(seen[f"{hook}-twice"], seen[f"{hook}-long"]) == 0
    assert seen[f"{hook}-twice"]["groups"] == 1  # between the fits only the default group exists
    files = [f"rank-{rank}.safetensors" for rank in range(WORLD)] if hook == "topk" else []
    assert seen[f"{hook}-resumed"]["files"] == files


def test_topk_of_everything_is_the_plain_sum_but_for_rounding(seen):
    assert distance(seen["topk-everything"], seen["plain"]) < 1e-13


def test_topk_sends_no_more_than_its_part(seen):
    """Each rank sends a float64 and its int32 position for a quarter of the elements, and receives those of all ranks."""
    found = seen["topk-traced"]["seen"]
    assert list(found) == ["c10d::_allgather_base_"]
    assert found["c10d::_allgather_base_"] == [[WORLD * 12 * size // 4, 12 * size // 4] for size in BUCKETS]


def test_topk_converges_because_it_sends_later_what_it_left_out(seen):
    whole, remembers, forgets = (seen[case]["away"] for case in ("all-of-it", "topk-remembers", "topk-forgets"))
    assert remembers < whole + 0.1 and forgets > 10 * remembers


def test_topk_forgets_what_a_nan_has_spoilt(seen):
    assert seen["topk-spoilt"]["steps"] == 12 and all(map(math.isfinite, seen["topk-spoilt"]["weights"]))


def test_topk_is_refused_where_it_would_do_nothing_or_harm(seen):
    assert "loss scale, which changes: use mixed_precision='bf16'" in seen["topk-fp16"]["error"]
    assert "ddp.topk_ratio=0 must be greater than 0" in seen["topk-nothing"]["error"]
    assert "ddp.topk_ratio=1.5 must be at most 1" in seen["topk-too-much"]["error"]
