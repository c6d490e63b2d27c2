"""One Keras script has the same numbers on PyTorch's engines, on Ray, and on Horovod with torch and with TensorFlow."""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

from distributed.backends import entry_in_use, make_backend
from distributed.config.merging import Overrides, merge
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.state import Job
from tests.conformance.runs import FULL, events
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "keras_jobs" / "engines.py"
ON_TENSORFLOW = ["horovod", "--set", "horovod.keras_backend=tensorflow"]
SAME = ("compiled", "constants", "in-float64", "counted", "tokens", "empty-slices", "whole", "saved")
AVERAGED = ("averaged", "averaged-resumed")  # on torch
# name -> (processes, flags, engine whose checkpoint is resumed, cases)
ENGINES = {
    "single": (1, ["single"], None, (*SAME, "float32", *AVERAGED)),
    "horovod-tensorflow-1": (1, ON_TENSORFLOW, "single", ("compiled", "arrived")),
    "horovod-tensorflow-2": (
        2, ON_TENSORFLOW, "single",
        ("killed", "unhurt", *SAME, "arrived", "float32", "compressed", "traced", "with-adasum"),
    ),
    "horovod-tensorflow-3": (
        3, ON_TENSORFLOW, "horovod-tensorflow-2", ("compiled", "empty-slices", "arrived", "float32", "float32-again"),
    ),
    "horovod": (2, ["horovod"], "single", (*SAME, "arrived", *AVERAGED)),
    "pytorch-ddp": (2, ["pytorch-ddp"], "single", ("compiled", "empty-slices", "arrived", *AVERAGED)),
    "ray": (
        2, ["ray", "--set", "ray.cpus_per_worker=0.5"], "single", ("compiled", "empty-slices", "arrived", *AVERAGED)
    ),
}  # fmt: skip
OTHERS = [pytest.param(name, marks=() if name == "horovod" else FULL) for name in ENGINES if name != "single"]
pytestmark = pytest.mark.timeout(800)


def needs(name):
    """Skip the test if what the engine `name` needs is missing."""
    if "horovod-tensorflow" in name:
        needs_backend("tensorflow")
    needs_backend(ENGINES[name][1][0])
    if importlib.util.find_spec("keras") is None:
        if "tensorflow" in os.environ.get("REQUIRE_BACKENDS", ""):
            pytest.fail("keras is not installed, and REQUIRE_BACKENDS names tensorflow")
        pytest.skip("keras is not installed here")


@pytest.fixture(scope="module")
def ran(tmp_path_factory, run_cli_once):
    """Return name of an engine -> (its directory, case -> what each rank saw). Each engine is started once, at its first use."""

    @functools.cache
    def run(name):
        needs(name)
        world, flags, source, cases = ENGINES[name]
        out = tmp_path_factory.mktemp(name)
        arrives = "-" if source is None else run(source)[0] / "at-3"
        command = ["train", "--script", JOB, "--nproc-per-node", world, "--run-dir", out / "run", "--backend", *flags]
        environ = {"HOROVOD_TIMELINE": "DYNAMIC"} if "traced" in cases else {}
        done = run_cli_once([*command, "--", out, arrives, *cases], env=environ, timeout=200)
        assert done.returncode == 0, done.output[-3000:]
        return out, {
            case: [json.loads((out / f"{case}-{rank}.json").read_text()) for rank in range(world)] for case in cases
        }

    return run


def distance(one, other):
    """Return the largest difference of the weights of two cases."""
    for each in (one, other):
        assert "error" not in each, each["error"]
    assert len(one["weights"]) == len(other["weights"]) > 0
    return max(abs(a - b) for a, b in zip(one["weights"], other["weights"], strict=True))


@pytest.mark.parametrize("name", OTHERS)
def test_a_keras_script_trains_as_in_one_process_on_torch(ran, name):
    expected, found = ran("single")[1], ran(name)[1]
    apart = {case: distance(expected[case][0], found[case][0]) for case in SAME if case in found}
    assert {case: far for case, far in apart.items() if not far < 1e-9} == {}
    for case, ranks in found.items():
        assert all(rank.get("weights") == ranks[0].get("weights") for rank in ranks), case
        assert {rank.get("usual", "float32") for rank in ranks} == {"float32"}, case
    one, other = expected["compiled"][0]["row"], found["compiled"][0]["row"]
    assert [other[key] for key in ("loss", "accuracy", "val_loss", "val_accuracy")] == pytest.approx(
        [one[key] for key in ("loss", "accuracy", "val_loss", "val_accuracy")], abs=1e-9
    )


@pytest.mark.parametrize("name", OTHERS)
def test_a_checkpoint_of_another_engine_goes_on_as_if_nothing_had_happened(ran, name):
    expected = ran("single")[1]
    assert distance(expected["whole"][0], ran(name)[1]["arrived"][0]) < 1e-9
    assert distance(expected["whole"][0], expected["saved"][0]) > 1e-3


