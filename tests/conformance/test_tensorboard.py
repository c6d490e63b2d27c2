"""TensorBoard and the profiler in real runs: each value appears once, also after kills, and the numbers of training stay."""

from __future__ import annotations

import gzip
import json
import re
import shutil

import numpy
import pytest

from tests import event_files
from tests.conformance.runs import STEPS, arguments, assert_same, metrics
from tests.conftest import needs_backend

pytestmark = pytest.mark.timeout(300)
HISTOGRAMS = ["--tensorboard", "--set", "tensorboard_histograms=true"]
PROFILE = ["--profile", "--set", "profile_wait=1", "--set", "profile_warmup=1", "--set", "profile_active=2"]


@pytest.fixture(scope="module")
def clean(tmp_path_factory, run_cli_once):
    out = tmp_path_factory.mktemp("clean")
    done = run_cli_once(arguments(out))
    assert done.returncode == 0, done.output
    return out


@pytest.fixture(scope="module")
def hurt(tmp_path_factory, run_cli_once):
    """Return the directory of a run that was killed twice, and its console output."""
    out = tmp_path_factory.mktemp("hurt")
    more = [*HISTOGRAMS, *PROFILE, "--tensorboard-dir", str(out / "boards")]
    done = run_cli_once(arguments(out, [["step", 11, 0], ["step", 17, 1]], *more), env={"LOGGER": "1", "SHOWN": "1"})
    assert done.returncode == 0, done.output
    return out, done


@pytest.fixture(scope="module")
def board(hurt):
    return event_files.read(hurt[0] / "boards" / "run")


def test_killed_runs_with_everything_on_end_in_the_bits_of_one_without(hurt, clean):
    assert_same(hurt[0], clean)
    assert len(list((hurt[0] / "boards" / "run").iterdir())) == 3  # one file for each attempt


def test_each_figure_of_a_killed_run_is_there_once(hurt, board):
    train = [row for row in metrics(hurt[0] / "run") if row["split"] == "train"]
    val = [row for row in metrics(hurt[0] / "run") if row["split"] == "val"]
    assert event_files.steps(board, "train/loss") == [row["step"] for row in train]
    for name in ("loss", "learning_rate", "grad_norm"):
        values = [event.value for event in board.Scalars(f"train/{name}")]
        assert values == [numpy.float32(row[name]) for row in train]
    assert [event.value for event in board.Scalars("val/loss")] == [numpy.float32(row["loss"]) for row in val]
    for tag in ("train/samples_per_second", "time/step", "time/data", "time/compute"):
        assert event_files.steps(board, tag) == [row["step"] for row in train]
    assert board.Scalars("time/communication")  # DDP measured it


def test_a_logger_of_the_script_gets_all_that_was_in_the_queue_of_a_killed_rank(hurt):
    """The first attempt took three calls, and was killed in the fourth one after update 11."""
    lines = [json.loads(line) for line in (hurt[0] / "logged.jsonl").read_text().splitlines()]
    calls = [(attempt, step, values) for attempt, step, values in lines if values]
    first, second = ([step for attempt, step, _ in calls if attempt == number] for number in (0, 1))
    assert len(first) == 3 and max(first) < 8 and {8, 10} <= {*second}
    wanted = {}
    for row in metrics(hurt[0] / "run"):
        wanted["loss" if row["split"] == "train" else "val_loss", row["step"]] = row["loss"]
    found = [
        ((name, step), values[name]) for _, step, values in calls for name in ("loss", "val_loss") if name in values
    ]
    assert dict(found) == wanted and {*found} == {*wanted.items()}
    assert lines[-1][:2] == [2, "finished"]


def test_the_files_themselves_hold_nothing_twice(hurt):
    """A reader that does not handle restarts also sees each point once."""
    from distributed.loggers.event_file import _events, files_in

    points = [
        (event.step, value.tag)
        for path in files_in(hurt[0] / "boards" / "run")
        for _, event in _events(path.read_bytes())
        for value in event.summary.value
    ]
    assert len(points) == len(set(points)) > 100


