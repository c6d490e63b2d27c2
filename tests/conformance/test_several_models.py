"""Several models train on one to three processes as in a plain loop, resume bit for bit, and take checkpoints of other backends."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.conformance.runs import EXACT, FULL, OnFirstUse, apart
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "several.py"
WORLDS = {
    "single": ("single", 1, ()), "ddp-2": ("pytorch-ddp", 2, ()), "ddp-3": ("pytorch-ddp", 3, ("--set", "ddp.bucket_cap_mb=0.0003")),
    "fsdp-2": ("fsdp", 2, ()), "fsdp-3": ("fsdp", 3, ()), "ray-fsdp-2": ("ray", 2, ("--set", "ray.engine=fsdp")),
    "ray-2": ("ray", 2, ()),
}  # fmt: skip
BY_DEFAULT = ("single", "ddp-2")  # test_every_backend.py trains several models on three processes, and in shards
SOME = [pytest.param(name, marks=() if name in BY_DEFAULT else FULL) for name in WORLDS]
pytestmark = pytest.mark.timeout(600)
# A script without a guard, whose `fit` starts the workers.
PLAIN = """
import json, sys
import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset
from distributed import Trainer


def step(models, batch, update):
    real, noise = batch
    fake = models["g"](noise)
    update("d", softplus(-models["d"](real)).mean() + softplus(models["d"](fake.detach())).mean())
    update("g", softplus(-models["d"](fake)).mean())


def weights(models):
    return {name: nn.utils.parameters_to_vector(models[name].parameters()).tolist() for name in ("g", "d")}


