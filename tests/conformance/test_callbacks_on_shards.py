"""Callbacks that the package ships do on a model that is sharded over two processes what they do on a whole one."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import event_files
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "callbacks.py"
EXACT = 1e-9
pytestmark = [pytest.mark.timeout(300), pytest.mark.full]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the directory with what one process has trained."""
    out = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(out)
        runpy.run_path(str(JOB))["train"](out, backend="single", verbose=False)
    return out


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, run_cli_once):
    """Return the directory with what two processes have trained, and the output of the command."""
    needs_backend("fsdp")
    out = tmp_path_factory.mktemp("fsdp")
    flags = ["--backend", "fsdp", "--nproc-per-node", "2", "--run-dir", str(out / "run")]
    done = run_cli_once(["train", "--script", str(JOB), *flags, "--", str(out)], timeout=150)
    assert done.returncode == 0, done.output[-3000:]
    return out, done.stdout


def run_dir(out, case="whole"):
    return Path(json.loads((out / "run_dirs.json").read_text())[case])


def test_the_average_is_that_of_one_process(alone, sharded):
    one, two = (load_file(out / "whole.safetensors") for out in (alone, sharded[0]))
    assert one.keys() == two.keys()
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < EXACT


@pytest.mark.parametrize(("whole", "resumed"), [("whole", "resumed"), ("frozen", "frozen-resumed")])
def test_a_run_that_was_cut_off_goes_on_bit_for_bit(sharded, whole, resumed):
    one, other = (load_file(sharded[0] / f"{name}.safetensors") for name in (whole, resumed))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def logged(out, case, *names):
    """Return step -> the values of `names` in the log lines of training."""
    rows = map(json.loads, (run_dir(out, case) / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: [row[name] for name in names] for row in rows if row["split"] == "train"}


def test_a_resumed_run_logs_and_samples_what_the_whole_one_does(sharded):
    """The run was cut off after five updates. What is sampled, measured and counted goes on from there."""
    out = sharded[0]
    first, rest, whole = (media(run_dir(out, case)) for case in ("cut-off", "resumed", "whole"))
    assert [step for _, step in first] == [2, 3, 3, 4] and {**first, **rest} == whole and not first.keys() & rest.keys()
    first, rest, whole = (logged(out, case, "loss", "grad_norm") for case in ("cut-off", "resumed", "whole"))
    assert rest and all(whole[step] == values for step, values in rest.items()) and max(rest) == max(whole) == 8
    assert all(whole[step] == values for step, values in first.items() if step < 5)
    rates = (logged(out, case, "flops_per_second", "samples_per_second")[8] for case in ("resumed", "whole"))
    one, other = (flops / samples for flops, samples in rates)
    assert one == pytest.approx(other, rel=1e-6) and one > 0


def test_the_histograms_of_a_resumed_run_are_those_of_the_whole_one(sharded):
    one, two = (event_files.read(run_dir(sharded[0], case) / "tensorboard") for case in ("whole", "resumed"))
    assert set(one.Tags()["histograms"]) == set(two.Tags()["histograms"]) != set()
    for tag in one.Tags()["histograms"]:
        found = [(each.step, each.histogram_value) for each in two.Histograms(tag)]
        wanted = [(each.step, each.histogram_value) for each in one.Histograms(tag)]
        assert [step for step, _ in wanted] == [4, 8] and found == wanted[1:], tag


def test_frozen_parameters_wait_for_their_update(alone, sharded):
    first = runpy.run_path(str(JOB))["net"]().double().state_dict()
    early, late = (load_file(sharded[0] / f"{name}.safetensors") for name in ("frozen-cut-off", "frozen"))
    assert [name for name in first if torch.equal(early[name], first[name])] == ["0.weight", "0.bias"]
    assert not any(torch.equal(late[name], first[name]) for name in first)
    one, two = (load_file(out / "frozen.safetensors") for out in (alone, sharded[0]))
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < EXACT


def test_callbacks_say_what_they_cannot_do_without_a_gpu(sharded):
    assert sharded[1].count("DeviceStats logs nothing: ") == 3  # once in each of three fits


def media(run):
    """Return (name, step) -> the content of each image or text that was logged."""
    rows = map(json.loads, (run / "media.jsonl").read_text().splitlines())
    return {(row["name"], row["step"]): (run / row["path"]).read_bytes() for row in rows}


def images(run):
    """Return (name, step) -> the content of each image that was logged."""
    return {(name, step): content for (name, step), content in media(run).items() if name.startswith("samples/")}


def test_the_images_are_those_of_one_process_and_each_is_there_once(alone, sharded):
    one, two = images(run_dir(alone)), images(run_dir(sharded[0]))
    assert [*two] == [(f"samples/{number}", step) for step in (3, 6) for number in range(2)]
    assert two == one and len(set(two.values())) == 4
    assert media(run_dir(sharded[0])).keys() == {*two, *(("told", step) for step in (2, 4, 6, 8))}
    lines = (run_dir(sharded[0]) / "media.jsonl").read_text().splitlines()
    assert len(lines) == 8


def test_the_summary_counts_whole_parameters(sharded):
    """The whole run and the one that was cut off show it, and not the resumed one. FSDP gives the model a class of its own."""
    for name, kind, number in (("0", "Linear", 168), ("2", "Linear", 150), ("all", "Sequential", 318)):
        assert len(re.findall(rf"^{name} +\w*{kind} +{number} parameters$", sharded[1], re.M)) == 2, name


def test_the_histograms_are_those_of_whole_tensors(alone, sharded):
    one, two = (event_files.read(run_dir(out) / "tensorboard") for out in (alone, sharded[0]))
    parts = {"0.weight": 144, "0.bias": 24, "2.weight": 144, "2.bias": 6}
    sizes = {f"{kind}/{part}": size for kind in ("weights", "gradients") for part, size in parts.items()}
    assert set(two.Tags()["histograms"]) == set(one.Tags()["histograms"]) == set(sizes)
    for tag, size in sizes.items():
        found, wanted = two.Histograms(tag), one.Histograms(tag)
        assert [each.step for each in found] == [4, 8]
        for here, there in zip(found, wanted, strict=True):
            here, there = here.histogram_value, there.histogram_value
            assert here.num == size == sum(here.bucket)
            for name in ("min", "max", "sum", "sum_squares"):
                assert getattr(here, name) == pytest.approx(getattr(there, name), rel=1e-6, abs=EXACT), (tag, name)
