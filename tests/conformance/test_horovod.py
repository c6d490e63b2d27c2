"""Horovod over Gloo and MPI: the numbers of DDP, options, starts, plain scripts, kills, checkpoints and bad input."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from distributed import HorovodTrainer
from distributed.backends.horovod import HorovodBackend
from distributed.errors import ConfigError
from tests.conformance.jobs.recording import distance, read
from tests.conformance.runs import FULL, arguments, assert_same, events
from tests.conftest import needs_backend

HERE = Path(__file__).parent
BIN = Path(sys.executable).parent
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
EXACT = ["plain", "accumulated", "own-start", "unused", "half-used", "fp32", "bf16", "fp16", "recomputed"]
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module", autouse=True)
def _horovod():
    needs_backend("horovod")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory, run_cli_once):
    """Return (backend -> case -> what each rank saw, the directory of Horovod's run)."""
    found = {}
    for backend, world in (("single", 1), ("pytorch-ddp", 2), ("horovod", 2)):
        out = tmp_path_factory.mktemp(backend)
        command = ["train", "--script", str(HERE / "jobs" / "horovod_cases.py"), "--nproc-per-node", str(world)]
        done = run_cli_once([*command, "--run-dir", str(out / "run"), "--", str(out), backend], timeout=150)
        assert done.returncode == 0, done.output[-3000:]
        assert done.stderr == "", done.stderr
        found[backend] = read(out, world)
    return found


@pytest.fixture
def seen(worlds):
    """Return case -> what rank 0 saw, after checking that all ranks ended with the same weights."""
    for name, ranks in worlds["horovod"].items():
        assert ranks[0].get("weights") == ranks[1].get("weights"), name
    return {name: ranks[0] for name, ranks in worlds["horovod"].items()}


@pytest.mark.parametrize("case", EXACT)
def test_two_processes_train_as_ddp_does(worlds, seen, case):
    other = worlds["pytorch-ddp"][case][0]
    assert distance(seen[case], other) < (1e-9 if other["dtypes"] == ["torch.float64"] else 1e-6)
    assert [row["loss"] for row in seen[case]["rows"]] == pytest.approx(
        [row["loss"] for row in other["rows"]], rel=1e-6
    )


@pytest.mark.parametrize("case", ["plain", "sparse", "unused", "accumulated"])
def test_two_processes_train_as_one_does(worlds, seen, case):
    """Weight decay and momentum do not change a parameter without a gradient, as in one process."""
    assert distance(seen[case], worlds["single"][case][0]) < 1e-9


def test_an_optimizer_that_was_used_before_is_rank_0s_on_every_rank(worlds, seen):
    assert distance(seen["used-optimizer"], worlds["single"]["used-optimizer"][0]) < 1e-9


def test_an_update_takes_one_all_reduce_per_bucket_also_when_it_accumulates(worlds, seen):
    names = seen["small-buckets"]["names"]
    assert sorted(set(names)) == [f"gradients.{number}" for number in range(5)]
    assert len(names) == 5 * seen["small-buckets"]["steps"]
    assert distance(seen["small-buckets"], worlds["single"]["plain"][0]) < 1e-9


def test_compressed_gradients_are_close_and_not_equal_by_word_and_by_horovods_own_object(seen):
    assert 1e-7 < distance(seen["word"], seen["fp32"]) < 0.02
    assert distance(seen["word"], seen["object"]) == 0


def test_a_gradient_that_comes_after_its_bucket_has_gone_is_an_error(seen):
    assert seen["shared-and-recomputed"]["error"].startswith("ConfigError: ")
    assert "use_reentrant=False" in seen["shared-and-recomputed"]["error"]


def test_a_metric_is_averaged_over_the_ranks(seen):
    assert seen["averaged"] == {"average": 2.0, "of": 2}
    assert "metric_average('high', name='accuracy') takes one number per rank" in seen["wrong-metric"]["error"]


def test_horovods_own_optimizer_is_refused(seen):
    assert "pass the plain one, backend 'horovod' exchanges the gradients itself" in seen["wrapped"]["error"]


def test_a_timeline_that_nobody_prepared_is_refused_and_costs_nothing(seen):
    """Horovod's writer of the timeline would otherwise keep a core busy all the time."""
    assert seen["prepared"]["timeline"] is None
    assert (
        "Horovod already runs in this process without a timeline: set HOROVOD_TIMELINE=DYNAMIC"
        in seen["traced"]["error"]
    )


# ------------------------------------------------------------------ faults and checkpoints


FAULTS = [["step", 5, 1], ["save", 3, 0], ["step", 9, 0], ["validation", 3, 1], ["step", 16, 1]]


@pytest.mark.parametrize("faults", [FAULTS[:2], pytest.param(FAULTS, marks=FULL)], ids=len)
def test_killed_at_any_moment_a_run_of_three_ends_in_the_same_bits(run_cli_once, tmp_path, faults):
    """The sum of three terms has the same bits only if they are always added in the same order."""
    for name, struck in (("clean", []), ("hurt", faults)):
        (tmp_path / name).mkdir()
        flags = ["--backend", "horovod", "--global-batch-size", "16"]
        done = run_cli_once(arguments(tmp_path / name, struck, *flags, world=3), timeout=100)
        assert done.returncode == 0, done.output

    assert events(tmp_path / "hurt" / "run").count("restarted") == len(faults)
    assert_same(tmp_path / "hurt", tmp_path / "clean")
    assert done.stderr.count("was killed by signal 9") == len(faults), done.stderr


FAILS = """
import sys, torch, horovod.torch as hvd
from torch.utils.data import TensorDataset
from distributed import Callback, HorovodTrainer
class Fail(Callback):
    def on_step_end(self, state, result):
        if state.step == 3 and hvd.rank() == 1:
            raise ValueError("on purpose") if sys.argv[1] == "raise" else SystemExit(0)
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
HorovodTrainer(torch.nn.Linear(4, 2), batch_size=4, callbacks=[Fail()]).fit(data)
"""


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raise", "rank 1 failed with ValueError"),
        ("leave", "rank 1 exited with code 0 while other ranks were still running"),
    ],
)
def test_a_rank_that_fails_or_leaves_ends_all_and_is_the_cause(run_cli, tmp_path, how, cause):
    (tmp_path / "fails.py").write_text(FAILS)
    command = ["train", "--script", "fails.py", "--backend", "horovod", "--nproc-per-node", "2", "--run-dir", "run"]
    done = run_cli([*command, "--", how], cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert f"error: {cause}" in done.stderr and "HorovodInternalError" not in done.stderr, done.stderr


HANGS = """
import signal, torch, horovod.torch as hvd
from torch.utils.data import TensorDataset
from distributed import Callback, HorovodTrainer
class Hang(Callback):
    def on_step_end(self, state, result):
        if state.step == 3 and hvd.rank() == 1:
            signal.pause()
data = TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
HorovodTrainer(torch.nn.Linear(4, 2), batch_size=4, callbacks=[Hang()]).fit(data)
"""


def test_a_rank_that_hangs_is_named_after_timeout_s(run_cli, tmp_path):
    (tmp_path / "hangs.py").write_text(HANGS)
    command = ["train", "--script", "hangs.py", "--backend", "horovod", "--nproc-per-node", "2", "--run-dir", "run"]
    done = run_cli([*command, "--set", "timeout_s=3"], cwd=tmp_path, timeout=180)
    assert done.returncode == 1, done.output
    assert "error: rank 1 has not joined an exchange in which the others have waited for 3 s (timeout_s)" in done.stderr
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------ every way to start

# A script as guides show it. Nothing scales the learning rate, and the data is the same on every rank.
SAMPLE = """
import sys
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, TensorDataset
from distributed import HorovodTrainer

hvd.init()
generator = torch.Generator().manual_seed(0)
data = TensorDataset(torch.randn(96, 8, generator=generator), torch.randint(0, 3, (96,), generator=generator))
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(8, 3)
trainer = HorovodTrainer(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loss_fn=torch.nn.functional.cross_entropy,
    compression=hvd.Compression.fp16,
    verbose=(hvd.rank() == 0)  # only rank 0 prints
)
trainer.fit(DataLoader(data, batch_size=8, shuffle=True), epochs=3)
average = trainer.metric_average(float(hvd.rank()), name="rank")
print(f"rank {hvd.rank()} of {hvd.size()} average {average} weight {model.weight.double().sum().item()!r}", flush=True)
"""
TRAIN = ["-m", "distributed.cli", "train", "--script", "sample.py", "--backend", "horovod", "--run-dir", "run"]
STARTS = {
    # RFC 5737 reserves the address for documentation, so it is never in use.
    "ours": [sys.executable, *TRAIN, "--nproc-per-node", "2", "--master-addr", "198.51.100.1"],
    "horovodrun": [BIN / "horovodrun", "--gloo", "-np", "2", sys.executable, *TRAIN],
    "mpirun": ["mpirun", "--oversubscribe", "-np", "2", sys.executable, *TRAIN],
    "torchrun": [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *TRAIN[0:]],
}


def needs_mpi():
    """Skip if this Horovod has no MPI, or if no launcher of MPI is there. Fail if MPI is required."""
    import horovod.torch as hvd

    if hvd.mpi_built() and shutil.which("mpirun"):
        return
    if os.environ.get("REQUIRE_MPI"):
        pytest.fail("REQUIRE_MPI is set, and there is no mpirun or Horovod was built without MPI")
    pytest.skip("needs mpirun and a Horovod with MPI: apt.txt, then make horovod")


@pytest.fixture(scope="module")
def weights():
    """Return start -> the final weights, which the tests fill in."""
    return {}


# test_mpi.py runs mpirun too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=FULL if name in ("torchrun", "mpirun") else ()) for name in STARTS]
)
def test_a_sample_trains_the_same_however_it_is_started(start, tmp_path, weights, name):
    if name == "mpirun":
        needs_mpi()
    # torchrun's workers lack the variables that hvd.init() needs, so the trainer calls it.
    text = SAMPLE.replace("hvd.init()\n", "") if name == "torchrun" else SAMPLE
    text = text.replace("hvd.rank()", "int(__import__('os').environ['RANK'])") if name == "torchrun" else text
    (tmp_path / "sample.py").write_text(text)

    done = start(STARTS[name], cwd=tmp_path, env=ROOT).finish(120, grace=10)

    assert done.returncode == 0, done.output
    assert "backend horovod, 2 processes on cpu" in done.stdout, done.output
    line = next(line for line in done.stdout.splitlines() if "rank 0 of 2" in line)
    weights[name] = line.split("weight ")[1]
    assert "average 0.5" in line
    assert ("no effect here: master_addr (one node)" in done.stdout) == (name == "ours")
    assert done.output.count(f"warning: {name} listens on all interfaces") == (name != "ours")
    assert set(weights.values()) == {weights[name]}


