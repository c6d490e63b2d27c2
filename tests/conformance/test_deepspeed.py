"""ZeRO's stages compute the numbers of one process and cut what they should, checkpoints open at other stages, and a user's config counts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import load_file

from distributed.checkpoints.shards import read_tensors
from tests.conformance.jobs import zero as job
from tests.conformance.runs import FULL, OnFirstUse, arguments, assert_same, events
from tests.conftest import needs_backend

JOBS = Path(__file__).parent / "jobs"
ZEROS = [name for name in job.STAGES if name != "zero-0"]
pytestmark = pytest.mark.timeout(800)  # seconds on a busy machine


@pytest.fixture(scope="module", autouse=True)
def _is_installed():
    needs_backend("deepspeed")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, run_cli_once):
    """Return (backend, world size) -> (what every rank saw, the directory of the weights)."""

    def start(key):
        backend, world = key
        out = tmp_path_factory.mktemp(f"{backend}-{world}")
        command = ["train", "--script", str(JOBS / "zero.py"), "--backend", backend, "--nproc-per-node", str(world)]
        done = run_cli_once([*command, "--run-dir", str(out / "run"), "--", str(out), backend], timeout=280)
        assert done.returncode == 0, done.output[-3000:]
        assert not any(word in done.output for word in ("[WARNING]", "[INFO]", "Warning", "DeepSpeed info")), (
            done.output
        )
        return [json.loads((out / f"{rank}.json").read_text()) for rank in range(world)], out

    return OnFirstUse(start)


@pytest.fixture
def seen(worlds):
    """Return case -> what rank 0 of two saw."""
    return worlds["deepspeed", 2][0][0]


def between(one, other):
    one, other = load_file(one), load_file(other)
    assert set(one) == set(other)
    return max(numpy.abs(one[name] - other[name]).max() for name in one)


def moved(worlds, case, reference, world=2):
    """Return the largest difference of the final weights from those of one process."""
    return between(
        worlds["deepspeed", world][1] / f"{case}.safetensors", worlds["single", 1][1] / f"{reference}.safetensors"
    )


@pytest.fixture
def floor(worlds):
    """Return how far the fp32 weights of one process move when the same batches are split differently."""
    out = worlds["single", 1][1]
    return max(between(out / f"{name}.safetensors", out / f"{name}-cut.safetensors") for name in job.MEASURED)


@pytest.mark.parametrize("case", job.CASES)
@pytest.mark.parametrize("stage", job.STAGES)
def test_every_stage_gives_the_numbers_of_one_process(worlds, seen, floor, stage, case):
    assert moved(worlds, f"{stage}-{case}", case) <= 3 * floor
    here, there = seen[f"{stage}/{case}"], worlds["single", 1][0][0][case]
    for name in ("loss", "val_loss", "again", "predicted", "norms"):
        assert numpy.allclose(here[name], there[name], rtol=1e-5, atol=2e-6, equal_nan=True), name
    assert (here["steps"], here["skipped"]) == (there["steps"], there["skipped"])
    assert bool(here["skipped"]) == (case in ("sgd-nan", "sgd-nothing-counts"))


@pytest.mark.parametrize("world", [pytest.param(1, marks=FULL), 2, pytest.param(3, marks=FULL)])
@pytest.mark.parametrize("stage", [*job.STAGES, *job.OFFLOADED])
def test_any_number_of_processes_and_offloading_change_no_number(worlds, floor, stage, world):
    assert moved(worlds, f"{stage}-sgd-pair", "sgd-pair", world) <= 3 * floor
    if world == 2:
        assert moved(worlds, f"{stage}-adam-clipped", "adam-clipped") <= 3 * floor


@pytest.mark.parametrize("case", ["frozen", "groups"])
@pytest.mark.parametrize("stage", range(4))
def test_frozen_parameters_and_several_groups(worlds, floor, stage, case):
    assert moved(worlds, f"{case}-{stage}", case) <= 3 * floor


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=FULL)])
def test_the_optimizer_state_is_cut_over_the_processes(worlds, world):
    whole = worlds["deepspeed", 2][0][0]["zero-0/sgd"]["state_held"][-1]
    for stage in [*ZEROS, *job.OFFLOADED]:
        held = [rank[f"{stage}/sgd-pair"]["state_held"][-1] for rank in worlds["deepspeed", world][0]]
        assert sum(held) >= whole and max(held) < whole / world * 1.1, stage


def test_in_stage_3_the_parameters_are_empty_between_their_uses(seen):
    assert set(seen["zero-3/adam"]["held"]) == set(seen["offload-3/adam-clipped"]["held"]) == {0}
    assert min(seen["zero-2/adam"]["held"]) > 0


def test_in_16_bits_the_model_is_bf16_in_training_and_fp32_before_and_after(worlds, seen):
    for stage in [*ZEROS, *job.OFFLOADED]:
        here = seen[f"{stage}/bf16"]
        assert set(here["kinds"]) == {"torch.bfloat16"}
        assert set(here["after"]) == {"torch.float32"}
        assert 0 < moved(worlds, f"{stage}-bf16", "bf16") < 0.05


def test_buffers_are_16_bits_wide_in_training_alone_and_own_attributes_stay(run_cli_once, tmp_path):
    command = ["train", "--script", str(JOBS / "zero_buffers.py"), "--backend", "deepspeed", "--nproc-per-node", "2"]
    done = run_cli_once([*command, "--run-dir", str(tmp_path / "run"), "--", str(tmp_path)], timeout=200)
    assert done.returncode == 0, done.output[-3000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    for stage in (1, 2, 3):
        short, whole = seen[f"{stage}-bf16"], seen[f"{stage}-no"]
        assert (short["in training"], short["after"]) == (["torch.bfloat16"], ["torch.float32"])
        assert (short["scale"], short["lowest"]) == (whole["scale"], whole["lowest"])  # equal to the last bit
        assert short["statistics"] != whole["statistics"]
        assert numpy.allclose(short["statistics"], whole["statistics"], rtol=0.02, atol=0.01)
        assert abs(short["val_loss"] - whole["val_loss"]) < 0.05
        saved = load_file(tmp_path / f"{stage}-bf16.safetensors")
        assert saved["norm.running_mean"].dtype == numpy.float32
        assert saved["scale"].tolist() == whole["scale"]


def test_after_a_fit_the_model_is_plain_on_every_rank(worlds):
    for rank in worlds["deepspeed", 2][0]:
        for stage in [*job.STAGES, *job.OFFLOADED]:
            assert rank[f"{stage}/adam-clipped"]["plain"] == rank["zero-0/adam"]["plain"]
            assert rank[f"{stage}/adam-clipped"]["left"] == []


def test_a_further_fit_goes_on_with_the_same_state(worlds, floor):
    for stage in range(4):
        assert moved(worlds, f"twice-{stage}", "adam") <= 3 * floor


def test_the_users_own_config_trains_as_settings_of_ours_that_say_the_same(worlds, floor):
    assert moved(worlds, "own", "own") <= 3 * floor


def test_what_zero_cannot_cut_is_refused(seen):
    assert "the optimizer Neighbours may need more of a parameter" in seen["own-optimizer"]["error"]
    assert "the optimizer Adagrad" in seen["adagrad"]["error"]
    assert "trainable parameters of torch.bfloat16, but ZeRO keeps them in float32" in seen["halves"]["error"]
    assert "temperature is a single number without a dimension, which DeepSpeed cannot shard" in seen["scalar"]["error"]
    assert seen["bad-value"]["error"].startswith(
        "deepspeed_config: DeepSpeed does not accept reduce_bucket_size='large' ("
    )
    assert "both set the optimizer" in seen["two-optimizers"]["error"]


FAULTS = [["step", 5, 1], ["save", 3, 0], ["step", 9, 0], ["validation", 3, 1]]


@pytest.mark.parametrize(
    ("stage", "faults"), [(3, FAULTS[:2]), *(pytest.param(stage, FAULTS, marks=FULL) for stage in (1, 3))]
)
def test_killed_at_any_moment_a_run_ends_in_the_same_bits(run_cli_once, tmp_path, stage, faults):
    for name, struck in (("clean", []), ("hurt", faults)):
        (tmp_path / name).mkdir()
        options = ["--backend", "deepspeed", "--set", f"deepspeed.zero_stage={stage}"]
        done = run_cli_once(arguments(tmp_path / name, struck, *options), timeout=150)
        assert done.returncode == 0, done.output

    assert events(tmp_path / "hurt" / "run").count("restarted") == len(faults)
    assert_same(tmp_path / "hurt", tmp_path / "clean")


# Kills rank 1 in the first attempts, and writes which attempts began with DeepSpeed.
CHOSEN = """
import os, signal, sys
from pathlib import Path
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
Path(f"began-{attempt}-{rank}").write_text(str("deepspeed" in sys.modules))