@pytest.mark.parametrize(
    "name", ["single", "horovod", *(pytest.param(each, marks=FULL) for each in ("pytorch-ddp", "ray"))]
)
def test_averaged_weights_follow_their_formula_and_go_on_after_a_resume(ran, name):
    whole, resumed = (ran(name)[1][case] for case in AVERAGED)
    for rank in whole:
        assert distance(rank, {"weights": rank["by_hand"]}) < 1e-9 < 1e-3 < distance(rank, {"weights": rank["trained"]})
    assert [rank["weights"] for rank in resumed] == [rank["weights"] for rank in whole]
    assert resumed[0]["row"]["val_loss"] == whole[0]["row"]["val_loss"]
    assert distance(whole[0], ran("single")[1]["averaged"][0]) < 1e-9


@FULL
def test_a_killed_rank_costs_no_bit(ran):
    out, cases = ran("horovod-tensorflow-2")
    assert cases["killed"] == [{**rank, "run_dir": cases["killed"][0]["run_dir"]} for rank in cases["killed"]]
    assert events(out / "run").count("restarted") == 1
    assert distance(cases["killed"][0], cases["unhurt"][0]) == 0


@FULL
def test_three_processes_give_the_same_bits_in_every_run(ran):
    cases = ran("horovod-tensorflow-3")[1]
    assert distance(cases["float32"][0], cases["float32-again"][0]) == 0
    assert distance(cases["float32"][0], ran("single")[1]["float32"][0]) < 1e-5


# ------------------------------------------------------------------ what only Horovod with TensorFlow has


@pytest.fixture
def seen(ran):
    """Return case -> what each rank saw."""
    return ran("horovod-tensorflow-2")[1]


@FULL
def test_compressed_gradients_are_close_and_not_equal(seen):
    assert 1e-7 < distance(seen["compressed"][0], seen["float32"][0]) < 0.02


@FULL
def test_the_timeline_is_a_file_of_the_run_and_whole(seen):
    trace = json.loads((Path(seen["traced"][0]["run_dir"]) / "trace" / "of-two.json").read_text())
    names = {each["args"]["name"] for each in trace if each.get("name") == "process_name" and each["pid"]}
    assert "allreduce.combine.0" in names
    assert distance(seen["traced"][0], seen["float32"][0]) == 0


@FULL
def test_adasum_is_refused_on_tensorflow(seen):
    assert all("horovod.adasum=true works with models on torch" in rank["error"] for rank in seen["with-adasum"])


# ------------------------------------------------------------------ before any process starts


def adapter(monkeypatch, engine="tensorflow", world=2, **settings):
    monkeypatch.setenv("KERAS_BACKEND", engine)
    monkeypatch.delitem(sys.modules, "keras", raising=False)  # an earlier test may have loaded keras
    needs_backend("horovod")
    needs_backend("tensorflow")
    options = {"keras_backend": "tensorflow", **settings.pop("horovod", {})}
    merged = merge(Overrides(), {"backend": "horovod", "horovod": options, **settings})
    return make_backend(merged, ProcessPlan(1, world, "cpu", "horovod"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"engine": "torch"}, "or leave it unset and start with --backend horovod --set horovod.keras_backend=tensorflow"),
        ({"horovod": {"compression": "fp16"}, "dtype": "float64"}, "with horovod.compression='fp16': that is lossy"),
        ({"mixed_precision": "fp16"}, "set mixed_precision='bf16'"),
        ({"compile": True}, "the step is a TensorFlow graph already"),
        ({"data": {"presharded": True}}, "give every rank all samples"),
        ({"horovod": {"keras_backend": "jax"}}, "horovod.keras_backend='jax' is not a valid choice"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_on_tensorflow_is_refused(monkeypatch, settings, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        adapter(monkeypatch, **settings)


def test_models_of_other_libraries_are_refused(monkeypatch):
    import torch

    with pytest.raises(
        ConfigError, match=r"is a torch object \(Linear\), but horovod.keras_backend='tensorflow' trains Keras models"
    ):
        adapter(monkeypatch).check(Job(torch.nn.Linear(1, 1)), here=False)
    block = type("Dense", (), {"__module__": "mxnet.gluon.nn", "__call__": lambda self: None})
    with pytest.raises(ConfigError, match="MXNet, which is retired"):
        adapter(monkeypatch).check(Job(block()), here=False)


def test_the_option_sets_the_environment_of_the_workers():
    def variables(engine):
        config = DistributedConfig(backend="horovod", horovod={"keras_backend": engine})
        return entry_in_use(config, "horovod").environ["KERAS_BACKEND"]

    assert [variables(engine) for engine in ("torch", "tensorflow")] == ["torch", "tensorflow"]
