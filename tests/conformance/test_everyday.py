"""Named optimizers, validation, logged values and what hooks ask for are the same on two processes of every backend as on one."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import numpy
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file

from distributed.testing import Adapter
from tests.conformance.jobs.asking import SAVE_AFTER
from tests.conformance.runs import EXACT, OnFirstUse, allowed, apart, dtype_of
from tests.conftest import needs_backend, needs_library

JOBS = Path(__file__).parent / "jobs"
JOB = JOBS / "everyday.py"
ON_SHARDS = ("adam", "layer-rates")
OPTIMIZERS = (*ON_SHARDS, "adafactor", "muon")
WORLDS = {  # name -> the backend with its settings, and the optimizers that it takes
    "pytorch-ddp": ("pytorch-ddp", OPTIMIZERS), "fsdp": ("fsdp", ON_SHARDS), "horovod": ("horovod", OPTIMIZERS),
    "ray": ("ray[cpus_per_worker=0.5]", OPTIMIZERS), "zero-0": ("deepspeed[zero_stage=0]", OPTIMIZERS),
    "zero-3": ("deepspeed[zero_stage=3]", ON_SHARDS),
}  # fmt: skip
NUMBERS = ("epoch", "loss", "accuracy", "val_loss", "val_accuracy")
CASES = ("plateau", "arrays", "stream", "logged", "by-the-clock", "evaluated", "saved")
TRAINED = [
    (name, case)
    for name, (_, optimizers) in WORLDS.items()
    for case in (*optimizers, "plateau", "arrays", "stream", "evaluated")
]
# The adapter of one process, and those of two, of a Keras model. Two of them train it on TensorFlow.
ONE = "single:1"
ONE_ON_TENSORFLOW = "tensorflow:1"
ON_TENSORFLOW = ("tensorflow:2", "horovod[keras_backend=tensorflow]:2")
KERAS_ADAPTERS = (*ON_TENSORFLOW, "pytorch-ddp:2", "horovod:2", "ray[cpus_per_worker=0.5]:2")
KERAS = pytest.mark.parametrize("adapter", KERAS_ADAPTERS)
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
        text, optimizers = WORLDS[name]
        adapter = Adapter.parse(f"{text}:2")
        needs_backend(adapter.backend)
        assert [each for each in ("adam", "adafactor", "muon") if adapter.takes(optimizer=each)] == [
            each for each in optimizers if each != "layer-rates"
        ]
        out = tmp_path_factory.mktemp(name)
        command = ["train", "--script", str(JOB), *adapter.flags(2), "--run-dir", str(out / "run")]
        done = run_cli_once([*command, "--", str(out), dtype_of(name), *optimizers, *CASES], timeout=150)
        assert done.returncode == 0, done.output[-3000:]
        return out

    return OnFirstUse(start)


def facts(out, case):
    return json.loads((out / f"{case}.json").read_text())


@pytest.mark.parametrize(("name", "case"), TRAINED)
def test_two_processes_train_the_weights_of_one(started, alone, name, case):
    one, two = (load_file(out / f"{case}.safetensors") for out in (alone[case, dtype_of(name)], started[name]))
    assert apart(one, two) < allowed(name)


def test_the_optimizers_train_other_weights(alone):
    found = [load_file(alone[case, "float64"] / f"{case}.safetensors") for case in OPTIMIZERS]
    assert min(apart(one, other) for i, one in enumerate(found) for other in found[:i]) > 1e-4


def test_a_schedule_that_watches_a_metric_follows_each_validation(job, alone):
    """The loss of validation rises from the second validation on, that after the fourth update."""
    model = job["net"]().double()
    optimizer = torch.optim.SGD(model.parameters())
    batches = [column.split(job["GLOBAL"]) for column in job["DATA"].tensors]
    for rate, x, y in zip([0.1] * 4 + [0.01] * 2 + [0.001] * 2, *(2 * each for each in batches), strict=True):
        optimizer.param_groups[0]["lr"] = rate
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x.double()), y).backward()
        optimizer.step()
    trained = load_file(alone["plateau", "float64"] / "plateau.safetensors")
    assert apart(trained, model.state_dict()) < EXACT


@pytest.mark.parametrize("name", WORLDS)
def test_a_schedule_that_watches_a_metric_resumes_between_two_validations(started, name):
    whole, resumed = (load_file(started[name] / f"{case}.safetensors") for case in ("plateau", "plateau-resumed"))
    assert apart(whole, resumed) == 0


def assert_validated_within(one, two, limit):
    """Two processes have validated after every third update and at the end, with the losses of one process."""
    one, two = (facts(out, "stream")["rows"] for out in (one, two))
    assert [row["step"] for row in one] == [row["step"] for row in two] == [3, 6, 9, 10]
    losses, found = ([row["val_loss"] for row in rows] for rows in (one, two))
    assert found == pytest.approx(losses, abs=limit) and len(set(losses)) == 4


@pytest.mark.parametrize("name", WORLDS)
def test_a_stream_that_never_ends_is_validated_within(started, alone, name):
    assert_validated_within(alone["stream", dtype_of(name)], started[name], allowed(name))


@pytest.mark.parametrize("name", WORLDS)
def test_arrays_and_names_as_in_keras_give_the_numbers_of_one_process(started, alone, name):
    one, limit = alone["arrays", dtype_of(name)], allowed(name)
    rows, found = (
        [{key: row[key] for key in NUMBERS} for row in facts(out, "arrays")["rows"]] for out in (one, started[name])
    )
    assert [row["epoch"] for row in rows] == [1, 2, 3] and len({row["val_accuracy"] for row in rows}) > 1
    assert found == [pytest.approx(row, abs=limit) for row in rows]
    predicted = json.loads((one / "arrays-0.json").read_text())["predicted"]
    for rank in seen_by_ranks(started[name], "arrays"):
        assert numpy.asarray(rank["predicted"]) == pytest.approx(numpy.asarray(predicted), abs=limit)


def seen_by_ranks(out, case):
    """Return what each of two ranks saw."""
    return [json.loads((out / f"{case}-{rank}.json").read_text()) for rank in range(2)]


def assert_by_the_clock(one, other, run_dir):
    """The clock has asked for three validations. Both ranks made them after the same updates."""
    assert one == other and one["stop_reason"] == "asked after three"
    lines = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    validated = [line["step"] for line in lines if line["split"] == "val"]
    assert len(validated) >= 3 and validated == sorted({*validated}) and validated[0] > 0
    assert [step for step in one["rows_at"] if step in validated] == validated


def assert_saved_once(one, other, run_dir):
    """The request of the last rank made one checkpoint. The other one is that of the end."""
    assert one == other and one["stop_reason"] == "saved"
    (asked, name), (last, name_of_last) = one["saved"]
    assert SAVE_AFTER <= asked < last == one["steps"]
    assert sorted(path.name for path in Path(run_dir, "checkpoints").glob("step-*")) == [name, name_of_last]


@pytest.mark.parametrize("name", WORLDS)
def test_validations_by_the_clock_are_at_the_same_steps_on_both_ranks(started, name):
    out = started[name]
    assert_by_the_clock(*seen_by_ranks(out, "by-the-clock"), facts(out, "by-the-clock")["run_dir"])


@pytest.mark.parametrize("name", WORLDS)
def test_a_hook_evaluates_as_one_process_does_and_changes_no_number(started, alone, name):
    out = started[name]
    wanted = json.loads((alone["evaluated", dtype_of(name)] / "evaluated-0.json").read_text())["evaluated"]
    assert len(wanted) == 2 and wanted[0]["loss"] > wanted[1]["loss"] > 0
    for rank in seen_by_ranks(out, "evaluated"):
        assert rank["evaluated"] == [pytest.approx(each, abs=allowed(name)) for each in wanted]
    assert apart(*(load_file(out / f"{case}.safetensors") for case in ("evaluated", "adam"))) == 0


@pytest.mark.parametrize("name", WORLDS)
def test_a_save_that_the_last_rank_asks_for_is_made_once(started, name):
    out = started[name]
    assert_saved_once(*seen_by_ranks(out, "saved"), facts(out, "saved")["run_dir"])


def logged(run_dir):
    """Return the log lines of training. There is one for every two updates."""
    lines = map(json.loads, Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == "train"]


def assert_hooks(lines):
    """Ranks 0 and 1 have logged 10 * rank + step, also each its own, rank + 1 and -rank - step."""
    found = [tuple(line[f"hook_{kind}"] for kind in ("mean", "sum", "max")) for line in lines]
    assert [line["step"] for line in lines] == [2, 4] and found == [(6.5, 6, -1), (8.5, 6, -3)]
    assert [[line[f"hook_own/rank_{rank}"] for rank in range(2)] for line in lines] == [[1.5, 11.5], [3.5, 13.5]]


@pytest.mark.parametrize("name", WORLDS)
def test_logged_values_are_reduced_over_both_ranks(started, job, name):
    lines = logged(facts(started[name], "logged")["run_dir"])
    assert_hooks(lines)
    for line, half in zip(lines, job["X"].double().chunk(2), strict=True):  # of two updates each
        assert line["step_mean"] == pytest.approx(float(half[:, 0].mean()), abs=1e-6)
        assert line["step_sum"] == len(half) == 22
        assert line["step_max"] == pytest.approx(float(half.max()))


def one_of(adapter):
    """Return one process on the engine of Keras that `adapter` uses."""
    return ONE_ON_TENSORFLOW if adapter in ON_TENSORFLOW else ONE


@pytest.fixture(scope="module")
def of_keras(tmp_path_factory, run_cli_once):
    """Return an adapter with its number of processes -> the directory with what they have trained of a Keras model."""

    def start(text):
        adapter = Adapter.parse(text)
        needs_backend(adapter.backend)
        if text in (ONE_ON_TENSORFLOW, *ON_TENSORFLOW):
            needs_backend("tensorflow")
        needs_library("keras", "tensorflow")
        (world,) = adapter.world_sizes
        out = tmp_path_factory.mktemp(adapter.backend)
        environ = {"KERAS_BACKEND": "torch"} if text == ONE else {}
        command = [
            "train",
            "--script",
            JOBS / "keras_jobs" / "hooks.py",
            *adapter.flags(world),
            "--run-dir",
            out / "run",
        ]
        done = run_cli_once([*command, "--", out], env=environ, timeout=200)
        assert done.returncode == 0, done.output[-3000:]
        return out

    return OnFirstUse(start)


@KERAS
def test_logged_values_of_a_keras_model_are_reduced_over_both_ranks(of_keras, adapter):
    assert_hooks(logged(facts(of_keras[adapter], "logged")["run_dir"]))


@KERAS
@pytest.mark.parametrize("case", ["plain", "stream", "named"])
def test_two_processes_train_the_keras_model_of_one(of_keras, adapter, case):
    one, two = (load_file(of_keras[each] / f"{case}.safetensors") for each in (one_of(adapter), adapter))
    assert apart(one, two) < EXACT


@KERAS
def test_a_stream_that_never_ends_validates_a_keras_model_within(of_keras, adapter):
    assert_validated_within(of_keras[one_of(adapter)], of_keras[adapter], EXACT)


@KERAS
def test_several_validation_sets_of_a_keras_model_are_measured_when_they_are_due(of_keras, adapter):
    one, two = (facts(of_keras[each], "named")["rows"] for each in (one_of(adapter), adapter))
    assert [each["step"] for each in one] == [each["step"] for each in two] == [0, 3, 6, 8]
    for name in ("val_in_loss", "val_out_loss"):
        assert [each[name] for each in two] == pytest.approx([each[name] for each in one], abs=EXACT)
    assert one[-1]["val_in_loss"] < one[0]["val_in_loss"] != one[0]["val_out_loss"]


@KERAS
def test_media_of_hooks_of_a_keras_model_are_kept(of_keras, adapter):
    run = Path(facts(of_keras[adapter], "logged")["run_dir"])
    rows = [json.loads(line) for line in (run / "media.jsonl").read_text().splitlines()]
    assert [(row["name"], row["kind"], row["step"], row.get("rank")) for row in rows] == [
        ("pixels", "image", 3, None), ("note", "text", 3, 0), ("note", "text", 3, 1),
    ]  # fmt: skip
    image, *texts = (run / row["path"] for row in rows)
    assert numpy.asarray(PIL.Image.open(image)).tolist() == [[0, 50, 100], [150, 200, 250]]
    assert [text.read_text() for text in texts] == ["of 0", "of 1"]


@KERAS
def test_validations_of_a_keras_model_by_the_clock_are_at_the_same_steps(of_keras, adapter):
    out = of_keras[adapter]
    assert_by_the_clock(*seen_by_ranks(out, "by-the-clock"), facts(out, "by-the-clock")["run_dir"])


@KERAS
def test_a_hook_evaluates_a_keras_model_as_one_process_does(of_keras, adapter):
    wanted = json.loads((of_keras[one_of(adapter)] / "evaluated-0.json").read_text())["evaluated"]
    assert len(wanted) == 2 and wanted[0]["loss"] > wanted[1]["loss"] > 0
    for rank in seen_by_ranks(of_keras[adapter], "evaluated"):
        assert rank["evaluated"] == [pytest.approx(each, abs=EXACT) for each in wanted]
    plain, evaluated = (load_file(of_keras[adapter] / f"{case}.safetensors") for case in ("plain", "evaluated"))
    assert apart(plain, evaluated) == 0


@KERAS
def test_a_save_of_a_keras_model_that_the_last_rank_asks_for_is_made_once(of_keras, adapter):
    out = of_keras[adapter]
    assert_saved_once(*seen_by_ranks(out, "saved"), facts(out, "saved")["run_dir"])


@pytest.mark.parametrize("adapter", [each for each in KERAS_ADAPTERS if each not in ON_TENSORFLOW])
def test_callbacks_freeze_sample_and_count_a_keras_model_on_torch(of_keras, adapter):
    one, two = (load_file(of_keras[each] / "frozen.safetensors") for each in (ONE, adapter))
    assert apart(one, two) < EXACT
    first = {  # as the model of the job draws them
        f"net/{name}/kernel": numpy.random.RandomState(size).normal(size=two[f"net/{name}/kernel"].shape)
        for name, size in (("body", 6), ("head", 4))
    }
    moved = {name: numpy.abs(two[name].numpy() - value).max() for name, value in first.items()}
    assert moved["net/head/kernel"] < 1e-6 and moved["net/body/kernel"] > 1e-3  # Keras draws in float32
    texts = []
    for each in (ONE, adapter):
        run = Path(facts(of_keras[each], "observed")["run_dir"])
        rows = [json.loads(line) for line in (run / "media.jsonl").read_text().splitlines()]
        assert [(row["name"], row["step"]) for row in rows] == [("told", 3), ("told", 6)]
        texts.append([(run / row["path"]).read_text() for row in rows])
        assert all(line["flops_per_second"] > 0 < line["mfu"] for line in logged(run)[1:])
    assert texts[0] == texts[1]
