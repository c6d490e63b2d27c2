"""Named optimizers, validation in a stream and logged values are the same on two processes of every backend as on one."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
from safetensors.torch import load_file

from distributed.testing import Adapter
from tests.conformance.runs import OnFirstUse
from tests.conftest import needs_backend

JOBS = Path(__file__).parent / "jobs"
JOB = JOBS / "everyday.py"
EXACT, ROUNDING = 1e-9, 1e-5  # in float64, and in float32
ON_SHARDS = ("adam", "layer-rates")
OPTIMIZERS = (*ON_SHARDS, "adafactor", "muon")
WORLDS = {  # name -> the backend with its settings, and the optimizers that it takes
    "pytorch-ddp": ("pytorch-ddp", OPTIMIZERS), "fsdp": ("fsdp", ON_SHARDS), "horovod": ("horovod", OPTIMIZERS),
    "ray": ("ray[cpus_per_worker=0.5]", OPTIMIZERS), "zero-0": ("deepspeed[zero_stage=0]", OPTIMIZERS),
    "zero-3": ("deepspeed[zero_stage=3]", ON_SHARDS),
}  # fmt: skip
TRAINED = [(name, case) for name, (_, optimizers) in WORLDS.items() for case in (*optimizers, "stream")]
pytestmark = [pytest.mark.timeout(400), pytest.mark.full]


@pytest.fixture(scope="module")
def job():
    return runpy.run_path(str(JOB))


@pytest.fixture(scope="module")
def alone(job, tmp_path_factory):
    """Return (case, element type) -> the directory with what one process has trained."""

    def train(key):
        case, dtype = key
        out = tmp_path_factory.mktemp(case)
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(out)
            job["train"](case, out, backend="single", dtype=dtype)
        return out

    return OnFirstUse(train)


@pytest.fixture(scope="module")
def started(tmp_path_factory, run_cli_once):
    """Return the name of a world -> the directory with what two processes have trained."""

    def start(name):
        row, optimizers = WORLDS[name]
        adapter = Adapter.parse(f"{row}:2")
        needs_backend(adapter.backend)
        assert [each for each in ("adam", "adafactor", "muon") if adapter.takes(optimizer=each)] == [
            each for each in optimizers if each != "layer-rates"
        ]
        out = tmp_path_factory.mktemp(name)
        command = ["train", "--script", str(JOB), *adapter.flags(2), "--run-dir", str(out / "run")]
        done = run_cli_once([*command, "--", str(out), dtype_of(name), *optimizers, "stream", "logged"], timeout=150)
        assert done.returncode == 0, done.output[-3000:]
        return out

    return OnFirstUse(start)


def dtype_of(name):
    return "float32" if name.startswith("zero") else "float64"


def allowed(name):
    return EXACT if dtype_of(name) == "float64" else ROUNDING


def apart(one, other):
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def facts(out, case):
    return json.loads((out / f"{case}.json").read_text())


@pytest.mark.parametrize(("name", "case"), TRAINED)
def test_two_processes_train_the_weights_of_one(started, alone, name, case):
    one, two = (load_file(out / f"{case}.safetensors") for out in (alone[case, dtype_of(name)], started[name]))
    assert apart(one, two) < allowed(name)


def test_the_optimizers_train_other_weights(alone):
    found = [load_file(alone[case, "float64"] / f"{case}.safetensors") for case in OPTIMIZERS]
    assert min(apart(one, other) for i, one in enumerate(found) for other in found[:i]) > 1e-4


@pytest.mark.parametrize("name", WORLDS)
def test_a_stream_that_never_ends_is_validated_within(started, alone, name):
    one, two = (facts(out, "stream")["rows"] for out in (alone["stream", dtype_of(name)], started[name]))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [3, 6, 9, 10]
    losses, found = ([row["val_loss"] for row in rows] for rows in (one, two))
    assert found == pytest.approx(losses, abs=allowed(name)) and len(set(losses)) == 4


def logged(run_dir):
    """Return the log lines of training. There is one for every two updates."""
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == "train"]


def assert_hooks(lines):
    """Ranks 0 and 1 have logged 10 * rank + step, rank + 1 and -rank - step."""
    found = [tuple(line[f"hook_{kind}"] for kind in ("mean", "sum", "max")) for line in lines]
    assert [line["step"] for line in lines] == [2, 4] and found == [(6.5, 6, -1), (8.5, 6, -3)]


@pytest.mark.parametrize("name", WORLDS)
def test_logged_values_are_reduced_over_both_ranks(started, job, name):
    lines = logged(facts(started[name], "logged")["run_dir"])
    assert_hooks(lines)
    for line, half in zip(lines, job["X"].double().chunk(2), strict=True):  # of two updates each
        assert line["step_mean"] == pytest.approx(float(half[:, 0].mean()), abs=1e-6)
        assert line["step_sum"] == len(half) == 22
        assert line["step_max"] == pytest.approx(float(half.max()))


def test_logged_values_are_reduced_over_both_ranks_on_tensorflow(run_cli, tmp_path):
    needs_backend("tensorflow")
    command = ["train", "--script", str(JOBS / "tensorflow" / "logged.py"), *Adapter("tensorflow", (2,)).flags(2)]
    done = run_cli([*command, "--run-dir", str(tmp_path / "run"), "--", str(tmp_path)], timeout=150)
    assert done.returncode == 0, done.output[-3000:]
    assert_hooks(logged((tmp_path / "run_dir").read_text()))
