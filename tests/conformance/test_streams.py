"""Streams of which each rank reads its part, in real processes: weights, a kill inside an epoch, and outputs in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from distributed import load_predictions
from tests.conformance.jobs.streams import GLOBAL, SAMPLES, Positions, model, trainer_of

JOB = Path(__file__).parent / "jobs" / "streams.py"
UPDATES = -(-SAMPLES // GLOBAL)
KILLED = UPDATES + 5  # the newest checkpoint is of the step before the last multiple of 3
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def train(run_cli, tmp_path):
    """Return a function that trains with the job, and returns its directory."""

    def run(backend, world, name, *arguments):
        out = tmp_path / name
        out.mkdir()
        done = run_cli(
            ["train", "--script", str(JOB), "--backend", backend, "--nproc-per-node", str(world), "--run-dir", str(out / "run"),
             "--", str(out), *arguments],
            timeout=240,
        )  # fmt: skip
        assert done.returncode == 0, done.output[-3000:]
        return out

    return run


@pytest.fixture(scope="module")
def of_one_process(tmp_path_factory):
    """Return the weights of one process that was not interrupted."""
    trainer = trainer_of(backend="single", checkpoint_dir=str(tmp_path_factory.mktemp("single")))
    trainer.fit(Positions())
    return {name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()}


def assert_close(weights, wanted, limit=1e-9):
    assert weights.keys() == wanted.keys()
    assert all((weights[name] - wanted[name]).abs().max() <= limit for name in wanted)


def assert_outputs(out):
    """Check that the files of the outputs hold those of all samples in order."""
    net = model().double()
    net.load_state_dict(load_file(out / "weights.safetensors"))
    with torch.no_grad():
        wanted = net(torch.stack([inputs for inputs, _ in Positions()]))
    found = load_predictions(out / "outputs")
    assert found.shape == (SAMPLES, 1) and (found - wanted).abs().max() <= 1e-12
    manifest = json.loads((out / "outputs" / "predictions.json").read_text())
    assert max(manifest["samples"]) - min(manifest["samples"]) <= 1


def test_one_process_resumes_bit_for_bit_inside_an_epoch(of_one_process, tmp_path):
    first = trainer_of(backend="single", checkpoint_dir=str(tmp_path / "cut"), max_steps=KILLED)
    first.fit(Positions())
    newest = next((tmp_path / "cut").rglob(f"step-{KILLED:08}"))
    more = trainer_of(backend="single", checkpoint_dir=str(tmp_path / "more"), resume_from_checkpoint=str(newest))
    more.fit(Positions())
    assert_close(more.model.state_dict(), of_one_process, 0)


FULL = pytest.mark.full
BACKENDS = [
    ("pytorch-ddp", 2),
    *(pytest.param(*each, marks=FULL) for each in (("fsdp", 2), ("pytorch-ddp", 3), ("fsdp", 3))),
]


def assert_goes_on(killed, world):
    """Check that a run that was killed has read nothing again."""
    assert (killed / "killed").exists()
    for rank in range(world):
        read = list(map(int, (killed / f"read-{rank}-1").read_text().split()))
        start = (KILLED // 3 * 3 - UPDATES) * GLOBAL
        assert read == list(range(SAMPLES))[rank::world][len(range(rank, start, world)) :]


@pytest.mark.parametrize(("backend", "world"), BACKENDS)
def test_a_killed_run_continues_at_the_positions_of_the_ranks(train, of_one_process, backend, world):
    killed = train(backend, world, "killed", "--kill", str(KILLED))
    assert_goes_on(killed, world)
    assert_close(load_file(killed / "weights.safetensors"), of_one_process)
    assert_outputs(killed)


@pytest.mark.full
@pytest.mark.parametrize(("backend", "world"), BACKENDS)
def test_a_killed_run_has_the_bits_of_one_that_was_not(train, backend, world):
    weights = [
        load_file(train(backend, world, name, *arguments) / "weights.safetensors")
        for name, arguments in (("killed", ["--kill", str(KILLED)]), ("whole", []))
    ]
    assert_close(*weights, 0)


@pytest.mark.full
@pytest.mark.parametrize("world", [1, 3])
def test_a_run_that_resumes_on_another_number_of_processes_uses_each_sample_once(
    train, of_one_process, run_cli, tmp_path, world
):
    out = train("pytorch-ddp", 2, "first")
    checkpoint = out / "run" / "checkpoints" / f"step-{UPDATES + 4:08}"
    other = tmp_path / "other"
    other.mkdir()
    done = run_cli(
        ["train", "--script", str(JOB), "--nproc-per-node", str(world), "--run-dir", str(other / "run"),
         "--resume-from-checkpoint", str(checkpoint), "--", str(other)],
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.output[-3000:]
    assert_close(load_file(other / "weights.safetensors"), of_one_process)
    assert_outputs(other)
