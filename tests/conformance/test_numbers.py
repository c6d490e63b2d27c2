"""The same numbers on every backend and world size: one process of `single` is the reference, all others must agree with it."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from distributed.backends import REGISTRY
from tests.conformance.jobs import numbers as job

JOB = Path(__file__).parent / "jobs" / "numbers.py"
EXACT = [
    "adamw", "sgd-schedule-clip", "accumulation", "accumulation-clip", "sum-count", "unreduced", "tiny-last", "stream", "empty-slices",
    "class-weights", "ignored",
]  # fmt: skip


WORLDS = [("pytorch-ddp", 2), ("pytorch-ddp", 3), ("pytorch-ddp", 4), ("fsdp", 1), ("fsdp", 2), ("fsdp", 3)]
REFERENCE = ("single", 1)


@pytest.fixture(scope="module")
def results(tmp_path_factory, run_cli_once):
    """(backend, world size) -> case -> arrays; each is started once."""
    found = {}
    for backend, world in (REFERENCE, *WORLDS):
        out = tmp_path_factory.mktemp(f"{backend}-{world}")
        command = ["train", "--script", str(JOB), "--backend", backend, "--nproc-per-node", str(world)]
        done = run_cli_once([*command, "--run-dir", str(out / "run"), "--", str(out)], timeout=300)
        assert done.returncode == 0, done.output[-3000:]
        found[backend, world] = {path.stem: dict(numpy.load(path)) for path in out.glob("*.npz")}
    return found


def test_every_backend_is_compared():
    assert {backend for backend, _ in (REFERENCE, *WORLDS)} == set(REGISTRY)


def difference(one, other):
    """Largest absolute difference over all final weights."""
    names = [name for name in one if name[0].isdigit()]
    assert len(names) == 4
    return max(numpy.abs(one[name] - other[name]).max() for name in names)


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
@pytest.mark.parametrize("case", EXACT)
def test_weights_and_losses_agree_with_one_process_in_float64(results, case, world):
    one, many = results[REFERENCE][case], results[world][case]
    assert one["steps"] == many["steps"] > 0
    assert difference(one, many) < 1e-9
    for name in ("loss", "val_loss", "again", "accuracy", "predicted", "first"):
        assert numpy.abs(one[name] - many[name]).max(initial=0.0) < 1e-9, name


@pytest.mark.parametrize("world", WORLDS, ids=lambda world: f"{world[0]}-{world[1]}")
def test_in_fp32_no_further_from_one_process_than_three_times_what_cutting_the_batch_moves(results, world):
    seeds = range(4)
    moved = [difference(results[REFERENCE][f"fp32-{seed}"], results[world][f"fp32-{seed}"]) for seed in seeds]
    floor = [
        difference(results[REFERENCE][f"fp32-{seed}"], results[REFERENCE][f"fp32-{seed}-cut-{max(2, world[1])}"])
        for seed in seeds
    ]
    assert max(moved) <= 3 * max(floor)
    assert max(moved) > 0 or world[1] == 1  # one process sums as the reference does
    for seed in seeds:
        assert abs(results[REFERENCE][f"fp32-{seed}"]["first"] - results[world][f"fp32-{seed}"]["first"]) < 1e-6


def test_a_mean_over_what_is_not_ignored_is_torchs_own(results):
    one = results[REFERENCE]["ignored"]
    x, y = job.data(ignored=1).tensors
    model = job.model().double()
    model.load_state_dict({name: torch.from_numpy(one[name]) for name in model.state_dict()})
    assert abs(torch.nn.functional.cross_entropy(model(x), y).item() - one["again"]) < 1e-12
    assert one["accuracy"] == (model(x).argmax(1) == y).sum().item() / 41


def test_accumulation_gives_the_same_weights_as_one_big_batch(results):
    assert difference(results[REFERENCE]["adamw"], results[REFERENCE]["accumulation"]) < 1e-9
    assert difference(results["pytorch-ddp", 4]["adamw"], results["fsdp", 2]["accumulation"]) < 1e-9


def test_a_stream_gives_the_same_as_a_map_in_order(results):
    """Not the same as shuffled: a comparison that could not fail would prove nothing."""
    assert difference(results[REFERENCE]["adamw"], results[REFERENCE]["stream"]) > 1e-6
