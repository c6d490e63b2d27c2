"""Parts of a sweep, without a trial: spaces, proposals, plans, and the files of a sweep."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import io
import json
import logging
import math
import signal
import statistics
import subprocess
import sys
import types
from pathlib import Path

import pytest
import yaml

from distributed import DistributedTuner
from distributed.config.merging import Overrides, read_config_file
from distributed.errors import ConfigError, ResourceError, TrainingError
from distributed.runs.directory import RunDirectory
from distributed.training.trial import Trial
from distributed.tuning import proposals as proposing
from distributed.tuning import scripts
from distributed.tuning import tuner as tuner_module
from distributed.tuning.earlier import num_begun, primed
from distributed.tuning.engine import record_line
from distributed.tuning.jobs import FunctionJob, cause_of
from distributed.tuning.plan import (
    SweepPlan,
    bundles_of,
    check_fits,
    check_pairing,
    check_scheduler,
    mode_of,
    total,
)
from distributed.tuning.proposals import check_search, make_proposals
from distributed.tuning.ray import cluster
from distributed.tuning.ray import sweep as ray_sweep
from distributed.tuning.ray import trial as running
from distributed.tuning.ray.schedulers import make_scheduler
from distributed.tuning.ray.trial import ActorContext, TuneReporter
from distributed.tuning.space import make_space, read_space
from distributed.tuning.sweep import Sweep, TrialRecord, open_sweep, scores
from distributed.tuning.table import TrialTable
from distributed.tuning.tuner import _row
from tests.conftest import needs_backend

SPACE = {
    "learning_rate": {"loguniform": ["1e-4", "1e-1"]}, "batch_size": [32, 64], "layers": {"randint": [1, 4]},
    "dropout": {"uniform": [0, 0.5]}, "epochs": 7,
}  # fmt: skip


# ------------------------------------------------------------------ the space


def test_a_space_is_read_from_yaml(tmp_path):
    (tmp_path / "space.yaml").write_text("learning_rate: {loguniform: [1e-4, 1e-1]}\nbatch_size: [32, 64]\nname: x\n")
    space = read_space(tmp_path / "space.yaml")
    rate = space["learning_rate"]
    assert (
        rate.at(0) == pytest.approx(1e-4) and rate.at(1) == pytest.approx(0.1) and rate.at(2 / 3) == pytest.approx(0.01)
    )
    assert [space["batch_size"].at(unit) for unit in (0, 0.4, 0.6, 1)] == [32, 32, 64, 64]
    assert not space["name"].is_varied and space["name"].values == ("x",)


def test_whole_numbers_stop_below_the_upper_end_and_all_values_come_back():
    space = make_space(SPACE)
    layers = space["layers"]
    assert {layers.at(step / 100) for step in range(101)} == {1, 2, 3} == set(layers.grid())
    for each in (space[name] for name in SPACE if name != "epochs"):
        for unit in (0.1, 0.5, 0.9):
            assert each.at(each.unit(each.at(unit))) == pytest.approx(each.at(unit))


def test_what_lies_outside_is_brought_back():
    space = make_space(SPACE)
    assert space["layers"].inside(0) == 1 and space["layers"].inside(9) == 3 and space["batch_size"].inside(32) == 32
    assert space["learning_rate"].inside(1.0) == 0.1 and space["dropout"].inside(0.2) == 0.2


def test_domains_of_ray_tune_are_spaces_too():
    tune = pytest.importorskip("ray.tune", reason="needs Ray")
    space = make_space({
        "lr": tune.loguniform(1e-3, 1e-1), "n": tune.randint(2, 5), "k": tune.choice(["a", "b"]), "q": tune.quniform(0, 1, 0.25),
        "g": tune.grid_search([1, 2]),
    })  # fmt: skip
    assert [each.kind for each in space.values()] == ["loguniform", "randint", "choice", "sampler", "choice"]
    drawn = [make_proposals("random", space, seed).ask() for seed in range(20)]
    assert {row["q"] for row in drawn} <= {0, 0.25, 0.5, 0.75, 1} and len({row["q"] for row in drawn}) > 2
    assert all(1e-3 <= row["lr"] <= 0.1 and row["n"] in (2, 3, 4) for row in drawn)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "is empty"),
        (None, "is empty"),
        ([1], "is a list"),
        ({"a": 1, "b": "x"}, "has constants only"),
        ({"a": {"unform": [0, 1]}}, "did you mean 'uniform'?"),
        ({"a": {"uniform": [1, 0]}}, "is empty: write the smaller one first"),
        ({"a": {"uniform": 3}}, "takes two numbers, not 3"),
        ({"a": {"uniform": [0, math.inf]}}, "takes two numbers"),
        ({"a": {"uniform": [0, 10**400]}}, "takes two numbers"),
        ({"a": {"loguniform": [0, 1]}}, "begin above 0"),
        ({"a": {"randint": [0, 1.5]}}, "needs whole numbers"),
        ({"a": []}, "has no values"),
        ({"a": {"uniform": [0, 1], "choice": [1]}}, "has 2 kinds"),
        ({1: [2, 3]}, "write it in quotes"),
        ({"a": object()}, "is a object"),
    ],
)
def test_a_malformed_space_is_one_line(content, said):
    with pytest.raises(ConfigError) as caught:
        make_space(content)
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "a: [1",
            "line 2 is not YAML (did not find expected ',' or ']'): write lines such as 'learning_rate: ",
        ),
        ("", "is empty"),
        (None, "cannot be read"),
        ("a: [1]\nb: 2\na: [3]", "has 'a' in line 1 and again in line 3"),
        ("a:\n  low: 1\n  low: 2\n  high: 3", "has 'low' in line 2 and again in line 3"),
    ],
)
def test_a_file_that_is_no_space_is_named(tmp_path, text, said):
    file = tmp_path / "space.yaml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=r"space\.yaml") as caught:
        read_space(file)
    assert said in str(caught.value)


# ------------------------------------------------------------------ proposals


def asked(search, num, seed=0, tell=lambda values: None):
    made = make_proposals(search, make_space(SPACE), seed)
    rows = []
    for _ in range(num):
        rows.append(made.ask())
        if (score := tell(rows[-1])) is not None:
            made.tell(rows[-1], score)
    return rows


def bowl(values):
    """Smallest at a rate of 0.01 and a dropout of 0.2."""
    return (math.log10(values["learning_rate"]) + 2) ** 2 + 10 * (values["dropout"] - 0.2) ** 2


def test_the_same_seed_proposes_the_same_and_another_does_not():
    for search in ("random", "optuna"):
        assert asked(search, 6, 3, bowl) == asked(search, 6, 3, bowl) != asked(search, 6, 4, bowl)


def test_all_proposals_lie_in_the_space():
    for search in ("random", "optuna", "bayesopt"):
        for row in asked(search, 12, 1, bowl):
            assert sorted(row) == sorted(SPACE) and row["epochs"] == 7
            assert 1e-4 <= row["learning_rate"] <= 0.1 and 0 <= row["dropout"] <= 0.5
            assert row["batch_size"] in (32, 64) and row["layers"] in (1, 2, 3) and type(row["layers"]) is int


def test_a_search_algorithm_that_learns_ends_nearer_than_chance():
    """The median of the last of 30, over five seeds."""

    def reached(search):
        return statistics.median(statistics.median(map(bowl, asked(search, 30, seed, bowl)[20:])) for seed in range(5))

    chance = reached("random")
    assert reached("optuna") < 0.7 * chance


def test_a_gaussian_process_finds_the_bottom():
    made = make_proposals("bayesopt", make_space({"x": {"uniform": [0, 10]}}), 2)
    found = []
    for _ in range(9):
        found.append(made.ask())
        made.tell(found[-1], (found[-1]["x"] - 7) ** 2)
    assert min(abs(values["x"] - 7) for values in found[5:]) < 0.2, found


def test_a_trial_without_a_value_does_not_end_a_sweep():
    for search in ("random", "optuna", "bayesopt"):
        assert len(asked(search, 7, 0, lambda values: math.inf)) == 7


def test_a_grid_is_every_combination_once():
    space = make_space({"a": [1, 2], "b": {"randint": [0, 3]}, "c": "x"})
    assert check_search("grid", space, None) == 6
    made = make_proposals("grid", space, 0)
    rows = [made.ask() for _ in range(6)]
    assert len({(row["a"], row["b"]) for row in rows}) == 6 and {row["c"] for row in rows} == {"x"}


def test_what_an_earlier_process_asked_is_not_asked_again():
    space = make_space(SPACE)
    for search in ("random", "optuna", "bayesopt"):
        first = make_proposals(search, space, 5)
        rows = [first.ask() for _ in range(3)]
        again = make_proposals(search, space, 5)
        for row in rows[:2]:
            again.repeat(row, bowl(row))
        following = again.ask()
        assert following not in rows[:2]
        assert search == "optuna" or following == rows[2]


def test_a_search_algorithm_hears_of_trials_that_went_on_after_a_resume():
    """An earlier process asked for them: told now or before, their scores change what comes next."""
    rows = asked("random", 12, 1)

    def following(is_told):
        made = make_proposals("optuna", make_space(SPACE), 5)
        for row in rows:
            made.repeat(row, None)
        for row in rows if is_told else ():
            made.tell(row, bowl(row))
        return [made.ask() for _ in range(3)]

    assert following(True) != following(False)
    assert statistics.median(map(bowl, following(True))) < statistics.median(map(bowl, rows))


@pytest.mark.parametrize(
    ("search", "num_samples", "space", "said"),
    [
        ("radnom", 3, SPACE, "did you mean 'random'?"),
        ("random", 0, SPACE, "set 1 or more"),
        ("random", None, SPACE, "set num_samples"),
        ("grid", None, SPACE, "cannot list the values of learning_rate"),
        ("grid", 3, {"a": [1, 2]}, "is not the 2 combinations"),
    ],
)
def test_a_search_algorithm_that_cannot_be_is_refused(search, num_samples, space, said):
    with pytest.raises(ConfigError) as caught:
        check_search(search, make_space(space), num_samples)
    assert said in str(caught.value)


def test_a_search_algorithm_whose_library_is_missing_says_how_to_install_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(proposing.importlib.util, "find_spec", lambda name: None if name == "optuna" else find(name))
    with pytest.raises(ResourceError, match=r"run pip install 'distributed-trainer\[tune\]'"):
        check_search("optuna", make_space(SPACE), 3)


# ------------------------------------------------------------------ plans


def plan_of(directory, **changed):
    given = {"space": make_space({"a": [1, 2]}), "num_samples": 4, "bundles": ({"CPU": 1.0},), **changed}
    return SweepPlan(directory, FunctionJob(print, 0), metric="val_loss", mode="min", **given)


def test_resources_are_bundles_in_every_form():
    assert bundles_of(None) == ({"CPU": 1.0},)
    assert bundles_of({"cpu": 2, "gpu": 1}) == ({"CPU": 2.0, "GPU": 1.0},)
    several = bundles_of([{"CPU": 1}, {"CPU": 2}])
    assert len(several) == 2 and total(several) == {"CPU": 3.0}
    assert bundles_of(None, 0.5) == ({"CPU": 1.0, "GPU": 0.5},)
    with pytest.raises(ResourceError, match="needs 3 CPU, and here has 2"):
        check_fits(total(several), {"CPU": 2.0}, "here")


@pytest.mark.parametrize("wrong", [{}, {"cpu": -1}, {"cpu": "two"}, [1], [], 3])
def test_resources_that_are_none_are_refused(wrong):
    with pytest.raises(ConfigError, match="resources_per_trial"):
        bundles_of(wrong)


def test_a_scheduler_has_its_own_options_and_no_others():
    assert check_scheduler("asha", {"grace_period": 2})[1]["grace_period"] == 2
    assert check_scheduler("none", {}) == (None, {})
    for name, options, said in (
        ("ahsa", {}, "did you mean 'asha'?"),
        ("asha", {"grace_perio": 2}, "did you mean 'grace_period'?"),
        ("pbt", {"quantile_fraction": -1}, "is not a number above 0"),
        ("asha", {"grace_period": math.nan}, "grace_period=nan of scheduler asha is not a number above 0"),
        ("asha", {"reduction_factor": 1}, "keeps every trial"),
        ("asha", {"grace_period": 5, "max_t": 3}, "grace_period=5 is above max_t=3"),
        ("pbt", {"quantile_fraction": 0.6}, "quantile_fraction=0.6 of scheduler pbt is above 0.5"),
        ("pbt", {"resample_probability": 1.5}, "is above 1: set it"),
        (None, {"grace_period": 2}, "without a scheduler"),
        ("asha", "grace_period=2", "scheduler_options is a str"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_scheduler(name, options)
        assert said in str(caught.value)


def test_a_population_needs_a_search_algorithm_that_does_not_learn():
    check_pairing("pbt", "random")
    with pytest.raises(ConfigError, match="choose search='random'"):
        check_pairing("pbt", "optuna")


def test_trials_that_take_turns_cannot_be_fewer_at_once():
    check_pairing("asha", "random", 2)
    for scheduler in ("pbt", "hyperband"):
        with pytest.raises(ConfigError, match="max_concurrent=2 has no effect with scheduler"):
            check_pairing(scheduler, "random", 2)
        with pytest.raises(ConfigError, match="max_concurrent=2 has no effect with scheduler"):
            DistributedTuner(bowl, SPACE, scheduler=scheduler, max_concurrent=2, num_gpus=0)


@pytest.mark.parametrize(
    ("search", "max_concurrent", "is_own", "most"),
    [
        ("random", None, False, 5), ("random", 3, False, 3), ("random", 4, False, 4), ("random", 9, False, 5),
        ("random", 4, True, 5), ("random", 3, True, 3), ("optuna", None, True, 4), ("optuna", 3, True, 3),
    ],
)  # fmt: skip
def test_one_trial_more_waits_only_where_resources_hold_it_back(tmp_path, search, max_concurrent, is_own, most):
    plan = plan_of(tmp_path, bundles=({"CPU": 2.0},), search=search, max_concurrent=max_concurrent)
    assert plan.num_live({"CPU": 9.0}, is_own) == most


def test_a_cluster_of_its_own_has_place_for_as_many_trials_as_may_run(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster, "here", lambda: {"CPU": 8.0, "GPU": 0.0})
    for bundle, max_concurrent, cpus in (({"CPU": 2.0}, 3, 6), ({"CPU": 2.0}, None, 8), ({"CPU": 3.0}, 4, 8)):
        assert cluster._own_cpus(plan_of(tmp_path, bundles=(bundle,), max_concurrent=max_concurrent)) == cpus


@pytest.mark.parametrize("scheduler", [None, "asha", "hyperband", "pbt"])
def test_trials_may_save_for_longer_than_ten_seconds(tmp_path, scheduler):
    """Ray Tune's own constant is what is set: where it is gone, another way is to be found."""
    pytest.importorskip("ray.tune", reason="needs Ray")
    from ray.tune.execution.tune_controller import TrialRunnerWrapper, TuneController
    from ray.tune.experiment import Trial

    assert "self._actor_force_cleanup_timeout" in inspect.getsource(TuneController._cleanup_stopping_actors)
    controller = types.SimpleNamespace(_actor_force_cleanup_timeout=10)
    trial = Trial("any", stub=True, config={"values": {"a": 1}})
    options = check_scheduler(scheduler, {})[1]
    made = make_scheduler(plan_of(tmp_path, scheduler=scheduler, scheduler_options=options))
    made.on_trial_add(TrialRunnerWrapper(controller, None), trial)
    assert controller._actor_force_cleanup_timeout == 60