def test_the_timeline_is_a_file_of_the_run_and_whole(start, tmp_path, weights):
    (tmp_path / "sample.py").write_text(SAMPLE.replace("hvd.init()\n", "").replace("hvd.rank()", "RANK").replace(
        "import sys\n", "import os\nRANK = int(os.environ['RANK'])\n"
    ))  # fmt: skip
    done = start([*STARTS["ours"], "--set", "horovod.timeline=trace/of-two.json"], cwd=tmp_path).finish(120)
    assert done.returncode == 0, done.output
    trace = json.loads((tmp_path / "run" / "trace" / "of-two.json").read_text())
    names = {each["args"]["name"] for each in trace if each.get("name") == "process_name" and each["pid"]}
    assert "allreduce.gradients.0" in names
    weights["traced"] = next(line for line in done.stdout.splitlines() if "rank 0 of 2" in line).split("weight ")[1]
    assert len(set(weights.values())) == 1


def test_adasum_combines_as_its_paper_says_under_mpirun_and_is_refused_elsewhere(start, tmp_path):
    for world, mistake in ((2, "needs MPI, but these processes use Gloo"), (3, "not a power of 2: use 2 processes")):
        with pytest.raises(ConfigError, match=mistake):
            make({"adasum": True}, world)
    needs_mpi()
    script = str(HERE / "jobs" / "adasum.py")
    command = [
        "mpirun",
        "--oversubscribe",
        "-np",
        "2",
        sys.executable,
        "-m",
        "distributed.cli",
        "train",
        "--script",
        script,
    ]
    done = start([*command, "--run-dir", tmp_path / "run"], env=ROOT).finish(120, grace=10)
    assert done.returncode == 0, done.output
    moved = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert moved[0]["from_paper"] < 1e-12 and moved[0]["from_average"] > 1e-3, moved


