"""Fits that log to real MLflow stores: an SQLite file, and a server that may be gone or slow."""

from __future__ import annotations

import io
import json
import types
import wave
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import PIL.Image
import pytest
import safetensors.torch
import torch

from distributed import load_weights
from distributed.cli.__main__ import run as run_command
from distributed.errors import ResourceError
from distributed.loggers._mlflow import sender as sender_module
from distributed.loggers._mlflow.database import make_whole
from distributed.loggers._mlflow.spool import RunRecord, spool_of
from distributed.loggers._mlflow.system import SystemSampler
from tests.conftest import needs_backend, poll
from tests.mlflow_server import door, mlflow_server

# MLflow itself causes this warning.
pytestmark = pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy:DeprecationWarning")
JOB = Path(__file__).parent / "jobs" / "mlflow_fit.py"
WARNING = "training continues, and records are kept in"


@pytest.fixture(scope="module", autouse=True)
def _mlflow():
    pytest.importorskip("mlflow")  # here and not above, because every test process imports this file


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a working directory with the runs in `runs` and their store next to it."""
    return tmp_path_factory.mktemp("mlflow")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("server")) as port:
        yield port


@pytest.fixture
def entrance(server):
    with door(server) as opened:
        yield opened


def command(run, *more, processes=1, script=()):
    return [
        "train", "--script", JOB, "--nproc-per-node", processes, "--mlflow-tracking", "--run-dir", run, *more, "--", *script,
    ]  # fmt: skip


def env(uri, **more):
    return {"MLFLOW_TRACKING_URI": uri, **more}


def client_of(uri):
    import mlflow

    return mlflow.MlflowClient(tracking_uri=str(uri))


def steps(client, run_id, name):
    return [metric.step for metric in client.get_metric_history(run_id, name)]


def files(client, run_id, path=""):
    found = []
    for each in client.list_artifacts(run_id, path):
        found += files(client, run_id, each.path) if each.is_dir else [each.path]
    return found


def num_steps(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row["step"] for row in rows if row["split"] == "train"]


@pytest.fixture(scope="module")
def on_sqlite(place, run_cli_once):
    """Return the store after a run of one process and a run of two, one of which was killed, and their output."""
    runs = place / "runs"
    alone = run_cli_once(command(runs / "one", "--epochs", "1"), cwd=place)
    assert alone.returncode == 0, alone.output
    two = run_cli_once(
        command(runs / "two", "--mlflow-experiment", "mlflow_fit", "--checkpoint-frequency", "1", "--epochs", "2",
                "--set", "mlflow_register_model=net", processes=2, script=["mlflow"]),
        cwd=place, env={"KILL_AT": "11"},
    )  # fmt: skip
    assert two.returncode == 0, two.output
    return client_of(f"sqlite:///{runs / 'mlflow.db'}"), runs, two


def test_a_run_is_complete_at_mlflow_and_nothing_lies_in_the_working_directory(on_sqlite):
    client, runs, done = on_sqlite
    record = RunRecord.read(runs / "one")
    run = client.get_run(record.run_id)

    assert run.info.status == "FINISHED" and run.info.run_name == "one"
    assert client.get_experiment(run.info.experiment_id).name == "mlflow_fit"
    wanted = {
        "batch_size": "4",
        "global_batch_size": "4",
        "world_size": "1",
        "learning_rate": "0.01",
        "flavour": "mild",
    }
    assert (
        run.data.params.items()
        >= {**wanted, "gradient_accumulation_steps": "1", "device": "cpu", "num_gpus": "0", "num_nodes": "1"}.items()
    )
    assert steps(client, record.run_id, "loss") == list(range(1, 17)) == steps(client, record.run_id, "time/step_s")
    result = json.loads((runs / "one" / "result.json").read_text())
    lines = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    newest = [line for line in lines if line["split"] == "train"][-1]
    for name in ("loss", "accuracy", "samples_per_second"):
        assert run.data.metrics[name] == pytest.approx(newest[name]), name
    for name in ("val_loss", "val_accuracy", "learning_rate"):
        assert run.data.metrics[name] == pytest.approx(result["final_metrics"][name]), name
    assert run.data.metrics["best_val_loss"] == result["best_metrics"]["val_loss"]
    assert run.data.metrics["throughput"] == result["samples_per_second"]
    assert 0 < run.data.metrics["system/system_memory_usage_percentage"] < 100
    assert "scaling_efficiency" not in run.data.metrics
    there = files(client, record.run_id)
    assert {"config.yaml", "result.json", "report.html", "checkpoints/step-00000016/manifest.json"} <= set(there)
    assert json.loads(Path(client.download_artifacts(record.run_id, "result.json")).read_text()) == result
    assert sorted(path.name for path in runs.parent.iterdir()) == ["killed", "longest-0", "longest-1", "runs"]
    assert sorted(path.name for path in runs.iterdir()) == ["mlartifacts", "mlflow.db", "one", "two"]
    assert done.stderr.count("warning") == 1 and "INFO" not in done.output  # the warning of the restart


def test_a_restart_goes_on_in_the_same_run_and_no_step_is_there_twice(on_sqlite):
    client, runs, _ = on_sqlite
    record = RunRecord.read(runs / "two")
    experiment = client.get_run(record.run_id).info.experiment_id

    assert json.loads((runs / "two" / "result.json").read_text())["status"] == "finished"
    assert "restarted" in {
        json.loads(line)["event"] for line in (runs / "two" / "events.jsonl").read_text().splitlines()
    }
    assert len(client.search_runs([experiment])) == 2
    for name in ("loss", "learning_rate", "samples_per_second", "time/data_s", "time/slowest_rank_s"):
        assert steps(client, record.run_id, name) == list(range(1, 17)), name
    assert steps(client, record.run_id, "val_loss") == [8, 16]
    assert client.get_run(record.run_id).info.status == "FINISHED"


def test_code_of_another_rank_joins_the_run(on_sqlite):
    client, runs, _ = on_sqlite
    assert client.get_run(RunRecord.read(runs / "two").run_id).data.metrics["from_rank_1"] == 7.0


def test_scaling_is_measured_against_the_run_of_one_process(on_sqlite, place, run_cli):
    client, runs, _ = on_sqlite
    done = run_cli(command(runs / "alike", "--set", "mlflow_checkpoint=false", processes=2), cwd=place)
    assert done.returncode == 0, done.output

    one, alike, two = (client.get_run(RunRecord.read(runs / name).run_id) for name in ("one", "alike", "two"))
    ratio = alike.data.metrics["throughput"] / one.data.metrics["throughput"]
    assert alike.data.metrics["speedup"] == pytest.approx(ratio)
    assert alike.data.metrics["scaling_efficiency"] == pytest.approx(ratio / 2)
    assert alike.data.tags["distributed.scaling_baseline"] == one.info.run_id
    assert "scaling_efficiency" not in two.data.metrics  # it had two epochs
    assert sorted(files(client, alike.info.run_id)) == [
        "config.yaml", "media/picture-00000008.png", "report.html", "result.json",
    ]  # fmt: skip


def test_a_picture_that_was_logged_is_an_artifact(on_sqlite):
    client, runs, _ = on_sqlite
    run_id = RunRecord.read(runs / "one").run_id
    name = "media/picture-00000016.png"
    assert files(client, run_id).count(name) == 1
    sent = io.BytesIO(Path(client.download_artifacts(run_id, name)).read_bytes())
    assert numpy.asarray(PIL.Image.open(sent)).tolist() == numpy.arange(12).reshape(3, 4).tolist()


def test_a_registered_model_opens_without_a_pickle(on_sqlite, monkeypatch):
    import mlflow

    client, runs, _ = on_sqlite
    run_id = RunRecord.read(runs / "two").run_id
    (version,) = client.search_model_versions("name='net'")

    assert version.run_id == run_id
    store = f"sqlite:///{runs / 'mlflow.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    directory = Path(mlflow.artifacts.download_artifacts(f"models:/net/{version.version}"))
    # The download adds registered_model_meta.
    names = {path.name for path in directory.iterdir()} - {"registered_model_meta"}
    assert names == {"MLmodel", "model.json", "model.pt2", "model.safetensors"}
    description = json.loads((directory / "model.json").read_text())
    assert description["model_class"] == "__main__.Net" and description["step"] == 16
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    assert {name: list(each.shape) for name, each in weights.items()} == {
        name: each["shape"] for name, each in description["tensors"].items()
    }
    (shard,) = (runs / "two" / "checkpoints" / "step-00000016" / "model").glob("*.safetensors")
    for name, each in safetensors.torch.load_file(shard).items():
        assert torch.equal(weights[name], each)


def assert_runs_without_its_class(client, store, checkpoint, monkeypatch):
    """The registered model computes what the model of the script does with the weights of `checkpoint`."""
    import mlflow

    (version,) = client.search_model_versions("name='net'")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)

    model = mlflow.pyfunc.load_model(f"models:/net/{version.version}")

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)

        def forward(self, x):
            return self.head(torch.relu(self.body(x)))

    own = Net()
    load_weights(own, checkpoint)
    inputs = torch.randn(5, 4)
    numpy.testing.assert_allclose(model.predict(inputs.numpy()), own(inputs).detach(), rtol=1e-5, atol=1e-6)
    numpy.testing.assert_allclose(model.predict([inputs.numpy()]), own(inputs).detach(), rtol=1e-5, atol=1e-6)


INFERRED = "ignore:.*Any type hint is inferred:UserWarning"  # importing mlflow.pyfunc 3.17 warns


@pytest.mark.filterwarnings(INFERRED)
def test_a_registered_model_runs_without_its_class(on_sqlite, monkeypatch):
    client, runs, _ = on_sqlite
    store = f"sqlite:///{runs / 'mlflow.db'}"
    assert_runs_without_its_class(client, store, runs / "two" / "checkpoints" / "step-00000016", monkeypatch)


@pytest.mark.full
@pytest.mark.filterwarnings(INFERRED)
@pytest.mark.parametrize("flags", [("fsdp",), ("deepspeed", "--set", "deepspeed.zero_stage=3")], ids=" ".join)
def test_a_registered_model_that_was_trained_in_shards_is_whole(flags, run_cli, tmp_path, monkeypatch):
    needs_backend(flags[0])
    run = tmp_path / "runs" / "one"
    more = ["--backend", *flags, "--epochs", "1", "--set", "mlflow_register_model=net"]
    done = run_cli(command(run, *more, processes=2), cwd=tmp_path)
    assert done.returncode == 0, done.output
    store = f"sqlite:///{tmp_path / 'runs' / 'mlflow.db'}"
    assert_runs_without_its_class(client_of(store), store, run / "checkpoints" / "step-00000008", monkeypatch)


@pytest.fixture(scope="module")
def branching(tmp_path_factory, run_cli_once):
    """Return a client of the store, the store, the id of a run whose model cannot be exported, and the output of the run."""
    where = tmp_path_factory.mktemp("branching")
    job = JOB.with_name("mlflow_media.py")
    flags = ["--nproc-per-node", 1, "--run-dir", where / "runs" / "one", "--mlflow-tracking"]
    done = run_cli_once(["train", "--script", job, *flags, "--set", "mlflow_register_model=branching"], cwd=where)
    assert done.returncode == 0, done.output
    uri = f"sqlite:///{where / 'runs' / 'mlflow.db'}"
    return client_of(uri), uri, RunRecord.read(where / "runs" / "one").run_id, done


@pytest.mark.full
def test_a_model_that_cannot_be_exported_is_registered_as_weights_with_one_notice(branching, monkeypatch):
    import mlflow

    client, uri, run_id, done = branching
    assert done.output.count("the registered model holds weights only, which mlflow.pyfunc does not run: ") == 1
    (version,) = client.search_model_versions("name='branching'")
    assert version.run_id == run_id
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    directory = Path(mlflow.artifacts.download_artifacts(f"models:/branching/{version.version}"))
    names = {path.name for path in directory.iterdir()} - {"registered_model_meta"}
    assert names == {"MLmodel", "model.json", "model.safetensors"}
    assert "python_function" not in (directory / "MLmodel").read_text()
    weights = safetensors.torch.load_file(directory / "model.safetensors")
    assert {name: list(each.shape) for name, each in weights.items()} == {
        f"{layer}.{part}": shape for layer in ("body", "other") for part, shape in (("weight", [3, 4]), ("bias", [3]))
    }


@pytest.mark.full
def test_texts_tables_audio_and_figures_that_were_logged_are_artifacts(branching):
    client, _, run_id, _ = branching
    step = "-00000004"
    names = [
        f"media/{name}" for name in (f"beep{step}.wav", f"plot{step}.png", f"scores{step}.csv", f"story{step}.txt")
    ]
    assert sorted(name for name in files(client, run_id) if name.startswith("media/")) == names
    beep, plot, scores, story = (Path(client.download_artifacts(run_id, name)).read_bytes() for name in names)
    assert (story, plot) == (b"Once upon a time\n", b"drawn as png")
    assert scores == b'name,score\none,1\n"two, three",2.5\n'
    with wave.open(io.BytesIO(beep)) as sound:
        assert (sound.getnchannels(), sound.getframerate()) == (1, 8000)
        assert numpy.frombuffer(sound.readframes(9), "<i2").tolist() == [0, 32767, -32767, 16383]


def test_a_resume_goes_on_in_the_same_run_with_what_changed_beside_it(on_sqlite, place, run_cli):
    client, runs, _ = on_sqlite
    before = RunRecord.read(runs / "one").run_id
    done = run_cli(command(runs / "one", "--epochs", "2", "--resume"), cwd=place)
    assert done.returncode == 0, done.output

    run = client.get_run(before)
    assert RunRecord.read(runs / "one").run_id == before and run.info.status == "FINISHED"
    assert steps(client, before, "loss") == list(range(1, 33))
    assert steps(client, before, "system/cpu_utilization_percentage")[:2] == [0, 1]
    changed = {name: value for name, value in run.data.params.items() if ".from_" in name}
    assert run.data.params["epochs"] == "1" and changed == {"epochs.from_step_16": "2"}


SAMPLE = """
import sys
import mlflow
from torch.utils.data import TensorDataset
import torch
from distributed import PyTorchDDPTrainer

