"""A loop of the script trains as Trainer does, on one to three processes of every torch backend, and resumes bit for bit."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

import distributed
from tests.conformance.runs import EXACT, FULL, ROUNDING, OnFirstUse, newest
from tests.conftest import needs_backend

JOB = Path(__file__).parent / "jobs" / "own_loop.py"
pytestmark = pytest.mark.timeout(1200)  # up to three commands of 240 s, and more on a busy machine
# Name -> backend, processes and flags.
WORLDS = {
    "single": ("single", 1, ()), "ddp-2": ("pytorch-ddp", 2, ()), "ddp-3": ("pytorch-ddp", 3, ("--gradient-accumulation-steps", "2")),
    "fsdp-2": ("fsdp", 2, ("--gradient-accumulation-steps", "2")), "fsdp-3": ("fsdp", 3, ()), "ray-2": ("ray", 2, ()),
    "horovod-2": ("horovod", 2, ("--gradient-accumulation-steps", "2")), "deepspeed-2": ("deepspeed", 2, ()),
    "deepspeed-3-2": ("deepspeed", 2, ("--set", "deepspeed.zero_stage=3", "--gradient-accumulation-steps", "2")),
    "ray-fsdp-2": ("ray", 2, ("--set", "ray.engine=fsdp")),
}  # fmt: skip
# What DeepSpeed, which has no float64, is compared with: two processes that sum their gradients in float32 too. One process rounds in
# another way, and Adam turns a rounded gradient near zero into a step of another sign. In float64 ddp-2 is compared with Trainer.
IN_FLOAT32 = "ddp-2-float32"
QUICK = ("ddp-3", "fsdp-2")
SOME = [pytest.param(name, marks=() if name in QUICK else FULL) for name in WORLDS]


@pytest.fixture(scope="module")
def job():
    return runpy.run_path(str(JOB))


@pytest.fixture(scope="module")
def trained(job, tmp_path_factory):
    """Return an element type -> the weights that Trainer trains in this process."""

    def train(dtype):
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path_factory.mktemp("trainer"))
            trainer = distributed.Trainer(
                job["make"](), optimizer=job["make_optimizer"], loss_fn=F.cross_entropy, dtype=dtype, verbose=False,
                **job["SETTINGS"],
            )  # fmt: skip
            trainer.fit(job["DATA"])
        return dict(trainer.model.state_dict())

    return OnFirstUse(train)


@pytest.fixture(scope="module")
def ran(run_cli_once, tmp_path_factory):
    """Return (world, dropout) -> the directory of a run that nothing disturbed."""

    def run(key):
        name, dropout = key
        out = tmp_path_factory.mktemp(name)
        done = run_cli_once(arguments(name, out, {"dropout": dropout}), timeout=240)
        assert done.returncode == 0, done.output
        return out

    return OnFirstUse(run)


def arguments(name, out, options, *more):
    backend, world, flags = WORLDS[name.removesuffix("-float32")]
    needs_backend(backend)
    dtype = "float32" if backend == "deepspeed" or name == IN_FLOAT32 else "float64"
    return [
        "train", "--script", str(JOB), "--backend", backend, "--nproc-per-node", str(world), "--dtype", dtype, *flags,
        "--run-dir", str(out / "run"), *more, "--", str(out), json.dumps(options),
    ]  # fmt: skip


def weights(out):
    return load_file(out / "weights.safetensors")


def distance(one, other):
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", SOME)
def test_the_weights_are_those_of_trainer_and_each_sample_counts_once(name, ran, trained):
    out = ran[name, 0.0]
    is_exact = not name.startswith("deepspeed")
    expected = trained["float64"] if is_exact else weights(ran[IN_FLOAT32, 0.0])
    assert distance(weights(out), expected) < (EXACT if is_exact else ROUNDING)
    for rank in range(WORLDS[name][1]):
        assert json.loads((out / f"gathered-{rank}.json").read_text()) == [0, list(range(13))]
    lines = map(json.loads, (out / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["test_mean"] for line in lines if "test_mean" in line] == pytest.approx([6, 6])


@pytest.mark.parametrize(
    ("name", "dropout"),
    [("ddp-3", 0.0), *(pytest.param(name, 0.3, marks=FULL) for name in WORLDS if name != "ddp-3")],
)
def test_a_killed_run_goes_on_bit_for_bit(name, dropout, ran, run_cli, tmp_path):
    killed = {"dropout": dropout, "signal": "SIGKILL", "step": 5}
    done = run_cli(arguments(name, tmp_path, killed), timeout=240)
    assert done.returncode == 0 and "restarting" in done.stderr, done.output
    assert json.loads((tmp_path / "gathered-0.json").read_text())[0] == 3  # where it went on, in the middle of an epoch
    whole, resumed = weights(ran[name, dropout]), weights(tmp_path)
    assert all(torch.equal(whole[each], resumed[each]) for each in whole)


def test_a_signal_saves_the_run_which_goes_on_bit_for_bit_with_resume(ran, run_cli, tmp_path):
    stopped = {"dropout": 0.0, "signal": "SIGTERM", "step": 5}
    done = run_cli(arguments("ddp-3", tmp_path, stopped))
    assert done.returncode == 143, done.output
    step = int(newest(tmp_path / "run").name.partition("-")[2])
    assert 5 <= step < 14
    done = run_cli(arguments("ddp-3", tmp_path, stopped, "--resume"))
    assert done.returncode == 0, done.output
    assert json.loads((tmp_path / "gathered-0.json").read_text())[0] == step
    whole, resumed = weights(ran["ddp-3", 0.0]), weights(tmp_path)
    assert all(torch.equal(whole[each], resumed[each]) for each in whole)


@pytest.mark.parametrize(
    "backend",
    ["pytorch-ddp", *(pytest.param(name, marks=FULL) for name in ("fsdp", "horovod", "ray", "deepspeed"))],
)
def test_launch_runs_the_function_of_a_plain_script(run_python, trained, ran, tmp_path, backend):
    needs_backend(backend)
    of_launch = {"backend": backend} | ({"dtype": "float32"} if backend == "deepspeed" else {})
    done = run_python([str(JOB), str(tmp_path), json.dumps({"nproc": 2, "launch": of_launch})], cwd=tmp_path)
    assert done.returncode == 0, done.output
    if backend == "deepspeed":
        assert distance(weights(tmp_path), weights(ran[IN_FLOAT32, 0.0])) < ROUNDING
    else:
        assert distance(weights(tmp_path), trained["float64"]) < EXACT
    (run,) = (tmp_path / "runs").iterdir()
    assert json.loads((run / "result.json").read_text())["world_size"] == 2


def test_launch_in_a_worker_applies_its_settings_below_the_flags(run_cli, tmp_path):
    of_launch = {"global_batch_size": 8, "epochs": 3, "fsdp": {"cpu_offload": True}}  # the Session has 16 and 2
    options = json.dumps({"nproc": 2, "launch": of_launch})
    run = tmp_path / "run"
    flags = ["--epochs", "1", "--backend", "single", "--run-dir", str(run)]
    done = run_cli(["train", "--script", str(JOB), *flags, "--", str(tmp_path), options])
    assert done.returncode == 0, done.output
    result = json.loads((run / "result.json").read_text())
    assert (result["world_size"], result["epochs"], result["steps"]) == (1, 1, 13)  # of 8 samples each
    assert done.stderr.count("nproc_per_node=2 of launch() has no effect") == 1, done.output
    assert "fsdp.cpu_offload (backend is single)" in done.stdout + done.stderr, done.output


def test_launch_raises_what_failed_in_a_worker(run_python, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        "import distributed\n"
        "def train():\n"
        "    raise ValueError('no such thing')\n"
        "try:\n"
        "    distributed.launch(train, nproc_per_node=2)\n"
        "except distributed.TrainingError as error:\n"
        "    print('caught', error)\n"
    )
    done = run_python([str(script)], cwd=tmp_path)
    assert done.returncode == 0 and "caught" in done.stdout and "ValueError: no such thing" in done.stdout, done.output


@pytest.mark.full
def test_workers_of_torchrun_train_too(run_python, trained, tmp_path):
    options = {"settings": {"dtype": "float64"}}
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2", str(JOB), str(tmp_path), json.dumps(options)]
    done = run_python(torchrun, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert distance(weights(tmp_path), trained["float64"]) < EXACT


@pytest.mark.full
def test_a_run_goes_on_with_other_numbers_of_processes(run_cli, trained, tmp_path):
    options = {"dropout": 0.0, "signal": "SIGKILL", "step": 5}
    flags = [
        "--nproc-per-node", "1:2", "--set", "elastic_interval_s=1", "--dtype", "float64", "--run-dir", str(tmp_path / "run"),
    ]  # fmt: skip
    done = run_cli(["train", "--script", str(JOB), *flags, "--", str(tmp_path), json.dumps(options)])
    assert done.returncode == 0 and "going on with 1 process" in done.stderr, done.output
    assert distance(weights(tmp_path), trained["float64"]) < EXACT


@pytest.mark.full
def test_a_trial_of_a_script_reports_what_the_loop_logs(run_cli, tmp_path):
    needs_backend("ray")
    (tmp_path / "space.yaml").write_text("learning_rate: [0.1]")
    sweep = [
        "--search-space", str(tmp_path / "space.yaml"), "--num-samples", "1", "--metric", "val_first", "--mode", "max",
    ]  # fmt: skip
    where = ["--nproc-per-node", "2", "--run-dir", str(tmp_path / "sweep"), "--", str(tmp_path), "{}"]
    done = run_cli(["tune", "--script", str(JOB), *sweep, *where], timeout=240)
    assert done.returncode == 0, done.output
    (trial,) = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["trials"]
    assert (trial["status"], trial["epochs"], trial["metrics"]["val_first"]) == ("finished", 2, 1)


@pytest.mark.full
def test_launch_in_a_trial_reports_each_epoch_and_goes_on(run_python, tmp_path):
    script = tmp_path / "trial.py"
    script.write_text(
        "import json, runpy, sys\n"
        "from pathlib import Path\n"
        "import distributed\n"
        "from distributed.training.trial import Trial, inside\n"
        "job, rows = runpy.run_path(sys.argv[1]), []\n"
        "with inside(Trial(Path('trial'), sys.argv[2] == '2', rows.append)):\n"
        "    distributed.launch(job['train'], '.', {}, nproc_per_node=2, epochs=int(sys.argv[2]))\n"
        "print([row['epoch'] for row in rows])\n"
    )
    for epochs in (1, 2):
        done = run_python([str(script), str(JOB), str(epochs)], cwd=tmp_path)
        assert done.returncode == 0 and done.stdout.splitlines()[-1] == f"[{epochs}]", done.output