def test_a_plain_horovod_script_finds_what_it_expects(run_cli, tmp_path):
    script = str(HERE / "jobs" / "plain_horovod.py")
    command = ["train", "--script", script, "--backend", "horovod", "--nproc-per-node", "2"]
    done = run_cli([*command, "--run-dir", str(tmp_path / "run"), "--", "--epochs", "4"])
    assert done.returncode == 0, done.output
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("{")))
    assert found["size"] == 2 and found["apart"] == 0 and found["accuracy"] > 0.85, found


def test_a_killed_plain_script_meets_anew(run_cli, tmp_path):
    (tmp_path / "plain.py").write_text(
        "import os, torch, horovod.torch as hvd\n"
        "hvd.init()\n"
        "attempt = int(os.environ['TORCHELASTIC_RESTART_COUNT'])\n"
        "if attempt < 2 and hvd.rank() == attempt: os.kill(os.getpid(), 9)\n"
        "print('sum', hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), 'attempt', attempt)\n"
    )
    command = ["train", "--script", "plain.py", "--backend", "horovod", "--nproc-per-node", "2", "--run-dir", "run"]
    done = run_cli(command, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert "sum 2.0 attempt 2" in done.stdout


def needs_tensorflow():
    """Skip if Horovod was built without TensorFlow. Fail if both are required."""
    needs_backend("tensorflow")
    if importlib.util.find_spec("horovod.tensorflow.mpi_lib") is not None:
        return
    reason = "needs a Horovod with TensorFlow: make horovod HOROVOD_WITH=tensorflow"
    if {"horovod", "tensorflow"} <= set(re.split(r"[,\s]+", os.environ.get("REQUIRE_BACKENDS", ""))):
        pytest.fail(f"{reason}, and REQUIRE_BACKENDS names both")
    pytest.skip(reason)


@FULL
def test_horovods_own_keras_optimizer_averages_nothing_under_keras_3(run_cli, tmp_path):
    """Show why our step reduces the gradients of Keras models itself. Once this test fails, Horovod's wrapper works again.

    This is also a plain script, in which Keras runs on TensorFlow although our own Keras models train on torch here.
    """
    needs_tensorflow()
    (tmp_path / "keras_fit.py").write_text(KERAS)
    command = ["train", "--script", "keras_fit.py", "--backend", "horovod", "--nproc-per-node", "2", "--run-dir", "run"]
    done = run_cli(command, cwd=tmp_path, env={"TF_CPP_MIN_LOG_LEVEL": "3"}, timeout=180)
    assert done.returncode == 0, done.output
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("[")]
    alone, wrapped = json.loads(line)
    assert len(set(alone)) == 2  # each rank has its own data
    assert wrapped == alone


