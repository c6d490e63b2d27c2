"""After a fit `trainer.model` is whole on every torch backend: Hugging Face models are saved with `save_pretrained` and loaded again."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from distributed.cli.checkpoint import export
from tests.conformance.runs import FULL
from tests.conftest import needs_backend, needs_library

JOB = Path(__file__).parent / "jobs" / "hugging_face.py"
CASES = ("gpt", "classifier", "frozen", "adapted")
# The models that each backend trains. They differ in what is cut, so that replicas need not train all of them.
BACKENDS = {
    "single": ("gpt", "adapted"),
    "pytorch-ddp": ("gpt", "adapted"),
    "fsdp": CASES,
    "deepspeed": ("gpt-0", "gpt-1", "gpt-2", "gpt-3", "frozen-3", "adapted-3"),  # the number is the stage
    "horovod": ("gpt", "adapted"),
    "ray": ("gpt", "adapted"),
}
# Backend -> the same model with checkpoints of the trained parameters alone, and with whole checkpoints
ONLY_TRAINABLE = {
    **dict.fromkeys(("single", "pytorch-ddp", "fsdp", "horovod", "ray"), ("adapted-only", "adapted")),
    "deepspeed": ("adapted-3-only", "adapted-3"),
}
pytestmark = pytest.mark.timeout(480)


CHECKED = [
    pytest.param(
        backend, case, marks=FULL if backend in ("single", "horovod", "deepspeed", "ray") else ()
    )  # all but DeepSpeed have a copy of the model in each process, as pytorch-ddp
    for backend, cases in BACKENDS.items()
    for case in cases
]


def cases_of(backend):
    """Return the cases that can be trained here. The tests of the others say what is missing."""
    cases = (*BACKENDS.get(backend, ("gpt",)), *ONLY_TRAINABLE.get(backend, ())[:1])
    return [case for case in cases if not case.startswith("adapted") or importlib.util.find_spec("peft")]


def train(run_cli_once, out, backend, *flags, **more):
    """Return what rank 0 saw of each case, and the output of the launcher."""
    needs_backend(backend)
    pytest.importorskip("transformers")
    cases = cases_of(backend)
    command = ["train", "--script", str(JOB), "--nproc-per-node", "1" if backend == "single" else "2", *flags]
    done = run_cli_once([*command, "--run-dir", str(out / "run"), "--", str(out), backend, *cases], timeout=200, **more)
    assert done.returncode == 0, done.output[-3000:]
    return {path.stem: json.loads(path.read_text()) for path in out.glob("*.json")}, done


def exported(checkpoint, out):
    """Return what `distributed checkpoint export` writes for a checkpoint, or for the newest one of a run directory."""
    export(checkpoint, out, force=True)
    return load_file(out)


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert all(numpy.array_equal(one[name], other[name]) for name in one)


def check(out, facts, case):
    """Assert that the loaded model has the bits of the checkpoint, that the user's object is a plain module, and that a further fit works."""
    seen = facts[case]
    assert seen["kinds"] == ["Parameter", "Tensor"], case
    for fact in ("is_the_users", "in_fit", "by_trainer", "copied", "trainable", "evaluated_twice", "goes_on"):
        assert seen[fact] is True, (case, fact)
    loaded = load_file(out / f"{case}.safetensors")
    run_dir = Path(seen["run_dir"])
    first = sorted((run_dir / "checkpoints").iterdir())[0]
    assert_same(loaded, exported(first, out / "exported.safetensors"))
    assert_same(load_file(out / f"{case}-further.safetensors"), exported(run_dir, out / "exported.safetensors"))


@pytest.fixture(scope="module")
def trained(tmp_path_factory, run_cli_once):
    """Return backend -> (directory, facts by case, the command). Each backend trains once."""
    found = {}

    def of(backend):
        if backend not in found:
            out = tmp_path_factory.mktemp(backend)
            launched = ["--backend", "ray"] if backend == "ray" else []  # the script names the other ones itself
            found[backend] = (out, *train(run_cli_once, out, backend, *launched))
        return found[backend]

    return of


@pytest.mark.parametrize(
    "backend", [each if each == "pytorch-ddp" else pytest.param(each, marks=FULL) for each in ONLY_TRAINABLE]
)
def test_checkpoints_of_the_adapter_alone_give_the_model_of_whole_checkpoints(trained, backend):
    """PEFT with `checkpoint_trainable_only`: `save_pretrained`, a resume and a further fit have the bits of the run without it."""
    needs_library("peft", backend)
    out, facts, _ = trained(backend)
    only, whole = ONLY_TRAINABLE[backend]
    assert facts[only] == {**facts[whole], "run_dir": facts[only]["run_dir"]}
    assert_same(load_file(out / f"{only}.safetensors"), load_file(out / f"{whole}.safetensors"))
    checkpoint = sorted(Path(facts[only]["run_dir"], "checkpoints").iterdir())[0]
    stored = {name for file in checkpoint.rglob("model/*.safetensors") for name in load_file(file)}
    assert stored and all("lora_" in name for name in stored)


@pytest.mark.parametrize(("backend", "case"), CHECKED)
def test_a_saved_model_is_the_checkpoint_bit_for_bit(trained, backend, case):
    if case.startswith("adapted"):
        needs_library("peft", backend)
    out, facts, _ = trained(backend)
    check(out, facts, case)


def test_a_sharded_model_without_room_stays_in_pieces_and_trains_the_same(trained):
    out, facts, done = trained("fsdp")
    pieces = facts["gpt-in-pieces"]
    assert pieces["parts"] == ["DTensor"]
    assert (
        done.stdout.count("trainer.model stays sharded: not every process has memory for two copies of the whole model")
        == 1
    )
    assert pieces["further"] == facts["gpt"]["further"]
    assert_same(load_file(out / "gpt-in-pieces.safetensors"), load_file(out / "gpt.safetensors"))
    assert_same(load_file(out / "gpt-in-pieces-further.safetensors"), load_file(out / "gpt-further.safetensors"))