@pytest.mark.parametrize(
    ("given", "visible", "bundle", "at_once"),
    [
        ({}, 2, {"CPU": 1.0, "GPU": 1.0}, 2),
        ({"trials_per_gpu": 2}, 2, {"CPU": 1.0, "GPU": 0.5}, 4),
        ({"num_gpus": 1}, 2, {"CPU": 1.0, "GPU": 1.0}, 1),
        ({"num_gpus": 0}, 2, {"CPU": 1.0}, None),
        ({"resources_per_trial": {"cpu": 1}}, 1, {"CPU": 1.0}, None),
        ({"resources_per_trial": {"cpu": 1, "gpu": 1}, "num_gpus": 4}, 8, {"CPU": 1.0, "GPU": 1.0}, 4),
        ({"resources_per_trial": {"gpu": 2}, "num_gpus": 4, "max_concurrent": 1}, 8, {"GPU": 2.0}, 1),
        ({"address": "127.0.0.1:1", "num_gpus": 3}, 0, {"CPU": 1.0, "GPU": 1.0}, 3),
        ({"address": "127.0.0.1:1", "trials_per_gpu": 4}, 0, {"CPU": 1.0, "GPU": 0.25}, None),
    ],
)
def test_gpus_are_shared_out(monkeypatch, given, visible, bundle, at_once):
    monkeypatch.setattr(tuner_module, "visible_gpus", lambda: visible)
    made = DistributedTuner(bowl, SPACE, **given)
    assert made._bundles == (bundle,) and made._max_concurrent == at_once