mlflow.set_tracking_uri(sys.argv[1])
mlflow.set_experiment("mine")
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 2, (32,)))
with mlflow.start_run(run_name="distributed-training") as run:
    trainer = PyTorchDDPTrainer(torch.nn.Linear(4, 2), mlflow_tracking=True, nproc_per_node=2, log_every_n_steps=1, batch_size=4)
    history = trainer.fit(data, data)
    assert mlflow.MlflowClient().get_run(run.info.run_id).info.status == "RUNNING"
    mlflow.log_param("num_gpus", 8)
    mlflow.log_metric("throughput", 5.0)
    PyTorchDDPTrainer(torch.nn.Linear(4, 2), mlflow_tracking=True, nproc_per_node=1, batch_size=8).fit(data)
"""


@pytest.mark.full
def test_a_run_that_the_user_has_open_is_joined_and_left_to_him(entrance, run_python, tmp_path):
    (tmp_path / "sample.py").write_text(SAMPLE)
    done = run_python(["sample.py", entrance.uri], cwd=tmp_path, timeout=120)
    assert done.returncode == 0, done.output

    client = client_of(entrance.uri)
    experiment = client.get_experiment_by_name("mine")
    second, run = client.search_runs([experiment.experiment_id], order_by=["attributes.start_time DESC"])
    assert run.info.run_name == "distributed-training" and run.info.status == "FINISHED"
    assert run.data.params.items() >= {"num_gpus": "8", "world_size": "2", "nproc_per_node": "2"}.items()
    assert steps(client, run.info.run_id, "loss") == [1, 2, 3, 4]
    assert run.data.metrics["val_loss"] > 0
    # A second trainer has a child run of its own, because the steps of both would be mixed in one run.
    assert second.data.tags["mlflow.parentRunId"] == run.info.run_id and second.info.status == "FINISHED"
    assert second.data.params["world_size"] == "1"


def test_what_a_server_missed_at_the_start_is_there_after_a_resume(entrance, run_cli, tmp_path):
    entrance.mode = "shut"
    run = tmp_path / "run"
    patience = ["mlflow._ANSWER_S=60", "_mlflow.sender._PATIENCE_S=60"]  # with a server on a busy machine
    done = run_cli(command(run, script=patience), cwd=tmp_path, env=env(entrance.uri))
    assert done.returncode == 0 and done.output.count("warning:") == 1, done.output
    assert done.output.count(WARNING) == 1 and "mlflow-sync" in done.stdout
    assert RunRecord.read(run).run_id is None

    entrance.mode = "open"
    done = run_cli(command(run, "--epochs", "2", "--resume", script=patience), cwd=tmp_path, env=env(entrance.uri))
    assert done.returncode == 0 and "warning" not in done.output, done.output
    run_id = RunRecord.read(run).run_id
    client = client_of(entrance.uri)
    assert steps(client, run_id, "loss") == list(range(1, 33)) == num_steps(run)
    assert steps(client, run_id, "val_loss") == [16, 32]
    assert "checkpoints/step-00000032/manifest.json" in files(client, run_id)


@pytest.mark.full
def test_a_slow_server_holds_no_step_up_and_gets_the_rest_later(entrance, start, run_cli, tmp_path):
    entrance.mode = "slow"  # each request waits for 30 seconds
    run = tmp_path / "slow"
    patience = ["mlflow._ANSWER_S=0.5", "_mlflow.sender._PATIENCE_S=0.5"]  # waits at the start and at the end
    done = run_cli(command(run, script=patience), cwd=tmp_path, env=env(entrance.uri))
    assert done.returncode == 0 and done.output.count("warning:") == 1 and WARNING in done.stderr, done.output
    assert entrance.num_asked >= 1
    assert float((tmp_path / "longest-0").read_text()) < 20

    still = run_cli(["mlflow-sync", run], cwd=tmp_path, env=env("http://127.0.0.1:9/"))
    assert still.returncode == 3 and still.stderr.count("\n") == 1 and "try again later" in still.stderr, still.output
    entrance.let_go()
    for _ in range(2):
        sent = run_cli(["mlflow-sync", run], cwd=tmp_path)
        assert sent.returncode == 0 and f"MLflow at {entrance.uri} has all records" in sent.stdout, sent.output
    run_id = RunRecord.read(run).run_id
    client = client_of(entrance.uri)
    assert steps(client, run_id, "loss") == list(range(1, 17))
    assert client.get_run(run_id).info.status == "FINISHED"
    assert len(client.search_runs([client.get_run(run_id).info.experiment_id], "attributes.run_name = 'slow'")) == 1
    assert RunRecord.read(run).sent == spool_of(run).size


@pytest.fixture
def sending(tmp_path, monkeypatch):
    """Return a function that makes a sender of one run directory to a URI, which retries quickly, and the list of its warnings."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    for name in ("_EVERY_S", "_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(sender_module, name, 0.05)
    monkeypatch.setattr(sender_module, "_PATIENCE_S", 60.0)  # with a server on a busy machine
    spool = spool_of(tmp_path)
    spool.open()
    warnings = []

    def make(uri):
        record = RunRecord.read(tmp_path) or RunRecord(experiment="middle", name="run")
        sender = sender_module.Sender(tmp_path, record, spool, uri, warnings.append)
        sender.start()
        return sender

    yield make, spool, warnings
    spool.close()


