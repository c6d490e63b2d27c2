"""`fit(x=, y=, class_weight=)`, names of losses and metrics, and Keras's callbacks: the same on every engine, and as in Keras."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.conformance.runs import FULL, OnFirstUse
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "keras_jobs" / "manners.py"
SAME = ["class-weight", "sample-weight", "early-stopping", "one-column", "one-column-compiled"]
ON_TENSORFLOW = ["horovod", "--set", "horovod.keras_backend=tensorflow"]
ENGINES = {  # name -> (processes, flags)
    "single": (1, ["single"]),
    "pytorch-ddp-2": (2, ["pytorch-ddp"]),
    "pytorch-ddp-3": (3, ["pytorch-ddp"]),
    "horovod-2": (2, ["horovod"]),
    "ray-2": (2, ["ray", "--set", "ray.cpus_per_worker=0.5"]),
    "tensorflow-1": (1, ["tensorflow"]),
    "tensorflow-2": (2, ["tensorflow"]),
    "tensorflow-3": (3, ["tensorflow"]),
    "horovod-tensorflow-2": (2, ON_TENSORFLOW),
}
OTHERS = [pytest.param(name, marks=() if name == "pytorch-ddp-2" else FULL) for name in ENGINES if name != "single"]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def ran(tmp_path_factory, run_cli_once):
    """Return name of an engine -> case -> what each rank saw."""

    def run(name):
        world, flags = ENGINES[name]
        needs_backend(flags[0])
        if "tensorflow" in name:
            needs_backend("tensorflow")
        if importlib.util.find_spec("keras") is None:
            if "keras" in os.environ.get("REQUIRE_BACKENDS", ""):
                pytest.fail("keras is not installed, and REQUIRE_BACKENDS names it")
            pytest.skip("keras is not installed here")
        out = tmp_path_factory.mktemp(name)
        cases = [*SAME, *(["of-keras"] if world == 1 else [])]
        command = ["train", "--script", JOB, "--nproc-per-node", world, "--run-dir", out / "run", "--backend", *flags]
        done = run_cli_once([*command, "--", out, *cases], timeout=200)
        assert done.returncode == 0, done.output[-3000:]
        return {
            case: [json.loads((out / f"{case}-{rank}.json").read_text()) for rank in range(world)] for case in cases
        }

    return OnFirstUse(run)


def numbers(value):
    """Return the numbers in `value` by their path, without times."""
    if isinstance(value, dict):
        return {
            f"{key}.{path}": each
            for key, inner in value.items()
            if key != "samples_per_second"
            for path, each in numbers(inner).items()
        }
    if isinstance(value, list):
        return {f"{key}.{path}": each for key, inner in enumerate(value) for path, each in numbers(inner).items()}
    return {"": value}


def assert_same(one, other, within=1e-9):
    one, other = numbers(one), numbers(other)
    assert one.keys() == other.keys() != set()
    far = {key: (one[key], other[key]) for key in one if one[key] != pytest.approx(other[key], abs=within)}
    assert far == {}


@pytest.mark.parametrize("name", OTHERS)
def test_every_engine_has_the_numbers_of_one_process(ran, name):
    for case in SAME:
        for rank in ran[name][case]:
            assert_same(rank, ran["single"][case][0])


@pytest.mark.parametrize("name", ["single", pytest.param("tensorflow-1", marks=FULL)])
def test_the_numbers_are_those_of_keras(ran, name):
    ours, theirs = ran[name]["class-weight"][0], ran[name]["of-keras"][0]
    assert_same(ours["weights"], theirs["weights"])
    # Keras's own metrics are float32.
    assert_same(ours["seen"], theirs["seen"], within=1e-6)
    kinds = [seen[0] for seen in ours["seen"]]
    assert kinds == [
        "train begin", "epoch begin", *["batch end"] * 4, "test begin", "test end", "epoch end", "train end"
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["single", pytest.param("tensorflow-1", marks=FULL)])
def test_a_loss_by_name_takes_targets_without_a_column_as_compile_does(ran, name):
    named, compiled = (ran[name][case][0] for case in ("one-column", "one-column-compiled"))
    assert_same(named["rows"], compiled["rows"])
    assert_same(named["weights"], compiled["weights"])
    assert named["rows"][-1]["val_loss"] < named["rows"][0]["val_loss"]


def test_weights_change_the_result(ran):
    first, *_ = ran["single"]["class-weight"][0]["rows"]
    # The metric of the same name is not weighted.
    assert abs(first["loss"] - first["sparse_categorical_crossentropy"]) > 0.05


def test_early_stopping_of_keras_stops_the_run(ran):
    case = ran["single"]["early-stopping"][0]
    stopped, best, wait = case["stopped"]
    assert case["stop_reason"] == "EarlyStopping set stop_training"
    assert wait == 2 and stopped == best + 2 == len(case["rows"]) - 1 < 29