def test_a_trial_of_a_script_has_a_cpu_for_each_of_its_processes(tmp_path, monkeypatch):
    script = tmp_path / "train.py"
    script.write_text("")
    for gpus, bundle, at_once in ((0, {"CPU": 2.0}, None), (4, {"CPU": 2.0, "GPU": 2.0}, 2)):
        monkeypatch.setattr(tuner_module, "visible_gpus", lambda found=gpus: found)
        made = DistributedTuner(script, SPACE, nproc_per_node=2)
        assert made._bundles == (bundle,) and made._max_concurrent == at_once
        assert DistributedTuner(script, SPACE, nproc_per_node=2, resources_per_trial={"cpu": 1})._bundles == (
            {"CPU": 1.0},
        )
    with pytest.raises(ConfigError, match="trials_per_gpu=2 needs trials of one process"):
        DistributedTuner(script, SPACE, nproc_per_node=2, trials_per_gpu=2)


@pytest.mark.parametrize(
    ("space", "settings", "said"),
    [
        ({"nproc_per_node": [1, 2]}, {}, "nproc_per_node cannot be varied"),
        ({"batch_size": [8, 0]}, {}, "batch_size=0"),
        (
            {"learning_rate": [0.1, 0.2]},
            {"learning_rate": 3},
            "learning_rate is in the search space and set to 3 too",
        ),
    ],
)
def test_a_script_from_code_is_checked_as_that_of_the_command(tmp_path, space, settings, said):
    script = tmp_path / "train.py"
    script.write_text("")
    with pytest.raises(ConfigError, match=said):
        DistributedTuner(script, space, num_gpus=0, **settings)
    drawn = types.SimpleNamespace(sample=lambda random_state: 8)  # a domain that only its library knows
    assert DistributedTuner(script, {"batch_size": drawn}, num_gpus=0).space["batch_size"].kind == "sampler"