import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

class Dies(Callback):
    def on_step_end(self, state, result):
        if attempt < 2 and rank == 1 and state.step == 2 * attempt + 2:
            os.kill(os.getpid(), signal.SIGKILL)

data = TensorDataset(torch.ones(64, 4), torch.ones(64, 1))
Trainer(torch.nn.Linear(4, 1), backend="deepspeed", batch_size=4, callbacks=[Dies()], checkpoint_every_n_steps=1).fit(data)
"""


@FULL
def test_the_workers_of_a_restart_find_a_backend_imported_that_only_the_script_names(run_cli, tmp_path):
    """The first kill strikes while the launcher imports."""
    (tmp_path / "train.py").write_text(CHOSEN)
    done = run_cli(
        ["train", "--script", "train.py", "--nproc-per-node", "2", "--run-dir", "run"], cwd=tmp_path, timeout=300
    )
    assert done.returncode == 0, done.output[-3000:]
    assert done.stderr.count("rank 1 was killed by signal 9 (SIGKILL): restarting") == 2
    began = {path.name: path.read_text() for path in sorted(tmp_path.glob("began-*"))}
    assert began == {f"began-{attempt}-{rank}": str(attempt > 0) for attempt in range(3) for rank in range(2)}


@pytest.mark.parametrize("worlds", [(3,), pytest.param((1, 2), marks=FULL)], ids=str)
def test_checkpoints_travel_without_losing_a_bit(run_cli_once, tmp_path, worlds):
    """Take a checkpoint from one process of `single` through every stage and back. Each stage loads it, cuts it and writes it again."""
    script = [str(JOBS / "zero_travel.py"), "--run-dir"]
    begin = ["train", "--script", script[0], "--backend", "single", "--run-dir", str(tmp_path / "first")]
    assert run_cli_once([*begin, "--", str(tmp_path / "single"), "begin"], timeout=180).returncode == 0
    reference = tensors(tmp_path / "single")
    for world in worlds:
        command = ["train", "--script", script[0], "--backend", "deepspeed", "--nproc-per-node", str(world)]
        out = tmp_path / f"on-{world}"
        done = run_cli_once(
            [*command, "--run-dir", str(tmp_path / f"run-{world}"), "--", str(out), str(tmp_path / "single")],
            timeout=150,
        )
        assert done.returncode == 0, done.output
        for name in [*job.STAGES, *job.OFFLOADED, "saved"]:
            found = tensors(out / name)
            assert set(found) == set(reference)
            for key, value in reference.items():
                assert found[key] == value, (world, name, key)


OWN_STATE = """
import sys, torch
from torch.utils.data import TensorDataset
from distributed import Trainer