def metrics(step, **values):
    return {"kind": "metrics", "time": 1000 + step, "step": step, "values": values}


def test_what_a_server_missed_in_the_middle_is_sent_when_it_is_back_and_never_twice(entrance, sending, tmp_path):
    make, spool, warnings = sending
    spool.append(metrics(1, loss=3.0))
    sender = make(entrance.uri)
    poll(lambda: sender.left == 0, 60, lambda: str(warnings))
    entrance.mode = "shut"
    spool.append(metrics(2, loss=2.0))
    poll(lambda: warnings, 60, lambda: "no warning came")
    spool.append(metrics(3, loss=float("nan"), **{"val loss": 1.0}))
    entrance.mode = "open"
    poll(lambda: sender.left == 0, 60, lambda: str(warnings))
    assert sender.finish() and len(warnings) == 1 and WARNING in warnings[0]
    client = client_of(entrance.uri)
    assert steps(client, sender.run_id, "loss") == [1, 2, 3] and steps(client, sender.run_id, "val loss") == [3]

    record = RunRecord.read(tmp_path)
    record.sent = 0  # the state after a crash between the answer and its record
    record.write(tmp_path)
    assert make(entrance.uri).finish()
    assert RunRecord.read(tmp_path).run_id == sender.run_id and RunRecord.read(tmp_path).sent == spool.size
    assert steps(client, sender.run_id, "loss") == [1, 2, 3] and len(warnings) == 1


