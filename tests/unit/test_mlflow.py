"""What the MLflow logger decides and keeps without asking MLflow."""

from __future__ import annotations

import json
import os
import sys
import types

import pytest

from distributed.cli.__main__ import run
from distributed.config.merging import Overrides, merge
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError, ResourceError
from distributed.loggers._mlflow import tracking_uri
from distributed.loggers._mlflow.run import grouped, metric_name
from distributed.loggers._mlflow.spool import RunRecord, logged_params, spool_of
from distributed.loggers.base import is_on_mlflow
from distributed.loggers.mlflow import JoinedRun, MlflowLogger
from distributed.loggers.registry import check, environ_of_run, environ_of_workers
from distributed.loggers.spool import last_steps
from distributed.runs.directory import RunDirectory
from distributed.tuning.mlflow_run import SweepRun, run_of_sweep
from distributed.tuning.sweep import Sweep


@pytest.fixture(autouse=True)
def _no_mlflow_variables(monkeypatch):
    for name in (tracking_uri.URI, tracking_uri.RUN_ID, "MLFLOW_ALLOW_FILE_STORE"):
        monkeypatch.delenv(name, raising=False)


def merged(**settings):
    return merge(Overrides(), settings)


def test_an_experiment_or_a_name_for_the_model_asks_for_tracking_unless_it_is_switched_off():
    assert not is_on_mlflow(merged())
    assert is_on_mlflow(merged(mlflow_tracking=True))
    assert is_on_mlflow(merged(mlflow_experiment="x"))
    assert is_on_mlflow(merged(mlflow_register_model="x"))
    assert not is_on_mlflow(merged(mlflow_experiment="x", mlflow_tracking=False))


def parameters(path, device, wanted=None, **settings):
    """What a run of two processes on each of two nodes tells MLflow of itself."""
    fit = types.SimpleNamespace(
        run=RunDirectory(path), merged=merged(**settings), plan=ProcessPlan(2, 2, device, "pytorch-ddp"),
        batch=BatchPlan(8, 1, 4, 32), context=types.SimpleNamespace(world_size=4),
        backend=types.SimpleNamespace(devices_per_process=1),
    )  # fmt: skip
    RunRecord(wanted=wanted).write(path)
    return MlflowLogger(fit)._params()


def test_what_a_run_runs_on_is_logged_whether_it_was_given_or_not(tmp_path):
    expected = {"backend": "pytorch-ddp", "num_nodes": "2", "nproc_per_node": "2", "world_size": "4"}
    for settings in ({}, {"nproc_per_node": 2}, {"num_gpus": 4}):
        assert (
            parameters(tmp_path, "cuda", **settings).items() >= {**expected, "device": "cuda", "num_gpus": "4"}.items()
        )
    assert parameters(tmp_path, "cpu").items() >= {**expected, "device": "cpu", "num_gpus": "0"}.items()


def test_a_run_that_the_user_has_open_keeps_num_gpus_free(tmp_path):
    """`mlflow.log_param("num_gpus", 8)` in it would fail, as MLflow changes no parameter."""
    told = parameters(tmp_path, "cpu", wanted="his")
    assert "num_gpus" not in told and told["world_size"] == "4"
    assert parameters(tmp_path, "cuda", wanted="his", num_gpus=4)["num_gpus"] == "4"


@pytest.mark.parametrize(
    "uri",
    [
        "http://localhost:5000", "https://user:secret@tracking.example.org/mlflow", "sqlite:///mlflow.db",
        "postgresql+psycopg2://u:p@host/db", "databricks", "databricks://profile",
    ],
)  # fmt: skip
def test_uris_of_mlflow_are_taken(uri):
    tracking_uri.check_uri(uri)


@pytest.mark.parametrize(
    ("uri", "said"),
    [
        ("localhost:5000", "write http://localhost:5000"),
        ("sqlit:///mlflow.db", "did you mean 'sqlite'?"),
        ("http://", "names no server"),
        ("http://host:port", "names no server"),
        ("http://u:secret@:5000", "names no server"),
        ("sqlite://", "names no file"),
        ("sqlite:///no/such/place/mlflow.db", "a directory that does not exist"),
        ("mlruns", "MLFLOW_ALLOW_FILE_STORE=true"),
        ("file:///tmp/mlruns", "use a database"),
    ],
)
def test_a_uri_of_no_use_is_refused_with_the_fix(uri, said):
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI=") as error:
        tracking_uri.check_uri(uri)
    assert said in str(error.value) and "secret" not in str(error.value)


def test_a_name_that_mlflow_does_not_take_is_refused():
    with pytest.raises(ConfigError, match="mlflow_register_model='a/b' is not a valid name"):
        check(merged(mlflow_register_model="a/b"))


def test_a_missing_library_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ResourceError, match=r"needs mlflow, .*pip install 'distributed-trainer\[mlflow\]'"):
        check(merged(mlflow_tracking=True))