def test_hyperparameters_graph_and_histograms(board):
    found = event_files.hyperparameters(board)
    assert found["epochs"] == 3 and found["backend"] == "pytorch-ddp" and found["world_size"] == 2
    assert found["global_batch_size"] == 16 and "tensorboard_dir" not in found
    assert event_files.status(board) == 1
    names = event_files.graph(board)
    assert any("Linear" in name for name in names) and any("Dropout" in name for name in names)
    assert sorted(board.Tags()["histograms"]) == sorted(
        f"{kind}/{layer}.{part}" for kind in ("weights", "gradients") for layer in (0, 3) for part in ("weight", "bias")
    )
    histograms = board.Histograms("gradients/3.weight")
    assert [event.step for event in histograms] == [5, 7, 10, 14, 15, 20, STEPS]
    assert sum(histograms[0].histogram_value.bucket) == histograms[0].histogram_value.num == 24 * 5


def test_the_profile_is_a_trace_of_each_rank_and_says_what_costs_most(hurt):
    out, done = hurt
    for rank in (0, 1):
        trace = max((out / "run" / "profile").glob(f"rank-{rank}.*.pt.trace.json.gz"))
        with gzip.open(trace) as file:
            names = [event.get("name") for event in json.load(file)["traceEvents"]]
        assert "aten::addmm" in names and "ProfilerStep#2" in names
    told = done.stdout[done.stdout.rindex("profile of updates") :].splitlines()
    shares = [
        float(found[1])
        for line in told[1:6]
        if (found := re.match(r" +([\d.]+)% +[\d.]+ ms +\S+ calls an update  \S", line))
    ]
    assert len(shares) == 5 and shares == sorted(shares, reverse=True) and sum(shares) <= 100
    assert 0 < float(re.search(r"communication: under way in ([\d.]+)% of the time", told[6])[1]) <= 100
    assert "profiler_start" not in done.output, "torch's profiler prints lines of its own"


def test_pieces_on_several_processes_make_the_same_histograms(tmp_path, run_cli, board):
    """Compare the histograms of FSDP and ZeRO 3 with those of a run that does not cut its model."""
    for backend, *more in (["fsdp"], ["deepspeed", "--set", "deepspeed.zero_stage=3", *PROFILE]):
        needs_backend(backend)
        flags = ["--backend", backend, *HISTOGRAMS, *more, "--epochs", "1"]
        done = run_cli(arguments(tmp_path, [], *flags, run=backend), env={"SHOWN": "1"})
        assert done.returncode == 0 and "shows no graph of the model" in done.stdout, done.output
        assert done.stdout.count("DeviceStats logs nothing: this run uses no GPUs") == 1
        found = event_files.read(tmp_path / backend / "tensorboard")
        tags = set(found.Tags()["histograms"])
        whole = {tag for tag in board.Tags()["histograms"] if backend == "fsdp" or tag.startswith("weights/")}
        assert whole == tags
        for tag in tags:
            assert [event.step for event in found.Histograms(tag)] == [5, 7]
            for ours, theirs in zip(found.Histograms(tag), board.Histograms(tag), strict=False):  # those of one epoch
                one, other = ours.histogram_value, theirs.histogram_value
                assert one.num == other.num, (backend, tag)
                facts = [[each.min, each.max, each.sum, each.sum_squares] for each in (one, other)]
                assert facts[0] == pytest.approx(facts[1], rel=1e-3, abs=1e-4), (backend, tag)
    count = (tmp_path / "deepspeed" / "profile" / "flops.txt").read_text()
    assert re.search(r"params per GPU: +437 ", count) and re.search(r"fwd MACs per GPU: +[1-9]", count), count