def test_files_that_find_no_place_hold_no_figures_up_and_are_sent_later(entrance, sending, tmp_path):
    make, spool, warnings = sending
    (tmp_path / "config.yaml").write_text("epochs: 1\n")
    entrance.broken = "/mlflow-artifacts/"
    spool.append({"kind": "artifact", "path": "config.yaml", "to": ""})
    spool.append(metrics(1, loss=3.0))
    sender = make(entrance.uri)
    poll(lambda: warnings, 60, lambda: "no warning came")
    spool.append(metrics(2, loss=2.0))
    assert not sender.finish()
    client = client_of(entrance.uri)
    assert steps(client, sender.run_id, "loss") == [1, 2]
    (warning,) = warnings
    assert "does not accept artifact config.yaml (" in warning and "503" in warning and WARNING in warning

    entrance.broken = ""
    assert make(entrance.uri).finish() and len(warnings) == 1
    assert files(client, sender.run_id) == ["config.yaml"]


def test_a_run_deleted_at_mlflow_is_one_warning_and_told_anew_by_the_next_attempt(entrance, sending, tmp_path):
    make, spool, warnings = sending
    spool.append(metrics(1, loss=3.0))
    first = make(entrance.uri)
    poll(lambda: (kept := RunRecord.read(tmp_path)) and kept.sent == spool.size, 60, lambda: str(warnings))
    sent = spool.size
    client = client_of(entrance.uri)
    client.delete_run(first.run_id)
    for step in (2, 3, 4, 5, 6):
        spool.append(metrics(step, loss=2.0))
    poll(lambda: warnings, 60, lambda: "no warning came")
    assert not first.finish() and RunRecord.read(tmp_path).sent == sent
    (warning,) = warnings
    assert f"no longer has the run {first.run_id}" in warning and "distributed mlflow-sync" in warning
    second = make(entrance.uri)
    spool.append(metrics(7, loss=2.0))
    assert second.finish() and second.run_id != first.run_id and len(warnings) == 1
    assert steps(client, second.run_id, "loss") == [1, 2, 3, 4, 5, 6, 7]