def test_a_file_in_the_place_of_the_library_is_named(monkeypatch, tmp_path):
    (tmp_path / "mlflow.py").write_text("")
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ResourceError, match=r"mlflow\.py hides the library mlflow: rename"):
        tracking_uri.check(merged(mlflow_tracking=True))


def test_a_folder_of_the_librarys_name_beside_the_script_is_no_library(monkeypatch, tmp_path):
    (tmp_path / "mlflow").mkdir()
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ResourceError, match="needs mlflow, which is not installed: run pip install"):
        tracking_uri.check(merged(mlflow_tracking=True))


def test_only_a_run_that_the_user_had_open_is_handed_to_a_further_attempt(monkeypatch, tmp_path):
    monkeypatch.setattr(tracking_uri, "given_out", set())
    assert environ_of_run(tmp_path) == {}
    RunRecord(run_id="ours").write(tmp_path)
    assert environ_of_run(tmp_path) == {}  # a `start_run` of the script's own is another one
    RunRecord(run_id="a child of his", wanted="his", tracking_uri="http://host:1").write(tmp_path)
    assert environ_of_run(tmp_path) == {tracking_uri.RUN_ID: "his", tracking_uri.URI: "http://host:1"}
    assert tracking_uri.given_out == {"his"}


def test_the_store_lies_beside_the_runs_also_for_a_later_trainer(tmp_path):
    first = tmp_path / "runs" / "a"
    first.mkdir(parents=True)
    (first / "events.jsonl").touch()
    assert (
        tracking_uri.default_uri(first)
        == tracking_uri.default_uri(first / "fit-2")
        == f"sqlite:///{tmp_path}/runs/mlflow.db"
    )
    assert tracking_uri.default_uri(tmp_path / "fit-2") == f"sqlite:///{tmp_path}/mlflow.db"


def test_a_store_is_found_again_from_another_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(tracking_uri.URI, "sqlite:///mlflow.db?timeout=9")
    record, uri = RunRecord.chosen(tmp_path / "run", None, "any")
    assert uri == "sqlite:///mlflow.db?timeout=9"
    assert record.tracking_uri == f"sqlite:///{tmp_path}/mlflow.db?timeout=9"
    for whole in (
        "sqlite:////srv/mlflow.db",
        "http://host:1/a",
        "sqlite:///file:mlflow.db?uri=true",
        "sqlite:///:memory:",
    ):
        assert tracking_uri.lasting(whole) == whole


def test_a_password_is_never_shown():
    assert tracking_uri.shown("https://me:secret@host:1/a?b") == "https://host:1/a?b"
    assert tracking_uri.shown("sqlite:///a@b.db") == "sqlite:///a@b.db"


def test_a_run_of_the_environment_is_joined_unless_it_is_our_own(monkeypatch):
    tracked = merged(mlflow_tracking=True)
    monkeypatch.setenv(tracking_uri.RUN_ID, "abc")
    monkeypatch.setenv(tracking_uri.URI, "http://host:5000")
    assert tracking_uri.users_run() == ("abc", "http://host:5000")
    assert environ_of_workers(tracked) == {tracking_uri.RUN_ID: "abc", tracking_uri.URI: "http://host:5000"}
    assert environ_of_workers(merged()) == {}
    monkeypatch.setattr(tracking_uri, "given_out", {"abc"})
    assert tracking_uri.users_run() is None and environ_of_workers(tracked) == {}


def test_a_process_that_is_no_worker_gets_its_environment_back(monkeypatch):
    monkeypatch.setattr(tracking_uri, "given_out", set())
    monkeypatch.setenv(tracking_uri.URI, "http://before:1")
    joined = JoinedRun({tracking_uri.RUN_ID: "abc", tracking_uri.URI: "http://now:1"}, is_worker=False)
    assert os.environ[tracking_uri.RUN_ID] == "abc" and tracking_uri.users_run() is None
    joined.close()
    assert tracking_uri.RUN_ID not in os.environ and os.environ[tracking_uri.URI] == "http://before:1"


def test_the_spool_forgets_half_a_line_and_nothing_else(tmp_path):
    spool = spool_of(tmp_path)
    spool.open()
    spool.append({"kind": "params", "values": {"epochs": "1"}})
    spool.append({"kind": "metrics", "time": 1, "step": 5, "values": {"loss": 0.5, "val_loss": 1.0}})
    spool.close()
    with spool.path.open("ab") as file:
        file.write(b'{"kind": "metr')

    again = spool_of(tmp_path)
    assert [entry["kind"] for entry in again.open()] == ["params", "metrics"]
    again.append({"kind": "metrics", "time": 2, "step": 6, "values": {"loss": 0.25}})
    again.append({"kind": "params", "values": {"epochs.from_step_6": "2"}})
    lines = list(again.read(0))
    assert [json.loads(line) for line in again.path.read_text().splitlines()] == [entry for entry, _ in lines]
    assert lines[-1][1] == again.size
    assert [entry for entry, _ in again.read(lines[1][1])] == [lines[2][0], lines[3][0]]
    entries = [entry for entry, _ in lines]
    assert last_steps(entries) == {"loss": 6, "val_loss": 5}
    assert logged_params(entries) == {"epochs": "2"}