torch.manual_seed(0)
given = {"g": nn.Linear(3, 4).double(), "d": nn.Linear(4, 1).double()}
data = TensorDataset(torch.randn(50, 4, dtype=torch.float64), torch.randn(50, 3, dtype=torch.float64))
trainer = Trainer(
    models=given, training_step=step, dtype="float64", epochs=2, global_batch_size=8, shuffle=False, nproc_per_node=int(sys.argv[1]), device="cpu"
)
before = weights(given)
first = trainer.fit(data).steps
steps = trainer.fit(data).steps
print(json.dumps({"before": before, "given": weights(given), "model": weights(trainer.model), "steps": [first, steps]}))
"""


@pytest.fixture(scope="module")
def job():
    return runpy.run_path(str(JOB))


@pytest.fixture(scope="module")
def started(tmp_path_factory, run_cli_once):
    """Return the name of a world -> the directory with its results. Each world is started once."""

    def start(name):
        backend, world, more = WORLDS[name]
        needs_backend(backend)
        out = tmp_path_factory.mktemp(name)
        elsewhere = [] if name == "single" else [str(source(found["single"]))]
        flags = ["--backend", backend, "--nproc-per-node", str(world), "--run-dir", str(out / "run"), *more]
        done = run_cli_once(["train", "--script", str(JOB), *flags, "--", str(out), backend, *elsewhere])
        assert done.returncode == 0, done.output
        return out

    found = OnFirstUse(start)
    return found


@pytest.fixture(scope="module")
def mixed(tmp_path_factory, run_cli_once):
    """Return the name of a world -> the directory with what it trained in float32 and with bf16."""

    def start(name):
        backend, world, more = WORLDS[name]
        needs_backend(backend)
        out = tmp_path_factory.mktemp(f"mixed-{name}")
        flags = ["--backend", backend, "--nproc-per-node", str(world), "--run-dir", str(out / "run"), *more]
        done = run_cli_once(["train", "--script", str(JOB), *flags, "--", str(out), backend, "mixed"])
        assert done.returncode == 0, done.output
        return out

    return OnFirstUse(start)


def source(out):
    """Return the checkpoint of the run that was cut off."""
    (checkpoint,) = (out / "source").rglob("step-00000007")
    return checkpoint


def weights(out, name):
    return load_file(out / f"{name}.safetensors")


def by_hand(job):
    """Return the weights of a plain loop in this process."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        models = {name: make().double() for name, make in job["MODELS"].items()}
    optimizers = {name: job[kind](models[name].parameters()) for name, kind in (("g", "adam"), ("d", "sgd"))}
    full = {name: optimizer.param_groups[0]["lr"] for name, optimizer in optimizers.items()}
    number = 0

    def update(name, loss):
        if isinstance(loss, tuple):
            loss = loss[0] / loss[1]
        parameters = list(models[name].parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(parameters, job["CLIP"])
        rate = full[name] * min(1.0, (number + 1) / job["WARM"]) * (0.5 ** (number // 4) if name == "d" else 1.0)
        optimizers[name].param_groups[0]["lr"] = rate
        optimizers[name].step()

    for _ in range(job["EPOCHS"]):
        for start in range(0, job["SAMPLES"], job["BATCH"]):
            job["step"](models, [column[start : start + job["BATCH"]] for column in job["data"]().tensors], update)
            number += 1
    return {f"{name}.{key}": value for name, model in models.items() for key, value in model.state_dict().items()}


@pytest.mark.parametrize("world", SOME)
def test_the_numbers_are_those_of_a_plain_loop(started, job, world):
    out = started[world]

    assert apart(weights(out, "whole"), by_hand(job)) < EXACT
    assert apart(weights(out, "one-batch"), by_hand(job)) < EXACT
    assert apart(weights(out, "empty"), weights(started["single"], "empty")) < EXACT


@pytest.mark.parametrize("world", [each for each in SOME if each.values[0] != "single"])
def test_losses_and_metrics_are_those_of_one_process(started, world):
    for name in ("whole", "empty"):
        here, there = (json.loads((out / f"{name}.json").read_text()) for out in (started[world], started["single"]))
        assert {"d_loss", "g_loss", "val_loss", "val_d_loss"} <= here["row"].keys()
        assert here["row"] == pytest.approx(there["row"], abs=EXACT)
        assert here["again"] == pytest.approx(there["again"], abs=EXACT)


@pytest.mark.parametrize("world", SOME)
def test_a_resumed_run_ends_in_the_same_bits(started, world):
    out = started[world]

    assert apart(weights(out, "resumed"), weights(out, "whole")) == 0.0
    assert apart(weights(out, "cut"), weights(out, "whole")) > 0.0


@pytest.mark.parametrize("world", [each for each in SOME if each.values[0] != "single"])
def test_a_checkpoint_of_another_backend_goes_on(started, world):
    assert apart(weights(started[world], "moved"), weights(started["single"], "whole")) < EXACT


def test_fit_in_a_plain_script_starts_workers_and_the_given_modules_get_the_weights(run_python, tmp_path):
    (tmp_path / "plain.py").write_text(PLAIN)
    one, two = (run_python(["plain.py", number], cwd=tmp_path) for number in ("1", "2"))
    alone, together = (json.loads(done.stdout.splitlines()[-1]) for done in (one, two))
    assert together["steps"] == alone["steps"] == [14, 28]
    for name in ("g", "d"):
        assert together["given"][name] == together["model"][name] != together["before"][name]
        assert together["given"][name] == pytest.approx(alone["given"][name], abs=EXACT)


@pytest.mark.parametrize("world", ["ddp-2"])
def test_different_calls_on_two_ranks_are_an_error_on_both(started, world):
    errors = [json.loads((started[world] / f"errors-{rank}.json").read_text()) for rank in (0, 1)]

    assert "called update('d', ...) on rank 0 and update('g', ...) on rank 1" in errors[0]["differs"]
    assert "called update('g', ...) on rank 1 and update('d', ...) on rank 0" in errors[1]["differs"]
    assert all("no gradient for d.layers.1.0.weight" in each["unused"] for each in errors)


@pytest.mark.full
@pytest.mark.parametrize("world", ["ddp-2", "fsdp-2", "ray-2"])
def test_bf16_moves_the_weights_as_in_one_process(mixed, job, world):
    """Rounding is the difference that bf16 makes in one process. Another split of a batch rounds differently, and not more."""
    one, many = mixed["single"], mixed[world]
    rounding = apart(weights(one, "bf16"), weights(one, "float32"))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first = {
            f"{name}.{key}": each for name, make in job["MODELS"].items() for key, each in make().state_dict().items()
        }
    assert 1e-4 < rounding < apart(weights(one, "bf16"), first) / 20
    assert apart(weights(many, "float32"), weights(one, "float32")) < 1e-5
    assert apart(weights(many, "bf16"), weights(one, "bf16")) < rounding
    assert rounding / 4 < apart(weights(many, "bf16"), weights(many, "float32")) < 2 * rounding
    assert {each.dtype for each in weights(many, "bf16").values()} == {torch.float32}
    lost, wanted = (json.loads((out / "bf16.json").read_text())["again"] for out in (many, one))
    assert lost == pytest.approx(wanted, rel=2**-7)