def test_the_end_waits_for_each_answer_and_altogether_as_long_as_it_may(entrance, sending, tmp_path, monkeypatch):
    make, spool, warnings = sending
    RunRecord(experiment="late", name="late", run_id="0" * 32, wanted="1" * 32).write(tmp_path)
    spool.append(metrics(1, loss=1.0))
    entrance.mode, entrance.late_s = "late", 0.1
    # Measured by the server's clock, so that a busy machine does not shorten the wait.
    monkeypatch.setattr(sender_module, "time", types.SimpleNamespace(monotonic=lambda: 0.1 * entrance.num_asked))
    assert make(entrance.uri).finish(0.5), warnings  # the run exists after six requests or more
    assert entrance.num_asked > 5

    sender = make(entrance.uri)
    poll(lambda: sender.run_id, 60, lambda: str(warnings))
    for number in range(40):
        spool.append({"kind": "tags", "values": {"number": str(number)}})
    assert not sender.finish(0.05)
    assert not sender.finish(60, 0.3)
    entrance.let_go()
    assert sender.finish(600) and warnings == []


def test_the_command_sends_the_rest_to_a_slow_server_and_names_what_that_refuses(
    entrance, sending, tmp_path, monkeypatch, capsys
):
    _, spool, _ = sending
    spool.append(metrics(1, **{"loss": 3.0, "a?b": 1.0}))
    with spool.path.open("ab") as file:
        file.write(b'{"kind": "metr')  # the half line of a writer that was killed
    RunRecord(experiment="late", name="rest").write(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", entrance.uri)
    monkeypatch.setattr(sender_module, "_PATIENCE_S", 0.1)  # how long the end of a run waits

    entrance.mode = "denied"
    with pytest.raises(ResourceError, match=r"does not accept the records of .* \(.*401.*; \d+ bytes are left\)"):
        run_command(["mlflow-sync", str(tmp_path)])
    entrance.mode, entrance.late_s = "late", 0.3
    run_command(["mlflow-sync", str(tmp_path)])
    said = capsys.readouterr()
    assert f"MLflow at {entrance.uri} has all records" in said.out
    assert said.err.count("\n") == 1 and said.err.startswith("warning: ") and "refuses metrics a?b" in said.err
    record = RunRecord.read(tmp_path)
    assert record.sent == spool.size and steps(client_of(entrance.uri), record.run_id, "loss") == [1]


def test_what_mlflow_refuses_is_named_and_the_rest_is_sent(entrance, sending):
    make, spool, warnings = sending
    spool.append({"kind": "params", "values": {"epochs": "1"}})
    spool.append({"kind": "params", "values": {"epochs": "2", "seed": "7"}})
    spool.append(metrics(1, **{"loss": 3.0, "a?b": 1.0}))
    spool.append({"kind": "params", "values": {"p?q": "1", "short": "1"}})
    for step in (2, 3, 4):
        spool.append(metrics(step, **{"loss": 2.0, "c?d": 1.0}))
    sender = make(entrance.uri)
    assert sender.finish()
    client = client_of(entrance.uri)
    run = client.get_run(sender.run_id)
    assert run.data.params == {"epochs": "1", "seed": "7", "short": "1"}
    assert run.data.metrics == {"loss": 2.0} and steps(client, sender.run_id, "loss") == [1, 2, 3, 4]
    assert [each in warning for each, warning in zip(("epochs=1", "a?b", "p?q"), warnings, strict=True)] == [True] * 3
    assert warnings[2].endswith("it is left out, and so is anything else that it refuses")


def test_a_new_database_is_whole_or_not_there(tmp_path, monkeypatch):
    """Cases: a process was killed while it made the database, two processes begin together, and the directory does not exist."""
    stores = tmp_path / "new" / "stores"
    uri = f"sqlite:///{stores / 'mlflow.db'}"

    def killed(engine):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("mlflow.store.db.utils._upgrade_db", killed)
        with pytest.raises(KeyboardInterrupt):
            make_whole(uri)
    assert not (stores / "mlflow.db").exists()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(make_whole, [uri, uri]))
    assert [path.name for path in stores.iterdir()] == ["mlflow.db"]
    (default,) = client_of(uri).search_experiments()
    assert default.name == "Default"