KERAS = """
import json
import keras, numpy as np
import horovod.tensorflow.keras as hvd
hvd.init()

def train(wrap):
    keras.utils.set_random_seed(0)
    x = np.random.default_rng(hvd.rank()).normal(size=(64, 20)).astype("float32")
    model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(2)])
    model.compile(wrap(keras.optimizers.SGD(0.05)), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, (x.sum(1) > 0).astype("int32"), batch_size=32, epochs=2, verbose=0, shuffle=False)
    return float(np.abs(model.get_weights()[0]).sum())

mine = np.array([[train(lambda optimizer: optimizer), train(hvd.DistributedOptimizer)]])
both = np.asarray(hvd.allgather(mine))
if hvd.rank() == 0:
    print(json.dumps(both.T.tolist()), flush=True)
"""


# ------------------------------------------------------------------ scripts without a Trainer


def test_every_call_of_communication_works_in_a_horovod_world(run_cli, tmp_path):
    script = str(HERE / "jobs" / "communication" / "script.py")
    done = run_cli(
        [
            "train",
            "--script",
            script,
            "--backend",
            "horovod",
            "--nproc-per-node",
            "3",
            "--run-dir",
            str(tmp_path / "run"),
        ]
    )
    assert done.returncode == 0, done.output
    (found,) = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert (found["world_size"], found["backend"]) == (3, "gloo")


