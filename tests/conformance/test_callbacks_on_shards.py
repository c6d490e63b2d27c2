"""Callbacks that the package ships do on two processes, with a whole and with a sharded model, what they do on one."""

from __future__ import annotations

import io
import json
import re
import runpy
from pathlib import Path

import numpy
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file

from distributed.testing import Adapter
from tests import event_files
from tests.conformance.runs import OnFirstUse, allowed, apart, dtype_of
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "callbacks.py"
WORLDS = {  # name -> the backend with its settings
    "fsdp": "fsdp", "pytorch-ddp": "pytorch-ddp", "horovod": "horovod", "ray": "ray[cpus_per_worker=0.5]",
    "zero-0": "deepspeed[zero_stage=0]",
    "zero-1": "deepspeed[zero_stage=1]", "zero-2": "deepspeed[zero_stage=2]", "zero-3": "deepspeed[zero_stage=3]",
}  # fmt: skip
SHARDED = ("zero-1", "zero-2", "zero-3")  # averages and frozen parameters are refused there
pytestmark = [pytest.mark.timeout(300), pytest.mark.full]
on_each = pytest.mark.parametrize("name", WORLDS)
on_each_that_freezes = pytest.mark.parametrize("name", [name for name in WORLDS if name not in SHARDED])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return a function from the name of a world to the directory with what one process has trained for a comparison."""

    def train(kind):
        dtype, sharded = kind
        out = tmp_path_factory.mktemp("alone")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(out)
            runpy.run_path(str(JOB))["train"](out, sharded=sharded, backend="single", verbose=False, dtype=dtype)
        return out

    trained = OnFirstUse(train)
    return lambda name: trained[dtype_of(name), name in SHARDED]


@pytest.fixture(scope="module")
def started(tmp_path_factory, run_cli_once):
    """Return name of a world -> the directory with what two processes have trained, and the output of the command."""

    def start(name):
        adapter = Adapter.parse(f"{WORLDS[name]}:2")
        needs_backend(adapter.backend)
        out = tmp_path_factory.mktemp(name)
        command = ["train", "--script", str(JOB), *adapter.flags(2), "--run-dir", str(out / "run")]
        done = run_cli_once([*command, "--", out, dtype_of(name), *(["sharded"] * (name in SHARDED))], timeout=150)
        assert done.returncode == 0, done.output[-3000:]
        return out, done.stdout

    return OnFirstUse(start)


def run_dir(out, case="whole"):
    return Path(json.loads((out / "run_dirs.json").read_text())[case])


@on_each
def test_the_weights_are_that_of_one_process(alone, started, name):
    one, two = (load_file(out / "whole.safetensors") for out in (alone(name), started[name][0]))
    assert apart(one, two) < allowed(name)


@on_each
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(started, name):
    for prefix in ("", *(["frozen-"] if name not in SHARDED else [])):
        whole = load_file(started[name][0] / f"{prefix.removesuffix('-') or 'whole'}.safetensors")
        assert apart(whole, load_file(started[name][0] / f"{prefix}resumed.safetensors")) == 0, prefix


@on_each
def test_every_rank_gets_the_state_of_the_main_process_back(started, name):
    """Each rank has kept the number of updates and its own rank."""
    resumed = run_dir(started[name][0], "resumed")
    kept = {"device": "cpu", "tensor": [5, 0], "array": [5, 0], "types": ["Tensor", "ndarray"]}
    assert [json.loads((resumed / f"remembered-{rank}.json").read_text()) for rank in range(2)] == [kept, kept]


def logged(out, case, *names):
    """Return step -> the values of `names` in the log lines of training."""
    rows = map(json.loads, (run_dir(out, case) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: [row[name] for name in names] for row in rows if row["split"] == "train"}


@on_each
def test_a_resumed_run_logs_and_samples_what_the_whole_one_does(started, name):
    """The run was cut off after five updates. What is sampled, measured and counted goes on from there."""
    out = started[name][0]
    first, rest, whole = (media(run_dir(out, case)) for case in ("cut-off", "resumed", "whole"))
    assert [step for _, step in first] == [2, 3, 3, 4] and {**first, **rest} == whole and not first.keys() & rest.keys()
    first, rest, whole = (logged(out, case, "loss", "grad_norm") for case in ("cut-off", "resumed", "whole"))
    assert rest and all(whole[step] == values for step, values in rest.items()) and max(rest) == max(whole) == 8
    assert all(whole[step] == values for step, values in first.items() if step < 5)
    rates = (logged(out, case, "flops_per_second", "samples_per_second")[8] for case in ("resumed", "whole"))
    one, other = (flops / samples for flops, samples in rates)
    assert one == pytest.approx(other, rel=1e-6) and one > 0


@on_each
def test_the_histograms_of_a_resumed_run_are_those_of_the_whole_one(started, name):
    one, two = (event_files.read(run_dir(started[name][0], case) / "tensorboard") for case in ("whole", "resumed"))
    assert set(one.Tags()["histograms"]) == set(two.Tags()["histograms"]) != set()
    for tag in one.Tags()["histograms"]:
        found = [(each.step, each.histogram_value) for each in two.Histograms(tag)]
        wanted = [(each.step, each.histogram_value) for each in one.Histograms(tag)]
        assert [step for step, _ in wanted] == [4, 8] and found == wanted[1:], tag


@on_each_that_freezes
def test_frozen_parameters_wait_for_their_update(alone, started, name):
    out = started[name][0]
    first = runpy.run_path(str(JOB))["net"]().to(getattr(torch, dtype_of(name))).state_dict()
    early, late = (load_file(out / f"{case}.safetensors") for case in ("frozen-cut-off", "frozen"))
    assert [part for part in first if torch.equal(early[part], first[part])] == ["0.weight", "0.bias"]
    assert not any(torch.equal(late[part], first[part]) for part in first)
    assert apart(load_file(alone(name) / "frozen.safetensors"), late) < allowed(name)


@on_each
def test_callbacks_say_what_they_cannot_do_without_a_gpu(started, name):
    assert started[name][1].count("DeviceStats logs nothing: ") == 3  # once in each of three fits


def media(run):
    """Return (name, step) -> the content of each image or text that was logged."""
    rows = map(json.loads, (run / "media.jsonl").read_text().splitlines())
    return {(row["name"], row["step"]): (run / row["path"]).read_bytes() for row in rows}


def images(run):
    """Return (name, step) -> the pixels of each image that was logged."""
    found = {(name, step): content for (name, step), content in media(run).items() if name.startswith("samples/")}
    return {key: numpy.asarray(PIL.Image.open(io.BytesIO(content))) for key, content in found.items()}


@on_each
def test_the_images_are_those_of_one_process_and_each_is_there_once(alone, started, name):
    run = run_dir(started[name][0])
    one, two = images(run_dir(alone(name))), images(run)
    assert [*two] == [*one] == [(f"samples/{number}", step) for step in (3, 6) for number in range(2)]
    levels = 0 if dtype_of(name) == "float64" else 1  # a level of gray may be rounded to the next one
    assert max(int(abs(one[key].astype(int) - two[key]).max()) for key in one) <= levels
    assert len({pixels.tobytes() for pixels in two.values()}) == 4
    assert {pixels.shape for pixels in two.values()} == {(2, 3)}
    assert media(run).keys() == {*two, *(("told", step) for step in (2, 4, 6, 8))}
    assert len((run / "media.jsonl").read_text().splitlines()) == 8


@on_each
def test_the_summary_counts_whole_parameters(started, name):
    """The whole run and the one that was cut off show it, and not the resumed one. FSDP gives the model a class of its own."""
    for part, kind, number in (("0", "Linear", 168), ("2", "Linear", 150), ("all", "Sequential", 318)):
        assert len(re.findall(rf"^{part} +\w*{kind} +{number} parameters$", started[name][1], re.M)) == 2, part


@on_each
def test_the_histograms_are_those_of_whole_tensors(alone, started, name):
    outs = alone(name), started[name][0]
    one, two = (event_files.read(run_dir(out) / "tensorboard") for out in outs)
    parts = {"0.weight": 144, "0.bias": 24, "2.weight": 144, "2.bias": 6}
    kinds = ("weights",) if name in SHARDED else ("weights", "gradients")  # ZeRO 1 to 3 keeps no gradients
    sizes = {f"{kind}/{part}": size for kind in kinds for part, size in parts.items()}
    assert set(two.Tags()["histograms"]) == set(sizes) <= set(one.Tags()["histograms"])
    for tag, size in sizes.items():
        found, wanted = two.Histograms(tag), one.Histograms(tag)
        assert [each.step for each in found] == [4, 8]
        for here, there in zip(found, wanted, strict=True):
            here, there = here.histogram_value, there.histogram_value
            assert here.num == size == sum(here.bucket)
            for fact in ("min", "max", "sum", "sum_squares"):
                wanted = pytest.approx(
                    getattr(there, fact), rel=1e-6 if dtype_of(name) == "float64" else 1e-3, abs=allowed(name)
                )
                assert getattr(here, fact) == wanted, (tag, fact)