def test_a_monitor_that_fails_costs_its_own_figures_alone(monkeypatch):
    def fail(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("psutil.net_io_counters", lambda: None)  # the result of psutil where there is no network
    monkeypatch.setattr("psutil.disk_usage", fail)
    taken = []
    sampler = SystemSampler(taken.append)
    sampler.start()
    sampler.finish()

    (values,) = taken
    assert "system/cpu_utilization_percentage" in values
    assert not [name for name in values if "network" in name or "disk" in name]


def test_a_run_that_fails_or_is_stopped_says_so(entrance, start, run_cli, tmp_path):
    script = tmp_path / "fails.py"
    script.write_text(
        JOB.read_text().replace(
            "now = time.perf_counter()", "now = time.perf_counter(); assert state.step < 3, 'three'"
        )
    )
    done = run_cli(
        ["train", "--script", script, "--nproc-per-node", 2, "--mlflow-experiment", "ends", "--run-dir", tmp_path / "run",
         "--", "mlflow._INTERRUPTED_S=60", "mlflow._INTERRUPTED_LIMIT_S=60"],
        cwd=tmp_path, env=env(entrance.uri),
    )  # fmt: skip
    assert done.returncode == 1 and "three" in done.stderr, done.output
    client = client_of(entrance.uri)
    assert client.get_run(RunRecord.read(tmp_path / "run").run_id).info.status == "FAILED"


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("htp://tracking:5000", "the scheme 'htp', which MLflow does not know (did you mean 'http'?)"),
        ("sqlite:////nowhere/at/all/mlflow.db", "is in a directory that does not exist"),
    ],
)
def test_a_uri_of_no_use_is_refused_before_anything_starts(uri, said, run_cli, tmp_path):
    done = run_cli(command(tmp_path / "run"), cwd=tmp_path, env=env(uri))
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.output
    assert not (tmp_path / "run").exists()