JOINED = """
import torch, horovod.torch as hvd, distributed
assert distributed.get_world_size() == 2 and not distributed.is_initialized()
hvd.init()
assert distributed.is_initialized() and distributed.get_rank() == hvd.rank()
for kind in (torch.bfloat16, torch.uint8, torch.int16, torch.float64, torch.int64, torch.float16):
    assert distributed.all_reduce(torch.ones(3, dtype=kind)).tolist() == [2, 2, 2], kind
    mine = torch.full((2,), hvd.rank() + 1, dtype=kind)
    assert [each.tolist() for each in distributed.all_gather(mine)] == [[1, 1], [2, 2]], kind
    assert distributed.broadcast(mine, src=1).tolist() == [2, 2], kind
assert distributed.broadcast(torch.tensor([hvd.rank() == 1]), src=1).item()
assert not torch.distributed.is_initialized()
distributed.destroy_process_group()
assert not distributed.is_initialized()
distributed.init_process_group()
print("sum", distributed.all_reduce(torch.ones(1)).item())
"""


def test_a_script_that_called_hvd_init_is_in_a_horovod_world(run_cli, tmp_path):
    (tmp_path / "joined.py").write_text(JOINED)
    command = ["train", "--script", "joined.py", "--backend", "horovod", "--nproc-per-node", "2", "--run-dir", "run"]
    done = run_cli(command, cwd=tmp_path)
    assert done.returncode == 0, done.output
    assert "sum 2.0" in done.stdout


# ------------------------------------------------------------------ bad input


def make(options, world=2, **settings):
    from distributed.config.merging import Overrides, merge
    from distributed.config.plan import ProcessPlan

    merged = merge(Overrides(), {"backend": "horovod", "horovod": options, **settings})
    return HorovodBackend(merged, merged.config.options("horovod"), ProcessPlan(1, world, "cpu", "horovod"))


def test_lossy_compression_contradicts_float64():
    with pytest.raises(ConfigError, match=r"with horovod.compression='fp16': that is lossy"):
        make({"compression": "fp16"}, dtype="float64")
    with pytest.raises(ConfigError, match=r"horovod.compression='bf16' is not a valid choice"):
        make({"compression": "bf16"})


SHORT = """
import torch
from torch.utils.data import TensorDataset
from distributed import HorovodTrainer
HorovodTrainer(torch.nn.Linear(2, 2)).fit(TensorDataset(torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)))
"""


def test_a_model_of_mxnet_is_refused_before_any_worker_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    block = type("Dense", (), {"__module__": "mxnet.gluon.nn", "__call__": lambda self: None})
    with pytest.raises(ConfigError, match="MXNet, which is retired and not supported"):
        HorovodTrainer(block(), nproc_per_node=2)
    assert list(tmp_path.iterdir()) == []


def test_an_hvd_init_that_nobody_prepared_is_an_error_with_the_way_out(run_cli, tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    done = run_cli(
        ["train", "--script", "sample.py", "--nproc-per-node", "2", "--run-dir", "run"], cwd=tmp_path, timeout=120
    )
    assert done.returncode == 2, done.output
    assert "hvd.init() made a world of 1, but the launcher started 2 processes: start with" in done.stderr
