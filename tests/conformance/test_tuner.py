"""Run DistributedTuner with real trials: many sweeps on one local cluster of two CPUs."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import pytest

from distributed.report import write_report
from distributed.report.sweep import read_sweep, sweep_panels
from distributed.tuning.proposals import make_proposals
from distributed.tuning.space import make_space
from tests import event_files
from tests.conformance.runs import FULL
from tests.conftest import Started, clean_environment, needs_backend

JOB = Path(__file__).parent / "jobs" / "tuner" / "sweeps.py"
pytestmark = pytest.mark.timeout(3000)


def run(tmp_path_factory, kind, end):
    """Yield (the directory of the sweeps, the output of the command). `end` ends the last sweep, which is on a cluster of its own."""
    needs_backend("ray")
    cwd = tmp_path_factory.mktemp("cwd")
    with tempfile.TemporaryDirectory(prefix="tuner-") as out:  # short: sockets lie in it
        command = Started([sys.executable, str(JOB), out, kind], cwd, cwd, clean_environment())
        place = Path(out)
        try:
            command.wait_for(lambda: reporting(place / kind / "trials.jsonl") >= {0, 1}, 1200)
            end(command.pid)
            done = command.finish(150, grace=60)  # fails if a process is left
        finally:
            command.kill()
        yield place, done


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """Run the sweeps of `make test`. The last one gets a Ctrl-C of the terminal, which goes to all processes of the command."""
    yield from run(tmp_path_factory, "few", lambda pid: os.killpg(pid, signal.SIGINT))


@pytest.fixture(scope="module")
def ended_too(tmp_path_factory):
    """Run the sweeps that only `make test-full` runs. The last one gets a SIGTERM, which goes to the process of the command only."""
    yield from run(tmp_path_factory, "more", lambda pid: os.kill(pid, signal.SIGTERM))


def reporting(journal):
    """Return the trials that have ended an epoch."""
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    events = [json.loads(line) for line in lines if line.endswith("\n")]
    return {event["trial"] for event in events if event["event"] == "row"}


@pytest.fixture(scope="module")
def found(ended):
    return json.loads(ended[1].stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def more(ended_too):
    return json.loads(ended_too[1].stdout.splitlines()[-1])


def test_a_grid_of_a_function_that_returns_metrics(found):
    facts = found["grid"]
    assert facts["best"] == {"a": 3, "b": 0} and facts["rows"] == 8
    assert {"trial", "status", "a", "b", "score", "note", "epochs", "error", "run_dir"} <= set(facts["columns"])
    assert facts["first"]["score"] == 0 and facts["first"]["note"] == "3" and facts["first"]["as_object"] == 2.0


def test_optimizers_and_schedules_are_varied_by_name_and_each_validation_is_reported(found):
    trials = found["named"]
    pairs = [(trial["values"]["optimizer"], trial["values"]["scheduler"]) for trial in trials]
    assert sorted(pairs) == [("adafactor", "linear"), ("adafactor", "wsd"), ("sgd", "linear"), ("sgd", "wsd")]
    assert [(trial["config"]["optimizer"], trial["config"]["scheduler"]) for trial in trials] == pairs
    assert len({trial["loss"] for trial in trials}) == 4  # each has trained in another way
    assert [trial["rows"] for trial in trials] == [[[5, 1], [10, 2], [15, 3], [16, 4]]] * 4


@FULL
def test_a_search_algorithm_that_learns_is_told_what_came_of_its_trials(more):
    """The first ten trials are random. The later ones differ from those of a sweep that gets no results."""
    tried = more["optuna"]["tried"]
    deaf = make_proposals("optuna", make_space({"a": {"uniform": [0, 10]}}), 1)
    unheard = [deaf.ask()["a"] for _ in tried]
    assert tried[:10] == unheard[:10] and not set(tried[11:]) & set(unheard)
    assert abs(more["optuna"]["best"] - 3) < 1.5, tried


@FULL
def test_a_cluster_of_its_own_runs_one_trial_at_a_time(more):
    """The sweep runs in a process that imported Ray before."""
    assert more["own"]["best"] == {"a": 1}
    one = ("started", "row", "ended")
    assert more["own"]["happened"] == [[number, event] for number in range(3) for event in one]


@pytest.mark.parametrize(("kind", "number"), [("few", signal.SIGINT), pytest.param("more", signal.SIGTERM, marks=FULL)])
def test_a_signal_has_all_trials_save_and_leaves_no_process(request, kind, number):
    """The sweep runs on a cluster of its own, in a process that was connected to another cluster before."""
    place, done = request.getfixturevalue("ended" if kind == "few" else "ended_too")
    if number == signal.SIGINT:
        assert done.returncode != 0 and done.stderr.splitlines()[-1] == "KeyboardInterrupt", done.output[-6000:]
    else:
        assert done.returncode == 128 + number and "Traceback" not in done.stderr, done.output[-6000:]
    sweep = json.loads((place / kind / "sweep.json").read_text())
    assert [trial["status"] for trial in sweep["trials"]] == ["interrupted"] * 2  # no third trial began
    runs = [place / kind / trial["run_dir"] for trial in sweep["trials"]]
    assert [json.loads((run / "result.json").read_text())["status"] for run in runs] == ["interrupted"] * 2
    assert all(list((run / "checkpoints").glob("step-*")) for run in runs)
    assert (place / kind / "best.yaml").exists() and not (place / kind / ".stop").exists()


def test_the_report_of_a_sweep_shows_its_parameters_and_their_importance(ended, tmp_path):
    place, _ = ended
    panels = {panel.title: panel for panel in sweep_panels(read_sweep(place / "grid"))}
    parameters, importance = panels["Parameters"].more, panels["Importance of the parameters"].lines[0].data
    assert [axis["name"] for axis in parameters["axes"]] == ["a", "b", "score"] and len(parameters["trials"]) == 8
    assert (parameters["best"], parameters["worst"]) == (0, 14)
    assert importance["y"] == ["b", "a"] and sum(importance["x"]) == pytest.approx(1, abs=1e-3)  # 10 against at most 4
    page = write_report([place / "grid"], tmp_path / "report.html").read_text()
    assert "Importance of the parameters" in page


@FULL
def test_the_report_of_a_sweep_shows_the_curves_of_its_trials(ended_too):
    place, _ = ended_too
    (curves,) = [panel for panel in sweep_panels(read_sweep(place / "asha")) if panel.title == "Curves of the trials"]
    assert max(len(line.data["y"]) for line in curves.lines) == 9 and len(curves.lines) == 8


@FULL  # the sweep of test_tune.py stops trials early with asha too
def test_asha_stops_the_bad_ones_early_and_the_best_trainer_comes_back(more):
    facts = more["asha"]
    assert facts["best"]["lr"] in (0.3, 0.2)
    status = {float(rate): tuple(each) for rate, each in facts["statuses"].items()}
    assert status[facts["best"]["lr"]] == ("finished", 9)
    early = [epochs for kind, epochs in status.values() if kind == "stopped"]
    assert len(early) >= 4 and max(early) < 9
    assert facts["stopped"] == "interrupted"  # the processes of the trial saved and left
    assert facts["again"] == pytest.approx(facts["row"]["val_loss"], rel=1e-6)
    assert facts["history"] == list(range(1, facts["row"]["epoch"] + 1))
    assert "/checkpoints/step-" in facts["checkpoint"]
    assert "rate 0.3" in facts["log"] and "epoch 9/9" in facts["log"]


@FULL
def test_a_population_goes_on_from_its_best_members(more):
    facts = more["pbt"]
    assert facts["epochs"] == [9, 9, 9, 9] and set(facts["statuses"]) == {"finished"}
    assert facts["num_cloned"] > 0 and facts["turns"] > 4
    assert facts["rate_replaced"]
    assert max(facts["losses"]) < 0.6, facts["losses"]  # with a rate of 1e-6 alone the loss would not have moved


@FULL
def test_hyperband_ends_with_its_best(more):
    facts = more["hyperband"]
    assert facts["best"]["lr"] in (0.3, 0.2) and max(facts["epochs"]) == 9 and min(facts["epochs"]) < 9


@FULL
def test_a_trial_of_two_processes_has_both_cpus_for_itself(more):
    facts = more["distributed_trials"]
    assert facts["worlds"] == [2, 2] and facts["epochs"] == [3, 3]
    one = ["started", "row", "row", "row", "row", "ended"]
    assert facts["order"] == one * 2  # the trials never overlap; the fourth row is what the function returned


@FULL
def test_a_trial_whose_process_dies_goes_on_from_its_checkpoint(more):
    facts = more["died"]
    assert facts["retried"].count("retried") == 1 and facts["retried"].count("started") == 2
    # The trial did not start again from the beginning.
    assert facts["epochs"][-1] == 6 and facts["epochs"].count(1) == 1


def test_crashes_are_told_by_their_own_cause(found):
    facts = found["failures"]
    assert facts["some"] == {"a": 3} and facts["errors"] == [None, "ValueError: two is too much", None]
    assert facts["all"]["type"] == "TrainingError" and "ValueError: no way with 1" in facts["all"]["said"]
    assert "ray" not in facts["all"]["said"].partition("(/")[0].lower() and facts["crashed"] < 8
    assert "in crashes" in facts["log"] and "no way with 1" in facts["log"]


@pytest.mark.parametrize(
    ("name", "kind", "said"),
    [
        ("unknown", "ConfigError", "metric='val_los' is not reported (did you mean 'val_loss'?): choose one of"),
        ("too much", "ResourceError", "a trial needs 64 CPU"),
        ("no gpus", "ResourceError", "a trial needs 1 GPU, and the largest node of the cluster has 0"),
        (
            "a lock",
            "ConfigError",
            "cannot be sent to the processes of its trials (cannot pickle '_thread.lock' object)",
        ),
        ("misspelt", "ConfigError", "did you mean 'scheduler'?"),
        ("shared", "ConfigError", "checkpoint_dir would be shared by all trials"),
        ("early", "ConfigError", "there are no results before tune()"),
    ],
)
def test_what_cannot_be_is_one_line_in_seconds(found, name, kind, said):
    told = found["refusals"][name]
    assert told["type"] == kind and said in told["said"] and "\n" not in told["said"], told
    assert told["seconds"] < 60


# `make conformance` kills a sweep of the command and continues it (test_tune.py).
@FULL
@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_sweep_goes_on_as_if_it_had_never_ended(more, side_by_side):
    facts = more["resumed_side_by_side" if side_by_side else "resume"]
    assert facts["started"] == [0, 1, 2, 3, 4] and facts["same"]
    assert facts["processes"] <= (3 if side_by_side else 1)  # for five trials
    assert "saved no checkpoint: train with a Trainer" in facts["no trainer"]["said"]


@FULL
def test_mlflow_has_one_run_of_the_sweep_with_one_of_each_trial_below(more):
    facts = more["tracked"]
    runs = facts["runs"]
    parents = {run["name"]: run_id for run_id, run in runs.items() if "mlflow.parentRunId" not in run["tags"]}
    assert set(parents) == {"tracked", "bowls", "gone"}
    below = {
        name: sorted((run for run in runs.values() if run["tags"].get("mlflow.parentRunId") == run_id), key=lambda run: run["name"])
        for name, run_id in parents.items()
    }  # fmt: skip
    trials, parent, best = below["tracked"], runs[parents["tracked"]], facts["best"]
    assert [run["name"] for run in trials] == [trial["id"] for trial in facts["trials"]] and len(runs) == 3 + 3 + 2 + 1
    assert {run["experiment"] for run in runs.values()} == {
        parent["experiment"]
    }  # the experiment of all sweeps of this script
    assert [float(run["params"]["learning_rate"]) for run in trials] == [
        trial["config"]["lr"] for trial in facts["trials"]
    ]
    ends = {"finished": "FINISHED", "stopped": "KILLED"}
    assert [run["status"] for run in trials] == [ends[trial["status"]] for trial in facts["trials"]]
    assert parent["status"] == "FINISHED" and parent["tags"]["best_trial"] == best["id"]
    assert parent["metrics"]["best_val_loss"] == pytest.approx(best["metrics"]["val_loss"])
    assert parent["params"]["scheduler"] == "asha" and parent["params"]["search_space.lr"] == "[0.3, 1e-06, 1e-07]"
    assert {"sweep.json", "sweep.yaml", "best.yaml"} <= set(parent["artifacts"])
    assert facts["again"] == pytest.approx(best["metrics"]["val_loss"], rel=1e-6)  # no further run of it

    plain = below["bowls"]  # these trials have no Trainer, so the sweep logs them
    assert [(run["params"]["a"], run["status"]) for run in plain] == [("1", "FINISHED"), ("2", "FAILED")]
    assert plain[0]["metrics"]["score"] == 1.0 and runs[parents["bowls"]]["metrics"]["best_score"] == 1.0

    (late,) = below["gone"]  # sent by `mlflow-sync`
    assert late["status"] == runs[parents["gone"]]["status"] == "FINISHED" and late["metrics"]["val_loss"] < 1


@FULL
def test_tensorboard_shows_the_trials_of_a_sweep_with_their_metrics(ended_too, more):
    shown = event_files.sessions(ended_too[0] / "tracked" / "trials")
    rates = {f"{trial['id']}/tensorboard": trial["config"]["lr"] for trial in more["tracked"]["trials"]}
    assert {name: values["learning_rate"] for name, (values, _) in shown.items()} == rates
    assert all(metrics["val/loss"] > 0 for _, metrics in shown.values())


def test_nothing_is_left(found):
    assert found["free"] == 2 and found["groups left"] == []
