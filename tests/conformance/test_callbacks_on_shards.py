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


def test_a_run_with_an_average_that_was_cut_off_goes_on_bit_for_bit(sharded):
    whole, resumed = (load_file(sharded[0] / f"{name}.safetensors") for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys() and all(torch.equal(whole[name], resumed[name]) for name in whole)


def images(run):
    """Return (name, step) -> the content of each image that was logged."""
    rows = map(json.loads, (run / "media.jsonl").read_text().splitlines())
    return {(row["name"], row["step"]): (run / row["path"]).read_bytes() for row in rows}


def test_the_images_are_those_of_one_process_and_each_is_there_once(alone, sharded):
    one, two = images(run_dir(alone)), images(run_dir(sharded[0]))
    assert [*two] == [(f"samples/{number}", step) for step in (3, 6) for number in range(2)]
    assert two == one and len(set(two.values())) == 4
    lines = (run_dir(sharded[0]) / "media.jsonl").read_text().splitlines()
    assert len(lines) == 4


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