@pytest.mark.parametrize(
    "given",
    [
        {"seed": None},
        {"seed": -1},
        {"max_concurrent": "2"},
        {"max_failures": 1.5},
        {"num_gpus": -1},
        {"num_gpus": True},
    ],
)
def test_what_is_no_whole_number_is_refused(given):
    with pytest.raises(ConfigError, match="is not a whole number of at least"):
        DistributedTuner(bowl, SPACE, **given)


def test_gpus_that_cannot_be_shared_out_are_refused(monkeypatch):
    monkeypatch.setattr(tuner_module, "visible_gpus", lambda: 2)
    with pytest.raises(ResourceError, match="num_gpus=8 is more than the 2"):
        DistributedTuner(bowl, SPACE, num_gpus=8)
    with pytest.raises(ConfigError, match="num_gpus=2 has no effect with scheduler='pbt' on a cluster"):
        DistributedTuner(bowl, SPACE, num_gpus=2, scheduler="pbt", address="127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"num_gpus=1 is less than the 2 GPU .* resources_per_trial"):
        DistributedTuner(bowl, SPACE, num_gpus=1, resources_per_trial={"gpu": 2})
    with pytest.raises(ConfigError, match="both set which part of a GPU"):
        DistributedTuner(bowl, SPACE, trials_per_gpu=2, resources_per_trial={"gpu": 1})


def test_what_this_machine_shows_is_no_limit_of_a_cluster_that_is_connected(monkeypatch):
    monkeypatch.setattr(tuner_module, "visible_gpus", lambda: 0)
    monkeypatch.setattr(cluster, "is_connected", lambda: True)
    assert DistributedTuner(bowl, SPACE, num_gpus=8)._max_concurrent == 8


def test_trials_take_the_gpus_of_a_cluster_that_has_some(tmp_path):
    plan = plan_of(tmp_path, gpus_if_any=1.0)
    for there, bundles in (({"CPU": 4.0, "GPU": 2.0}, ({"CPU": 1.0, "GPU": 1.0},)), ({"CPU": 4.0}, ({"CPU": 1.0},))):
        found = types.SimpleNamespace(cluster_resources=lambda there=there: there)
        assert cluster.with_gpus(found, plan).bundles == bundles
    assert DistributedTuner(bowl, SPACE, address="127.0.0.1:1")._gpus_if_any == 1.0


def test_a_sweep_without_its_library_is_refused_before_there_is_a_directory(tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(ray_sweep.importlib.util, "find_spec", lambda name: None if name == "ray" else find(name))
    with pytest.raises(ResourceError, match=r"a sweep needs ray.*run pip install 'distributed-trainer\[tune\]'"):
        DistributedTuner(bowl, SPACE, run_dir=tmp_path / "s", num_gpus=0).tune(2)
    assert not (tmp_path / "s").exists()


def test_a_refused_sweep_leaves_no_directory_in_the_way(tmp_path):
    needs_backend("ray")
    tuner = DistributedTuner(bowl, SPACE, run_dir=tmp_path / "s", num_gpus=0, resources_per_trial={"cpu": 4096})
    with pytest.raises(ResourceError, match="a trial needs 4096 CPU"):
        tuner.tune(2)
    assert not (tmp_path / "s").exists()


def test_what_is_optimised_must_have_a_name_and_a_direction():
    with pytest.raises(ConfigError, match="choose min or max"):
        mode_of("loss", "lowest")
    with pytest.raises(ConfigError, match="give the metric to optimise"):
        mode_of("", "min")
    assert (mode_of("val_loss", None), mode_of("val_f1", None), mode_of("val_f1", "min")) == ("min", "max", "min")
    with pytest.raises(
        ConfigError, match="it is unknown whether a small or a large 'val_niceness' is best: set the mode"
    ):
        mode_of("val_niceness", None)


def test_trials_at_work_are_not_ended_by_others_that_fail(tmp_path):
    """Four begin at once. Only when the last of them has failed as well the sweep is hopeless."""
    made = ray_sweep._RaySweep(plan_of(tmp_path), lambda line: None, 4)
    trials = [types.SimpleNamespace(config={"trial": number, "values": {}}) for number in range(5)]
    for trial in trials[:4]:
        made.started(trial)
    for trial in trials[1:]:  # a fifth one begins meanwhile
        made.failed(trial)
        assert not made.is_over()
    made.failed(trials[0])
    assert made.is_over() and "all 5 trials failed before any metric" in str(made._error)


def test_a_sweep_fails_where_every_trial_does(tmp_path):
    """Also one that had reported before."""
    made = ray_sweep._RaySweep(plan_of(tmp_path), lambda line: None, 4)
    trials = [types.SimpleNamespace(config={"trial": number, "values": {}}) for number in range(2)]
    for trial in trials:
        made.started(trial)
        made.result(trial, {"row": {"val_loss": 1.0}, "cloned": None})
    made.failed(trials[0])
    assert not made._has_failed()
    made.failed(trials[1])
    assert made._has_failed() and str(made._all_failed()).startswith("all 2 trials failed: the process")


@pytest.mark.parametrize(
    ("cause", "told"),
    [
        ("rank 0 failed with ValueError: no", "rank 0 failed with ValueError: no"),
        ("rank 0 exited with code 2", "rank 0 exited with code 2: train.py: error: unrecognized arguments: --hidden 8"),
        ("rank 1 exited with code 2", "rank 1 exited with code 2"),
    ],
)
def test_a_cause_is_said_once_and_with_the_last_words_of_who_just_left(tmp_path, cause, told):
    run = RunDirectory(tmp_path)
    run.logs.mkdir()
    said = "[rank 0 10:29:48] usage: train.py [-h]\n[rank 0 10:29:48] train.py: error: unrecognized arguments: --hidden 8\n"
    (run.logs / "rank-0.log").write_text(said)
    run.event("worker_failed", rank=int(cause[5]), cause=cause, traceback="Traceback\nValueError: no")
    assert cause_of(1, run, 0, tmp_path / "log") == told


def test_a_stop_before_any_trial_waits_for_nobody(tmp_path):
    sweep = sweep_of(tmp_path / "s")

    def waits():
        watch = scripts._SweepWatch(plan_of(tmp_path), sweep, None, None, types.SimpleNamespace(print_line=print), None)
        return not watch._stops([signal.SIGINT])

    assert not waits()
    sweep.record_event(0, "started", config={"lr": 1})
    assert waits()
    sweep.run.unlock()


# ------------------------------------------------------------------ the files


def sweep_of(directory, resume=False, num_samples=4, **changed):
    asked_for = {"search": "random", "num_samples": num_samples, "search_space": {"lr": [1, 2]}, **changed}
    return open_sweep(directory, "val_loss", "min", asked_for, resume)


def test_a_sweep_is_written_and_goes_on(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    for number, losses in enumerate(([0.9, 0.4, 0.5], [0.6], [math.nan])):
        sweep.record_event(number, "started", config={"lr": 0.1 * (number + 1), "hidden": 8})
        for epoch, loss in enumerate(losses):
            sweep.record_event(number, "row", row={"epoch": epoch + 1, "val_loss": loss})
    sweep.record_event(0, "ended", status="finished")
    sweep.record_event(2, "ended", status="failed", error="ValueError: no")
    with sweep.journal.open("a") as file:
        file.write('{"trial": 1, "ev')  # killed while it wrote
    sweep.run.unlock()

    again = sweep_of(tmp_path / "s", resume=True, num_samples=6)
    assert [(r.status, r.epochs) for r, _ in scores(again)] == [("finished", 3), ("waiting", 1), ("failed", 1)]
    assert [score for _, score in scores(again)] == [0.4, None, math.inf]
    again.write()
    content = json.loads((tmp_path / "s" / "sweep.json").read_text())
    assert content["best"]["id"] == "00000" and content["best"]["metrics"] == {"epoch": 2, "val_loss": 0.4}
    assert [trial["status"] for trial in content["trials"]] == ["finished", "waiting", "failed"]
    assert content["trials"][2]["metrics"]["val_loss"] is None and content["trials"][2]["error"] == "ValueError: no"
    assert content["trials"][0]["run_dir"] == "trials/00000"
    again.run.unlock()


def test_a_value_that_is_named_like_a_column_of_the_results_has_another_name_there(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    sweep.record_event(0, "started", config={"epochs": 5, "lr": 0.1})
    sweep.record_event(0, "row", row={"epoch": 1, "val_loss": 0.5, "lr": 0.2})
    row = _row(sweep, sweep.records[0])
    assert (row["epochs"], row["config.epochs"], row["lr"], row["val_loss"]) == (1, 5, 0.1, 0.5)


def test_what_is_written_after_half_a_line_is_read_again(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    with sweep.journal.open("a") as file:
        file.write('{"trial": 0, "event": "started", "con')  # killed while it wrote
    sweep.run.unlock()
    again = sweep_of(tmp_path / "s", resume=True)
    again.record_event(1, "started", config={"lr": 1})
    again.record_event(1, "row", row={"epoch": 1, "val_loss": 0.5})
    again.run.unlock()
    third = sweep_of(tmp_path / "s", resume=True)
    assert list(third.records) == [1] and third.records[1].rows == [{"epoch": 1, "val_loss": 0.5}]
    third.run.unlock()


def test_lines_of_a_trial_whose_beginning_was_lost_are_left_out(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    sweep.journal.write_text(
        '{"trial": 4, "event": "row", "time": 1.0, "row": {"epoch": 1, "val_loss": 0.5}}\n'
        '{"trial": 2, "event": "started", "time": 1.0, "config": {"lr": 1}}\n'
    )
    sweep.run.unlock()
    again = sweep_of(tmp_path / "s", resume=True)
    assert list(again.records) == [2]
    again.run.unlock()


def test_numbers_that_a_killed_sweep_did_not_begin_are_given_again(tmp_path):
    """The first trial had not begun when the second had: both have the values that were proposed to them."""
    proposals = make_proposals("random", make_space(SPACE), 0)
    first, second, third = (proposals.ask() for _ in range(3))
    earlier = (TrialRecord(1, second, status="waiting"),)
    again, waiting = primed(plan_of(tmp_path, space=make_space(SPACE), num_samples=3, earlier=earlier))
    assert waiting == [(0, first), (1, second)]
    assert again.ask() == third
    assert num_begun(plan_of(tmp_path, earlier=earlier)) == 2


def test_values_come_back_from_the_journal_as_they_were(tmp_path):
    """JSON knows no tuples and no classes."""
    space = make_space({"layers": [(64, 64), (8,)], "number": [int, float], "size": [1, True, 1.5]})
    values = {"layers": (8,), "number": float, "size": True}
    sweep = sweep_of(tmp_path / "s")
    sweep.record_event(0, "started", config=values)
    sweep.record_event(0, "row", row={"epoch": 1, "val_loss": 0.25})
    sweep.run.unlock()
    again = sweep_of(tmp_path / "s", resume=True)
    assert again.records[0].config != values
    again.recall(space)
    assert again.records[0].config == values == again.records[0].best_config("val_loss", "min")
    assert again.records[0].config["size"] is True
    again.run.unlock()


def test_the_best_values_are_those_that_gave_the_best_metric(tmp_path):
    """A population changes a trial's values while it goes on."""
    sweep = sweep_of(tmp_path / "s")
    for rate, loss in ((0.1, 0.5), (0.2, 0.25), (0.4, 0.75)):
        sweep.record_event(0, "started", config={"learning_rate": rate})
        sweep.record_event(0, "row", row={"val_loss": loss})
    sweep.record_event(0, "ended", status="finished")
    best = sweep.summary()["best"]
    assert best["config"] == {"learning_rate": 0.2} and best["metrics"] == {"val_loss": 0.25}
    assert read_config_file(sweep.write_best(Overrides())).flag == {"learning_rate": 0.2}
    assert sweep.records[0].config == {"learning_rate": 0.4}  # what it goes on with
    sweep.run.unlock()


def test_the_best_of_a_script_from_code_can_be_run_again(tmp_path, monkeypatch):
    """best.yaml names the script as it was given; nothing in it is of this machine."""
    needs_backend("ray")
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")

    def run_sweep(plan, sweep, show):
        sweep.record_event(0, "started", config={"learning_rate": 0.2, "hidden": 8})
        sweep.record_event(0, "row", row={"epoch": 1, "val_loss": 0.25})

    monkeypatch.setattr(tuner_module, "run_sweep", run_sweep)
    tuner = DistributedTuner("train.py", {"learning_rate": [0.1, 0.2]}, run_dir="s", num_gpus=0, seed=3)
    assert tuner.tune(2) == {"learning_rate": 0.2, "hidden": 8}
    overrides = read_config_file("s/best.yaml")
    assert overrides.script == "train.py" and overrides.script_args == ("--hidden", "8")
    assert overrides.flag == {"seed": 3, "learning_rate": 0.2, "monitor": "val_loss", "monitor_mode": "min"}


def test_the_best_settings_are_as_strong_as_flags_and_the_rest_are_arguments(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    sweep.record_event(0, "started", config={"lr": 0.25, "hidden": 8, "batch_size": 64})
    sweep.record_event(0, "row", row={"epoch": 1, "val_loss": 0.1})
    path = sweep.write_best(
        Overrides(file={"epochs": 3}, flag={"dtype": "float64"}, script="train.py", script_args=("-v",))
    )
    overrides = read_config_file(path)
    assert overrides.script == "train.py" and overrides.script_args == ("-v", "--hidden", "8")
    assert overrides.file == {"epochs": 3}
    assert overrides.flag == {"dtype": "float64", "learning_rate": 0.25, "batch_size": 64}
    sweep.run.unlock()


def test_the_best_settings_have_the_options_of_a_group_from_each_source(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    sweep.record_event(0, "started", config={"ddp.comm_hook": "bf16"})
    sweep.record_event(0, "row", row={"epoch": 1, "val_loss": 0.1})
    overrides = Overrides(file={"ddp": {"static_graph": True}}, flag={"ddp": {"bucket_cap_mb": 5}}, script="train.py")
    overrides = read_config_file(sweep.write_best(overrides))
    assert overrides.value("ddp") == {"static_graph": True, "bucket_cap_mb": 5, "comm_hook": "bf16"}
    assert overrides.flag == {"ddp": {"bucket_cap_mb": 5, "comm_hook": "bf16"}}
    sweep.run.unlock()


def test_a_damaged_sweep_is_one_line_or_does_no_harm(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    sweep.record_event(0, "started", config={"lr": 1})
    sweep.run.unlock()
    with sweep.journal.open("a") as file:
        file.write('[1]\n{"trial": 0}\n')
    again = sweep_of(tmp_path / "s", resume=True)
    assert list(again.records) == [0]
    again.run.unlock()
    for text in ("", "a: [", "- 1"):
        (tmp_path / "s" / "sweep.yaml").write_text(text)
        with pytest.raises(ConfigError, match=r"sweep\.yaml is damaged.*start a new one"):
            sweep_of(tmp_path / "s", resume=True)


def test_a_resume_with_other_options_of_the_scheduler_is_refused(tmp_path):
    first, other = (
        DistributedTuner(bowl, SPACE, scheduler="asha", scheduler_options={"grace_period": epochs})._configuration(4)
        for epochs in (1, 2)
    )
    open_sweep(tmp_path / "s", "val_loss", "min", first, False).run.unlock()
    with pytest.raises(ConfigError, match="scheduler_options"):
        open_sweep(tmp_path / "s", "val_loss", "min", other, True)
    open_sweep(tmp_path / "s", "val_loss", "min", first, True).run.unlock()


def test_a_sweep_that_goes_on_must_be_the_same(tmp_path):
    sweep_of(tmp_path / "s").run.unlock()
    for changed, said in (
        ({"num_samples": 3}, "num_samples=3 is less than the 4"),
        ({"search": "grid", "a": 1, "b": 1, "c": 1}, 'search="grid" is not the "random"'),
        ({"search_space": {"lr": [1, 3]}}, "search_space="),
    ):
        with pytest.raises(ConfigError) as caught:
            sweep_of(tmp_path / "s", resume=True, **changed).run.unlock()
        assert said in str(caught.value)
    for directory, resume, said in (
        (tmp_path / "s", False, "is not empty"),
        (tmp_path, True, "holds no sweep to resume"),
        (tmp_path / "typo", True, "typo' does not exist, but a resume continues an existing sweep: correct run_dir"),
    ):
        with pytest.raises(ConfigError, match=said):
            sweep_of(directory, resume=resume)


def test_a_sweep_without_a_number_has_no_best(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    sweep.record_event(0, "started", config={"lr": 1})
    sweep.record_event(0, "row", row={"epoch": 1, "val_loss": math.nan})
    sweep.interrupt()
    assert sweep.best() is None and sweep.write_best(Overrides()) is None
    assert sweep.summary()["best"] is None and sweep.records[0].status == "interrupted"
    sweep.run.unlock()


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("good", "train_fn returned a str: return a dict of metrics"),
        (None, "metric='score' was not reported, and no other metric was"),
        ({"scores": 1}, "metric='score' is not reported (did you mean 'scores'?): choose one of scores"),
    ],
)
def test_a_function_that_returns_no_metric_is_told_so(tmp_path, returned, said):
    plan = SweepPlan(tmp_path, FunctionJob(print, 0), make_space(SPACE), "score", "min", 1, ({"CPU": 1.0},))
    reporter = TuneReporter(ActorContext(plan, str(tmp_path), is_shared=False), 0, None, tmp_path / "last.json")
    with pytest.raises(ConfigError) as caught:
        reporter.finish(returned)
    assert said in str(caught.value)


class Several:
    """As a tensor of several numbers."""

    def __float__(self):
        raise RuntimeError("only one element tensors can be converted")

    def __repr__(self):
        return "several"


def test_one_number_is_the_metric_whoever_made_it(tmp_path):
    import numpy

    plan = dataclasses.replace(plan_of(tmp_path), metric="score")
    told = []
    for returned in (0.5, numpy.float32(0.5), {"score": numpy.float32(0.5), "all": Several()}):
        reporter = TuneReporter(ActorContext(plan, str(tmp_path), is_shared=False), 0, None, tmp_path / "last.json")
        reporter._send = lambda row, end: told.append((row, end))
        reporter.finish(returned)
    assert told == [({"score": 0.5}, True), ({"score": 0.5}, True), ({"score": 0.5, "all": "several"}, True)]


def test_a_function_that_exits_is_told_by_what_it_said(tmp_path, monkeypatch):
    """Not as a process that died."""
    monkeypatch.setattr(running, "_prepare", lambda context: None)
    monkeypatch.setattr(running, "_take_over", lambda plan, number: None)
    (tmp_path / "trials").mkdir()

    def leave(values):
        raise values["how"]

    plan = dataclasses.replace(plan_of(tmp_path), job=FunctionJob(leave, 0))
    context, told = ActorContext(plan, str(tmp_path), is_shared=False), tmp_path / "trials" / "00000.error.json"
    for code in (0, "no data"):
        with pytest.raises(TrainingError, match=f"SystemExit: {code}"):
            running.run(context, {"trial": 0, "values": {"how": SystemExit(code)}})
        assert json.loads(told.read_text()) == {"error": f"SystemExit: {code}", "is_fatal": False}
    with pytest.raises(running.Stopped):  # by the scheduler
        running.run(context, {"trial": 0, "values": {"how": running.Stopped(0)}})
    assert not told.exists()


def test_a_handler_of_logging_writes_to_the_trial_that_runs(tmp_path):
    """It keeps the stream that it was made with, in the process of several trials."""
    handlers = []

    def train_fn(values):
        if not handlers:
            handlers.append(logging.StreamHandler())
        handlers[0].emit(logging.makeLogRecord({"msg": f"trial {values['a']}"}))

    for number in (0, 1):
        FunctionJob(train_fn, 0).run(Trial(tmp_path / str(number), False, print), {"a": number}, 1.0)
    assert [(tmp_path / f"{number}.log").read_text() for number in (0, 1)] == ["trial 0\n", "trial 1\n"]


def test_nobody_else_takes_a_sweep_that_runs(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    with pytest.raises(ResourceError, match="in use by process"):
        sweep_of(tmp_path / "s", resume=True)
    sweep.run.unlock()
    sweep_of(tmp_path / "s", resume=True).run.unlock()


def test_the_tuner_imports_no_library_of_a_search_algorithm():
    code = "import sys, distributed; distributed.DistributedTuner; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert not {"torch", "ray", "optuna", "bayes_opt", "pandas", "numpy", "yaml"} & set(loaded.stdout.split())


def test_yaml_of_a_space_is_plain(tmp_path):
    sweep = sweep_of(tmp_path / "s")
    assert yaml.safe_load((tmp_path / "s" / "sweep.yaml").read_text())["search_space"] == {"lr": [1, 2]}
    sweep.run.unlock()


# ------------------------------------------------------------------ the screen


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal], ids=["file", "terminal"])
def test_trials_are_shown_as_they_end_and_the_best_at_last(tmp_path, monkeypatch, stream):
    out = stream()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    sweep = sweep_of(tmp_path / "s")
    table = TrialTable(sweep, 3, ["3 trials"])
    for number, (loss, status) in enumerate(((0.5, "finished"), (0.25, "stopped"), (None, "failed"))):
        for line in (
            {"trial": number, "event": "started", "config": {"lr": 0.1 * (number + 1)}},
            {"trial": number, "event": "row", "row": {"epoch": 1, "val_loss": loss}},
            {"trial": number, "event": "ended", "status": status, "error": "ValueError: no" if loss is None else None},
        ):
            record_line(sweep, line)
            table.show(line)
    table.close(sweep.write_best(Overrides()))
    said = out.getvalue()
    assert said.startswith("3 trials") and "trial 00002  failed  1 epoch  lr=0.3  ValueError: no" in said
    assert "3 of 3 trials: 1 finished, 1 stopped, 1 failed; " in said
    assert "best: trial 00001  stopped  1 epoch  val_loss 0.25  lr=0.2" in said and "best.yaml" in said
    heads = [line for line in said.splitlines() if "status" in line and "epochs" in line and "val_loss" in line]
    assert bool(heads) is (stream is Terminal)  # the table itself
    sweep.run.unlock()


def test_a_narrow_terminal_shows_fewer_values_and_every_metric(tmp_path, monkeypatch):
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    sweep = sweep_of(tmp_path / "s")
    record_line(sweep, {"trial": 0, "event": "started", "config": {f"setting_{number}": 1.5 for number in range(7)}})
    record_line(sweep, {"trial": 0, "event": "row", "row": {"val_loss": 0.12345}})
    TrialTable(sweep, 1, []).close(None)
    (head,) = [line for line in out.getvalue().splitlines() if "status" in line][-1:]
    assert "val_loss" in head and "setting_0" in head and "setting_6" not in head and "…" in head
    assert "0.1235" in out.getvalue() and "00000" in out.getvalue()
    sweep.run.unlock()


def test_a_terminal_that_has_gone_ends_no_sweep(tmp_path, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    sweep = sweep_of(tmp_path / "s")
    monkeypatch.setattr(sys, "stdout", Gone())
    table = TrialTable(sweep, 1, ["1 trial"])
    table.close(None)
    sweep.run.unlock()


class Growing(TrialRecord):
    """A record that the sweep adds another to while it is looked at."""

    sweep: Sweep

    @property
    def since(self):
        self.sweep.records[len(self.sweep.records)] = TrialRecord(len(self.sweep.records), {"lr": 1})

    @since.setter
    def since(self, value):
        pass

    def best_config(self, metric, mode):
        return {"lr": self.since}

    @property
    def config(self):
        return {"lr": self.since}

    @config.setter
    def config(self, value):
        pass

    @property
    def status(self):
        return self.since or "running"

    @status.setter
    def status(self, value):
        pass


def test_a_table_is_drawn_while_trials_are_added(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("TERM", "xterm")
    sweep = sweep_of(tmp_path / "s")
    sweep.records[0] = Growing(0, {})
    sweep.records[0].sweep = sweep
    table = TrialTable(sweep, 3, [])
    table._table()
    assert len(sweep.records) > 3  # by the names, the counts and the hours
    sweep.run.unlock()
    table.close(None)