class Detached(torch.nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"], destination[prefix + "bias"] = self.weight.detach() * 1, self.bias

torch.manual_seed(0)
model = torch.nn.Sequential(Detached(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
data = TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
trainer = Trainer(model, loss_fn=torch.nn.functional.mse_loss, epochs=1, global_batch_size=8, deepspeed={"zero_stage": 3})
trainer.fit(data)
trainer.save(sys.argv[1])
"""


def test_a_model_that_makes_other_tensors_for_its_state_is_saved_whole(run_cli_once, tmp_path):
    (tmp_path / "train.py").write_text(OWN_STATE)
    command = ["train", "--script", str(tmp_path / "train.py"), "--backend", "deepspeed", "--nproc-per-node", "2"]
    last = tmp_path / "last.safetensors"
    done = run_cli_once([*command, "--run-dir", str(tmp_path / "run"), "--", str(last)], timeout=120)
    assert done.returncode == 0, done.output
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("step-*")
    stored, _ = read_tensors(checkpoint / "model")
    assert {name: bytes(stored[name].read()) for name in stored} == {
        name: value.tobytes() for name, value in load_file(last).items()
    }


def tensors(saved):
    """Return shape and bytes of all weights and of the optimizer state of a checkpoint."""
    (checkpoint,) = saved.glob("step-*")
    weights, state = (read_tensors(checkpoint / kind)[0] for kind in ("model", "optimizer"))
    assert len(state) == 3 * len(weights)
    return {name: (tensor.shape, bytes(tensor.read())) for name, tensor in (weights | state).items()}


@FULL
@pytest.mark.parametrize(("backend", "world"), [("single", 1), ("pytorch-ddp", 2), ("fsdp", 2), ("deepspeed", 3)])
def test_a_checkpoint_of_deepspeed_goes_on_anywhere(run_cli_once, tmp_path, travelled, backend, world):
    whole, half = travelled
    shutil.copytree(half / "run", tmp_path / "run")
    assert train(run_cli_once, tmp_path, backend, world, "--resume", "--max-steps", "12").returncode == 0
    assert between(tmp_path / "weights.safetensors", whole / "weights.safetensors") < 2e-6


@pytest.fixture(scope="module")
def travelled(tmp_path_factory, run_cli_once):
    """Return (a run of 12 updates on one process, one of 6 updates at stage 3)."""
    whole, half = tmp_path_factory.mktemp("whole"), tmp_path_factory.mktemp("half")
    assert train(run_cli_once, whole, "single", 1, "--max-steps", "12").returncode == 0
    options = ["--max-steps", "6", "--set", "deepspeed.zero_stage=3"]
    assert train(run_cli_once, half, "deepspeed", 2, *options).returncode == 0
    return whole, half


def train(run_cli_once, out, backend, world, *more):
    command = ["train", "--script", str(JOBS / "zero_travel.py"), "--backend", backend, "--nproc-per-node", str(world)]
    return run_cli_once([*command, "--run-dir", str(out / "run"), *more, "--", str(out), "train"], timeout=180)


def test_fp16_goes_through_the_engine_and_its_scale_moves_as_torchs(run_cli_once, tmp_path):
    """DeepSpeed finds no fp16 on CPUs. The job overrides this, because torch can compute in fp16 there."""
    command = ["train", "--script", str(JOBS / "zero_fp16.py"), "--backend", "deepspeed", "--nproc-per-node", "2"]
    done = run_cli_once([*command, "--run-dir", str(tmp_path / "run"), "--", str(tmp_path)], timeout=180)
    assert done.returncode == 0, done.output
    for stage in (1, 2, 3):
        found = json.loads((tmp_path / f"{stage}.json").read_text())
        assert set(found["kinds"]) == {"torch.float16"}
        scale, without = 2.0**40, 0
        # The scale is halved after an overflow, and doubled after four updates without one.
        for step, after in enumerate(found["scales"], 1):
            without = 0 if step in found["skipped"] else without + 1
            scale *= 0.5 if without == 0 else 2.0 if without == 4 else 1.0
            without %= 4
            assert after == scale
        assert 5 < len(found["skipped"]) < len(found["scales"]) - 5
        assert (found["resumed"]["scale"], found["resumed"]["_growth_tracker"]) == (scale, without)
        assert abs(found["loss"] - found["fp32"]) < 0.02


@FULL  # the first test run of an environment compiles Adam in a minute or two
def test_the_cxx_adam_is_compiled_once_though_a_build_was_killed_before(run_cli_once, tmp_path):
    command = ["train", "--script", str(JOBS / "zero_cpu_adam.py"), "--backend", "deepspeed", "--nproc-per-node", "2"]
    done = run_cli_once([*command, "--run-dir", str(tmp_path / "run"), "--", str(tmp_path)], timeout=280)
    assert done.returncode == 0, done.output
    found = json.loads((tmp_path / "0.json").read_text())
    assert found["had_lock"] and not found["has_lock"]
    assert 0 < found["moved"] < 1e-5  # the difference from torch's update


PLAIN = """
import os, sys, torch
from torch.utils.data import TensorDataset
from distributed import DeepSpeedTrainer
x = torch.randn(64, 4)
trainer = DeepSpeedTrainer(torch.nn.Linear(4, 1), epochs=1, batch_size=8, nproc_per_node=1)
history = trainer.fit(TensorDataset(x, x.sum(1, keepdim=True)))
assert len(history.rows) == 1 and "LOCAL_RANK" not in os.environ
"""


@pytest.mark.full
def test_one_process_trains_in_a_plain_script(run_python, tmp_path):
    done = run_python(["-c", PLAIN], cwd=tmp_path)
    assert done.returncode == 0, done.output