def test_horovods_timeline_is_part_of_its_profile(tmp_path, run_cli):
    needs_backend("horovod")
    done = run_cli(arguments(tmp_path, [], "--backend", "horovod", *PROFILE, "--epochs", "1"))
    assert done.returncode == 0, done.output
    assert re.search(r"communication: under way in [\d.]+% of the time", done.stdout)
    timeline = json.loads((tmp_path / "run" / "profile" / "horovod-timeline.json").read_text())
    assert any("ALLREDUCE" in str(event.get("name")) for event in timeline)


KERAS = """
import keras, numpy
import tensorflow as tf
from distributed import ConfigError, Trainer
from distributed.callbacks import DeviceStats, GradientHistogram
draw = numpy.random.RandomState(0)
x, y = draw.normal(size=(64, 6)).astype("float32"), draw.randint(0, 3, 64)
shown = dict(tensorboard=True, tensorboard_histograms=True, profile=True, profile_wait=1, profile_warmup=1, profile_active=2)

def fit(**more):
    keras.utils.set_random_seed(1)
    layers = [keras.Input((6,)), keras.layers.Dense(8, "relu", name="first"), keras.layers.Dropout(0.5), keras.layers.Dense(3)]
    model = keras.Sequential(layers, name="net")
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    Trainer(model, backend="tensorflow", batch_size=8, epochs=2, log_every_n_steps=2, **more).fit((x, y), (x, y))

fit()
fit(**shown, callbacks=[GradientHistogram(every_n_steps=3), DeviceStats()])
tf.profiler.experimental.start("")
try:
    fit(**{**shown, "tensorboard": False, "tensorboard_histograms": False})
except ConfigError as refusal:
    print("refused:", refusal)
tf.profiler.experimental.stop(save=False)
"""


@pytest.mark.full
def test_keras_on_tensorflow_has_the_same(tmp_path, run_cli):
    needs_backend("tensorflow")
    script, bare = tmp_path / "script.py", tmp_path / "run"
    script.write_text(KERAS)
    done = run_cli(["train", "--script", str(script), "--backend", "tensorflow", "--run-dir", str(bare)])
    assert done.returncode == 0, done.output
    shown = bare / "fit-2"
    assert metrics(bare) == metrics(shown)
    board = event_files.read(shown / "tensorboard")
    assert event_files.steps(board, "train/loss") == list(range(2, 17, 2))
    assert event_files.steps(board, "val/loss") == [8, 16]
    assert any("first" in name and "MatMul" in name for name in event_files.graph(board))
    tags = board.Tags()["histograms"]
    assert any("weights" in tag and "first/kernel" in tag for tag in tags)
    assert any("gradients" in tag and "first/kernel" in tag for tag in tags)
    assert all([each.step for each in board.Histograms(tag)] == [3, 6, 8, 9, 12, 15, 16] for tag in tags)
    assert done.stdout.count("DeviceStats logs nothing: this run uses no GPUs") == 1
    assert len(list((shown / "profile" / "rank-0").rglob("*.xplane.pb"))) == 1
    told = done.stdout[done.stdout.index("profile of updates 3 to 4") :].splitlines()
    assert len([line for line in told[1:6] if " calls an update " in line]) == 5, done.stdout
    assert any("MatMul" in line for line in told[1:6]), told
    assert "refused: profile=True cannot start, because another TensorFlow profiler is already running" in done.stdout


def test_a_directory_that_cannot_be_written_is_refused_before_any_worker(tmp_path, run_cli, run_python):
    (tmp_path / "file").write_text("")
    below = str(tmp_path / "file" / "boards")
    done = run_cli(arguments(tmp_path, [], "--tensorboard-dir", below))
    assert done.returncode == 2 and "another with --tensorboard-dir" in done.output
    assert not (tmp_path / "run" / "logs").exists()
    shutil.rmtree(tmp_path / "run", ignore_errors=True)
    done = run_python(["-c", f"import torch; from distributed import Trainer\n"
                       f"Trainer(torch.nn.Linear(2, 2), tensorboard_dir={below!r}, nproc_per_node=2).fit([1])"], cwd=tmp_path)  # fmt: skip
    assert "ConfigError" in done.stderr and "another with --tensorboard-dir" in done.stderr