def test_a_record_that_cannot_be_read_is_none(tmp_path):
    assert RunRecord.read(tmp_path) is None
    RunRecord(key="k", sent=7).write(tmp_path)
    assert RunRecord.read(tmp_path) == RunRecord(key="k", sent=7)
    for other in ("[1]", '{"sent": -1}', '{"key": ["k"]}', "[" * 300 + "]" * 300):
        (tmp_path / "mlflow.json").write_text(other)
        assert RunRecord.read(tmp_path) is None


def test_a_request_holds_a_thousand_metrics_at_most_and_one_of_anything_else():
    metric = {"kind": "metrics", "values": dict.fromkeys(range(400), 1.0)}
    other = {"kind": "status"}
    entries = [(entry, end) for end, entry in enumerate([metric, metric, metric, other, other, metric], 1)]
    assert [(len(group), end) for group, end in grouped(entries)] == [(2, 2), (1, 3), (1, 4), (1, 5), (1, 6)]


def test_a_directory_that_was_not_logged_to_mlflow_has_nothing_to_send(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no mlflow\.json"):
        run(["mlflow-sync", str(tmp_path)])


def test_the_runs_of_further_trainers_and_of_trials_are_sent_too(tmp_path, monkeypatch):
    sent = []
    monkeypatch.setattr("distributed.loggers.mlflow.send_rest", lambda run, warn: sent.append(run))
    for name in (".", "trials/1", "fit-2", "trials/1/fit-2"):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "mlflow.json").touch()
    run(["mlflow-sync", str(tmp_path)])
    (tmp_path / "mlflow.json").unlink()
    run(["mlflow-sync", str(tmp_path)])
    below = [tmp_path / name for name in ("fit-2", "trials/1", "trials/1/fit-2")]
    assert sent == [tmp_path, *below, *below]


def test_the_rest_of_a_live_run_is_left_to_it(tmp_path):
    live = RunDirectory(tmp_path)
    live.lock()
    with pytest.raises(ResourceError, match="is in use by"):
        run(["mlflow-sync", str(tmp_path)])


def test_names_have_letters_that_mlflow_takes():
    assert metric_name("top-5 acc/val.x") == "top-5 acc/val.x"
    assert metric_name("f1@k=5(%)") == "f1_k_5___"


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        ("/acc", "acc"),
        ("f1//macro/", "f1/macro"),
        ("../loss", "loss"),
        ("a/../..", "_"),
        ("", "_"),
        ("x" * 249 + "/y", "x" * 249),
        (".loss.", "loss."),
    ],
)
def test_names_have_the_form_of_a_path_that_mlflow_takes(name, taken):
    assert metric_name(name) == taken


def test_a_sweep_is_told_the_values_of_its_best_moment(tmp_path):
    """A population's trial has other values at its end."""
    sweep = Sweep(tmp_path, "loss@5", "min")  # MLflow takes no @
    for line in (
        {"trial": 0, "event": "started", "config": {"lr": 0.1}, "time": 0.0},
        {"trial": 0, "event": "row", "row": {"loss@5": 1.0}, "time": 1.0},
        {"trial": 0, "event": "started", "config": {"lr": 0.9}, "time": 2.0},
        {"trial": 0, "event": "row", "row": {"loss@5": 5.0}, "time": 3.0},
    ):
        sweep.apply(line)
    run = SweepRun(sweep, {}, "any", "train", print)
    run._sender.start, run._sender.finish = run._sender.is_open.set, lambda: True
    run.start()
    run.hear({"trial": 0, "event": "ended"})
    run.close("FINISHED")
    entries = [json.loads(line) for line in (tmp_path / "mlflow.jsonl").read_text().splitlines()]
    tags = [entry["values"] for entry in entries if entry["kind"] == "tags"]
    assert tags[-1] == {"best_trial": "00000", "best.lr": "0.1"}
    (metrics,) = [entry["values"] for entry in entries if entry["kind"] == "metrics"]
    assert metrics["best_loss_5"] == 1.0


@pytest.mark.parametrize(("asked", "name"), [({}, "train"), ({"mlflow_experiment": "mine"}, "mine")])
def test_sweeps_of_one_script_share_an_experiment(tmp_path, asked, name, monkeypatch):
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    for sweep in ("tune-train-1", "tune-train-2"):
        (tmp_path / sweep).mkdir()
        settings = merged(mlflow_tracking=True, **asked)
        run_of_sweep(Sweep(tmp_path / sweep, "loss", "min"), settings, "examples/train.py", {}, print)
        record = RunRecord.read(tmp_path / sweep)
        assert (record.experiment, record.name) == (name, sweep)
