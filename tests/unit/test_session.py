"""A Trainer in this very process: what it shows, what it leaves behind when it fails, and what it says of a run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import io
import json
import re
import shutil
import signal
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from distributed import Callback, EarlyStopping, Trainer
from distributed.backends import checking
from distributed.backends._torch import loading
from distributed.config.merging import Overrides
from distributed.errors import ConfigError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.request import Handover
from distributed.launching.worker import _failed
from distributed.runs.directory import RunDirectory
from distributed.state import WorkerContext
from distributed.training.files import TrainerFiles, _Taken
from distributed.training.setup import merge

DATA = TensorDataset(torch.arange(24.0).reshape(12, 2) / 24, torch.arange(12) % 2)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def own_place(monkeypatch, tmp_path):
    """A process that has trained nothing yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(_Taken, "first", None)
    monkeypatch.setattr(_Taken, "count", 0)
    monkeypatch.setattr(_Taken, "num_named", Counter())
    monkeypatch.setattr(sys, "argv", ["train.py"])


@contextlib.contextmanager
def terminal():
    """What is printed goes to a terminal."""
    stream = Terminal()
    with contextlib.redirect_stdout(stream), pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        patch.setenv("COLUMNS", "100")
        yield stream


def step_of_loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])


def trainer(step=None, *callbacks, **settings):
    def training_step(model, batch):
        if step is not None:
            step(model)
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    return Trainer(
        torch.nn.Linear(2, 2), training_step=training_step, batch_size=4, callbacks=callbacks, device="cpu", **settings
    )


def results(tmp_path):
    return {path.parent.name: json.loads(path.read_text()) for path in sorted(tmp_path.rglob("result.json"))}


def only_result(tmp_path):
    (result,) = results(tmp_path).values()
    return result


def test_a_further_fit_counts_from_where_it_starts():
    runner = trainer(epochs=2, log_every_n_steps=1)

    with terminal() as screen:
        for _ in range(3):
            runner.fit(DATA)

    counts = [tuple(map(int, pair)) for pair in re.findall(r"(?:step|epoch) (\d+)/(\d+)", screen.getvalue())]
    assert {(2, 2), (4, 4), (6, 6)} <= set(counts)
    assert all(done <= total for done, total in counts)


def test_a_finder_comes_before_the_fit_below_its_run_and_shows_nothing(tmp_path):
    runner = trainer(epochs=2)
    with terminal() as screen:
        curves = [runner.find_learning_rate(DATA, num_steps=20) for _ in range(2)]
    assert screen.getvalue() == "" and curves[0] == curves[1] and len(curves[0].losses) == 20
    runner.fit(DATA)
    (run,) = (tmp_path / "runs").iterdir()
    assert sorted(results(tmp_path)) == sorted([run.name, "learning-rate", "learning-rate-2"])
    with pytest.raises(ConfigError, match="this trainer has used its model already: call it before fit"):
        runner.find_learning_rate(DATA)


def test_a_finder_from_other_weights_than_the_fit_is_refused(monkeypatch):
    monkeypatch.setattr("distributed.checkpoints.manifest.check_source", lambda source: None)
    with pytest.raises(ConfigError, match=r"='there' gives fit\(\) other weights"):
        trainer(resume_from_checkpoint="there").find_learning_rate(DATA)


def test_what_cannot_be_copied_is_asked_for_as_a_function():
    model = torch.nn.Linear(2, 2)
    model.kept = model(torch.ones(1, 2))  # no leaf of the graph
    with pytest.raises(ConfigError, match=r"cannot be copied for the finder \(Only Tensors created explicitly"):
        Trainer(model, device="cpu").find_learning_rate(DATA)


@pytest.mark.parametrize(("max_steps", "epoch"), [(1, 1), (3, 1), (4, 2), (None, 2)])
def test_the_end_of_a_run_names_the_epoch_that_its_last_row_and_the_bar_name(tmp_path, capsys, max_steps, epoch):
    history = trainer(epochs=2, max_steps=max_steps, log_every_n_steps=1).fit(DATA, DATA)
    lines = capsys.readouterr().out.splitlines()
    (end,) = [line for line in lines if line.startswith("finished at step")]
    assert f"step {history.steps}, epoch {epoch}, in" in end
    assert history.rows[-1]["epoch"] == epoch
    assert [line for line in lines if line.startswith("step ")][-1].split("  ")[1] == f"epoch {epoch}/2"
    assert [line for line in lines if line.startswith("epoch ")][-1].startswith(f"epoch {epoch}/2")
    events = [json.loads(line) for line in Path(history.run_dir, "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "finished" and events[-1]["epoch"] == epoch


def test_the_final_metrics_are_the_last_row(tmp_path):
    class Stop(Callback):
        def on_step_end(self, state, result):
            if state.step == 1:
                (early,) = [json.loads(path.read_text()) for path in tmp_path.rglob("result.json")]
                seen.append(early["final_metrics"])

    seen = []
    history = trainer(None, Stop(), log_every_n_steps=2, epochs=2).fit(DATA, DATA)
    assert seen == [{}]  # nothing is known yet
    assert only_result(tmp_path)["final_metrics"] == history.rows[-1]
    assert len(history.rows) == 2 and history.rows[-1]["loss"] > 0


def test_an_error_gives_the_terminal_back_and_is_in_the_result(tmp_path):
    calls = []

    def fail(model):
        calls.append(1)
        if len(calls) == 5:
            raise ValueError("no such\npicture")

    runner = trainer(fail, log_every_n_steps=1, epochs=3)
    with terminal() as screen, pytest.raises(ValueError, match="no such"):
        runner.fit(DATA)

    hidden, shown = "\x1b[?25l", "\x1b[?25h"
    assert screen.getvalue().rfind(shown) > screen.getvalue().rfind(hidden) > 0
    result = only_result(tmp_path)
    assert (result["status"], result["error"]) == ("failed", "ValueError: no such picture")
    assert (result["steps"], result["epochs"]) == (4, 1)
    assert result["checkpoint"] == "checkpoints/step-00000003"
    assert result["best_metrics"]["loss"] > 0


def test_a_run_that_goes_on_is_not_called_finished(tmp_path):
    class Look(Callback):
        def on_step_end(self, state, result):
            seen.append(only_result(tmp_path)["status"])

    seen = []
    runner = trainer(None, Look())
    runner.fit(DATA)
    assert only_result(tmp_path)["status"] == "finished"
    runner.fit(DATA)

    assert set(seen) == {"running"} and len(seen) == 6
    assert only_result(tmp_path)["status"] == "finished" and only_result(tmp_path)["steps"] == 6


def test_a_nan_is_a_failed_run(tmp_path):
    def spoil(model):
        with torch.no_grad():
            model.weight.fill_(float("nan"))

    with pytest.raises(Exception, match="loss is nan"):
        trainer(spoil).fit(DATA)

    assert only_result(tmp_path)["status"] == "failed"
    assert only_result(tmp_path)["error"].startswith("step 1: the loss is nan")


def test_quiet_is_quiet(tmp_path):
    with terminal() as screen:
        trainer(verbose=False).fit(DATA)

    assert screen.getvalue() == ""
    assert only_result(tmp_path)["status"] == "finished"


@pytest.mark.parametrize("verb", ["evaluate", "predict"])
def test_loaders_are_closed_after_an_error(verb):
    closed = []

    def fail(*_):
        raise ValueError("broken")

    runner = trainer()
    runner.fit(DATA)
    shard = runner.backend.shard

    def watched(*args, **kwargs):
        data = shard(*args, **kwargs)
        close = data.close
        data.close = lambda: closed.append(close())
        return data

    runner.backend.shard = watched
    runner.backend.eval_step = runner.backend.predict_step = fail
    with pytest.raises(ValueError, match="broken"):
        getattr(runner, verb)(DATA)
    assert len(closed) == 1


def test_predictions_come_in_the_order_of_the_data_set_or_of_a_sampler_of_the_users():
    runner = trainer()
    expected = runner.predict(DATA)
    assert torch.equal(expected, runner.model(DATA.tensors[0]).detach())
    assert torch.equal(runner.predict(DataLoader(DATA, batch_size=5, shuffle=True)), expected)
    backwards = DataLoader(DATA, batch_size=5, sampler=range(11, -1, -1))
    assert torch.equal(runner.predict(backwards), expected.flip(0))


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda runner, data: runner.fit(data), "train_data"),
        (lambda runner, data: runner.fit(data, DATA), "train_data"),
        (lambda runner, data: runner.fit(DATA, data), "val_data"),
        (lambda runner, data: runner.evaluate(data), r"evaluate\(data\)"),
        (lambda runner, data: runner.predict(data), r"predict\(data\)"),
    ],
)
def test_arrays_are_refused_as_data_in_every_position_and_the_argument_is_named(call, argument):
    inputs, targets = DATA.tensors
    pair = r"TensorDataset\(inputs, targets\)"
    for columns in ([inputs, targets], [inputs, inputs], (inputs, targets), {"x": inputs, "y": targets}):
        with pytest.raises(
            ConfigError, match=rf"\A{argument}: a {type(columns).__name__} of .* is not a data set.*{pair}"
        ):
            call(trainer(), columns)
    if argument.startswith("predict"):
        return
    for array, word in ((inputs, "a tensor"), (inputs.numpy(), "an array")):
        with pytest.raises(ConfigError, match=rf"\A{argument}: {word} is not a data set: give {pair}, or DataLoader\("):
            call(trainer(), array)


def test_inputs_and_targets_as_two_arguments_of_fit_are_refused():
    with pytest.raises(ConfigError, match=r"got two arrays: write fit\(x=inputs, y=targets\)"):
        trainer().fit(*DATA.tensors)


@pytest.mark.parametrize("call", ["fit", "evaluate", "predict"])
def test_float64_data_comes_with_one_line_that_helps(call):
    double = TensorDataset(DATA.tensors[0].double(), DATA.tensors[1])
    with pytest.raises(RuntimeError, match="must have the same dtype") as caught:
        getattr(trainer(), call)(double)
    (note,) = caught.value.__notes__
    assert note.startswith("hint: the data is float64, NumPy's default, and the model is float32: convert the data")
    assert ".float()" in note and "dtype='float64'" in note
    reports = []
    _failed(caught.value, reports.append)
    assert reports[0]["traceback"].splitlines()[-1] == note and reports[0]["traceback"].count("hint:") == 1
    getattr(trainer(dtype="float64"), call)(double)


def test_predict_takes_inputs_alone():
    runner, inputs = trainer(), DATA.tensors[0]
    expected = runner.predict(DATA)
    for data in (inputs, inputs.numpy(), TensorDataset(inputs), DataLoader(inputs)):
        assert torch.equal(runner.predict(data), expected)


def test_a_fit_on_inputs_alone_says_what_the_outputs_are_compared_with(capsys):
    inputs = DATA.tensors[0]
    for loader, loss in ((DataLoader(inputs), None), (DataLoader(TensorDataset(inputs)), torch.nn.functional.mse_loss)):
        Trainer(torch.nn.Linear(2, 2), loss_fn=loss, batch_size=4, device="cpu").fit(loader)
        assert capsys.readouterr().out.count("the data has no targets: outputs are compared with the inputs") == 1


@pytest.mark.parametrize(("world_size", "is_told"), [(1, False), (2, True)])
def test_restarts_that_begin_anew_are_told_where_several_processes_were_started_by_hand(world_size, is_told):
    files = object.__new__(TrainerFiles)
    files._run, files._handover = object(), None
    files._context = WorkerContext(0, world_size, 0, world_size, 0, "cpu")
    files._worker = WorkerEnvironment(0, 0, world_size, world_size, 0, "localhost", 29500, 0, "environment")
    assert [line.startswith("restarts by this launcher begin at step 0") for line in files.notices()] == [
        True
    ] * is_told


def test_another_trainer_has_a_directory_of_its_own(tmp_path):
    first, second = trainer(), trainer()
    runs = [each.fit(DATA).run_dir for each in (first, second, first)]

    assert re.fullmatch(r"runs/train-\d{8}-\d{6}-[0-9a-f]{4}", runs[0])
    assert runs == [runs[0], f"{runs[0]}/fit-2", runs[0]]
    assert set(results(tmp_path)) == {runs[0].removeprefix("runs/"), "fit-2"}


def test_trainers_that_are_gone_hold_no_locks(tmp_path):
    """All but the first, whose directory belongs to this process."""
    for _ in range(4):
        trainer(checkpoint_dir=str(tmp_path / "own")).fit(DATA)
    gc.collect()

    locks = sorted(tmp_path.rglob(".lock"))
    assert len(locks) == 8
    held = [path for path in locks if RunDirectory(path.parent).holder()]
    assert [path.parent for path in held] == [tmp_path / "own", *tmp_path.glob("runs/train-*")]
    assert all(RunDirectory(path.parent).live_holder() == "" for path in set(locks) - set(held))


def test_a_misspelt_monitor_is_told_after_the_first_update_and_an_error_after_the_first_epoch(capsys):
    """A training_step may report it later: it is no error before it can be known."""

    def count(model):
        counts.append(model.training)
        told.append("val_los" in capsys.readouterr().err)

    counts, told = [], []
    with pytest.raises(ConfigError, match=r"'val_los' is not reported \(did you mean 'val_loss'\?\)"):
        trainer(count, monitor="val_los", monitor_mode="min", epochs=5).fit(DATA, DATA)
    # One update and one batch of validation, as that may have metrics of its own; then the rest of the epoch.
    assert counts == [True, False, True, True, False, False, False]
    assert told == [False, False, True, False, False, False, False]


def test_a_metric_that_the_step_reports_now_and_then_is_a_monitor(capsys):
    """Not in the first update, and in the evaluation of the first of three epochs only."""

    def training_step(model, batch):
        calls.append(model.training)
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "f1": loss * 0 + 0.5} if len(calls) == 6 else loss

    calls = []
    plateau = functools.partial(torch.optim.lr_scheduler.ReduceLROnPlateau, mode="max")
    runner = Trainer(
        torch.nn.Linear(2, 2), training_step=training_step, monitor="val_f1", monitor_mode="max", epochs=3, batch_size=4,
        device="cpu", scheduler=plateau, callbacks=[EarlyStopping("val_f1", 1, "max")],
    )  # fmt: skip
    history = runner.fit(DATA, DATA)
    assert [row.get("val_f1") for row in history.rows] == [0.5, None, None]
    assert history.stop_reason is None
    said = capsys.readouterr()
    assert said.err.count("monitor='val_f1' is not reported by the first update") == 1
    assert "it reports val_loss, loss" in said.err and "after the first epoch" in said.err


def test_a_monitor_of_validation_that_no_data_is_given_for_can_never_come():
    runner = trainer(None, EarlyStopping("val_f1", mode="max"), epochs=9)
    with pytest.raises(ConfigError, match="'val_f1' is not reported: choose one of loss"):
        runner.fit(DATA)
    assert runner.backend.update.step == 1


def test_the_look_at_a_batch_of_validation_counts_for_nothing_else(monkeypatch):
    """Mixed targets in training: only the validation has an accuracy."""
    votes, starts = [], []
    ask, begin = checking.judge, loading.MapData.epoch
    monkeypatch.setattr(checking, "judge", lambda *args: votes.append(args[3]) or ask(*args))
    monkeypatch.setattr(
        loading.MapData, "epoch", lambda data, *args: starts.append(data._source.name) or begin(data, *args)
    )
    mixed = TensorDataset(DATA.tensors[0], torch.nn.functional.one_hot(DATA.tensors[1]).float())
    runner = Trainer(
        torch.nn.Linear(2, 2), metrics={"sure": lambda o, t: o.softmax(1).amax(1).mean()}, batch_size=4, epochs=1, device="cpu",
        loss_fn=torch.nn.functional.cross_entropy, monitor="val_accuracy", monitor_mode="max",
    )  # fmt: skip
    history = runner.fit(mixed, DATA)
    assert "val_accuracy" in history.rows[0] and "accuracy" not in history.rows[0]
    assert votes == [12, 12]  # all samples of the epoch, and of the evaluation
    assert starts.count("val_data") == 1  # whose loader starts its workers once


def test_a_monitor_that_only_the_evaluation_reports_is_seen():
    def training_step(model, batch):
        loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss} if model.training else {"loss": loss, "f1": loss * 0 + 0.5}

    settings = {"device": "cpu", "epochs": 1, "batch_size": 4, "monitor_mode": "max"}
    model = torch.nn.Linear(2, 2)
    history = Trainer(model, training_step=training_step, monitor="val_f1", **settings).fit(DATA, DATA)
    assert history.best_metrics["val_f1"] == 0.5
    with pytest.raises(ConfigError, match=r"'val_f2' is not reported .*val_f1.*: choose one of loss, .*val_f1"):
        Trainer(model, training_step=training_step, monitor="val_f2", **settings).fit(DATA, DATA)


def test_a_monitor_that_no_argument_gives_is_refused_before_anything_runs(tmp_path):
    calls = []

    def f1(outputs, targets):
        calls.append(1)
        return (outputs.argmax(1) == targets).float().mean()

    settings = {"device": "cpu", "epochs": 2, "batch_size": 4, "monitor_mode": "max", "metrics": {"f1": f1}}
    for processes in (1, 2):  # in this process, and before workers start
        runner = Trainer(torch.nn.Linear(2, 2), monitor="val_auc", nproc_per_node=processes, **settings)
        with pytest.raises(
            ConfigError, match=r"'val_auc' is not reported.*: choose one of val_loss, val_accuracy, val_f1, loss"
        ):
            runner.fit(DATA, DATA)
    assert calls == []
    for name in ("val_f1", "val_accuracy", "f1", "accuracy"):
        Trainer(torch.nn.Linear(2, 2), monitor=name, **settings).fit(DATA, DATA)


def test_accuracy_is_no_monitor_where_targets_are_no_classes():
    data = TensorDataset(DATA.tensors[0], DATA.tensors[0])
    runner = Trainer(
        torch.nn.Linear(2, 2), monitor="val_accuracy", monitor_mode="max", device="cpu", epochs=9, batch_size=4
    )
    with pytest.raises(
        ConfigError, match="'val_accuracy' is not reported: choose one of val_loss, loss, learning_rate"
    ):
        runner.fit(data, data)
    assert runner.backend.update.step == 1


def test_the_monitor_of_a_callback_is_checked_too():
    settings = {"device": "cpu", "batch_size": 4, "epochs": 9, "callbacks": [EarlyStopping("val_f1", mode="max")]}
    runner = Trainer(torch.nn.Linear(2, 2), **settings)
    with pytest.raises(ConfigError, match="'val_f1' is not reported"):
        runner.fit(DATA, DATA)
    assert runner.backend.update.step == 1
    runner = Trainer(torch.nn.Linear(2, 2), training_step=step_of_loss, **settings)
    with pytest.raises(ConfigError, match="'val_f1' is not reported"):
        runner.fit(DATA, DATA)
    assert runner.backend.update.step == 3  # a training_step could have reported it until then


class Running:
    """A function, as it has neither `compute` nor `reset`."""

    def __call__(self, outputs, targets):
        return outputs.mean()

    def update(self, outputs, targets):
        pass


def test_a_function_with_an_update_of_its_own_gives_one_value():
    runner = Trainer(
        torch.nn.Linear(2, 2), metrics={"running": Running()}, monitor="val_running_f1", monitor_mode="max", device="cpu", epochs=2,
        batch_size=4,
    )  # fmt: skip
    with pytest.raises(ConfigError, match="'val_running_f1' is not reported"):
        runner.fit(DATA, DATA)
    assert runner.backend.update.step == 1


def test_every_fit_in_this_process_leaves_a_report(tmp_path):
    trainer(log_every_n_steps=1).fit(DATA)
    trainer(log_every_n_steps=1).fit(DATA)
    with pytest.raises(ZeroDivisionError):
        trainer(None, FailsLate(), log_every_n_steps=1).fit(DATA)

    found = {path.parent.name: path.read_text() for path in tmp_path.rglob("report.html")}
    assert len(found) == 3 and {"fit-2", "fit-3"} < found.keys()
    assert "ZeroDivisionError" in found["fit-3"] and ">failed<" in found["fit-3"]
    assert ">finished<" in found["fit-2"]


class FailsLate(Callback):
    def on_train_end(self, state):
        raise ZeroDivisionError


class StopsAtStart(Callback):
    def on_train_start(self, state):
        self.context.stop("no more")


class StopsInStep2(Callback):
    def on_step_end(self, state, result):
        self.seen = self.context
        if state.step == 2:
            self.context.stop("the loss is low enough")


def test_a_run_that_a_callback_stops_is_finished_and_says_why(tmp_path, capsys):
    callback = StopsInStep2()
    fitted = trainer(None, callback, epochs=9)
    history = fitted.fit(DATA, DATA)

    assert (history.steps, history.stop_reason) == (2, "the loss is low enough")
    result = results(tmp_path)[Path(history.run_dir).name]
    assert (result["status"], result["stop_reason"]) == ("finished", "the loss is low enough")
    assert result["checkpoint"] == "checkpoints/step-00000002" and history.rows[-1]["val_loss"] > 0
    assert "stopped (the loss is low enough) at step 2" in capsys.readouterr().out
    assert callback.seen.model is fitted.model and callback.seen.config.epochs == 9
    assert callback.seen.run_dir == Path(history.run_dir).absolute()
    assert callback.seen.optimizer.param_groups[0]["params"][0] is fitted.model.weight
    with pytest.raises(ConfigError, match=r"StopsInStep2.context is only available while fit"):
        _ = callback.context
    assert fitted.fit(DATA, DATA, epochs=1).steps > 2  # a further fit goes on


def test_settings_are_merged_again_only_for_a_fit_that_is_given_some(monkeypatch):
    merges = []
    monkeypatch.setattr("distributed.training.setup.merge", lambda *layers: merges.append(layers) or merge(*layers))
    fitted = trainer(None, epochs=2)
    at_start = fitted.merged
    assert fitted.fit(DATA).steps == 6 and len(merges) == 1 and fitted.merged == at_start
    assert fitted.fit(DATA, epochs=1).steps == 9 and len(merges) == 2
    assert fitted.merged.source("epochs") == "code" and at_start.config.epochs == 2


class DiesInStep3(Callback):
    def on_step_end(self, state, result):
        if state.step == 3:
            raise ZeroDivisionError


def attempt(run_dir, restart_count, *callbacks, **settings):
    """Fit as a worker does in this attempt of a launch with --resume."""
    _Taken.first, _Taken.count = None, 0
    runner = trainer(None, *callbacks, epochs=2, **settings)
    runner.setup.handover = Handover(Overrides(), str(run_dir), resume=run_dir.exists(), restart_count=restart_count)
    runner.setup.restart_count = restart_count
    session = runner._fits.open_session()
    try:
        return runner.fit(DATA)
    finally:
        session.files._run.unlock()


def test_a_restart_stays_stopped_where_this_launch_stopped_and_goes_on_where_an_earlier_one_did(tmp_path):
    attempt(tmp_path / "run", 0, StopsInStep2())
    assert attempt(tmp_path / "run", 1).stop_reason == "the loss is low enough"  # of what this launch has stopped
    with pytest.raises(ZeroDivisionError):
        attempt(tmp_path / "run", 0, DiesInStep3())  # --resume, and no checkpoint since
    with pytest.raises(ZeroDivisionError):
        attempt(tmp_path / "run", 1, DiesInStep3())
    shutil.copytree(tmp_path / "run", tmp_path / "stopped-again")
    history = attempt(tmp_path / "run", 2)
    assert (history.steps, history.stop_reason) == (6, None)
    # A run that stops again at the very step is stopped by this launch.
    attempt(tmp_path / "stopped-again", 0, StopsAtStart())
    assert attempt(tmp_path / "stopped-again", 1).stop_reason == "no more"


def test_a_restart_goes_on_from_a_checkpoint_of_another_run_that_was_stopped(tmp_path):
    attempt(tmp_path / "run", 0, StopsInStep2())
    assert attempt(tmp_path / "other", 1, resume_from_checkpoint=str(tmp_path / "run")).steps == 6


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_fp16_on_a_cpu_is_said_to_be_slow_and_bf16_is_named(kind, capsys):
    trainer(mixed_precision=kind, max_steps=1).fit(DATA)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "mixed precision" in line)
    slow = "mixed precision fp16 on cpu, where it is many times slower than float32: set mixed_precision='bf16'"
    assert line == {"fp16": slow, "bf16": "mixed precision bf16 on cpu"}[kind]


def test_a_fit_that_ctrl_c_ended_says_how_to_go_on_in_a_line_that_can_be_copied(tmp_path):
    class Interrupt(Callback):
        def on_step_end(self, state, result):
            if state.step == 2:
                signal.raise_signal(signal.SIGINT)

    with terminal() as screen, pytest.raises(KeyboardInterrupt):
        trainer(None, Interrupt(), epochs=9).fit(DATA)
    shown = re.search(
        r"^to continue it:\n  Trainer\(..., resume_from_checkpoint='(.*)'\)$", screen.getvalue(), re.MULTILINE
    )
    again = trainer(epochs=1, resume_from_checkpoint=shown[1])
    assert again.fit(DATA).steps == 3


def test_a_trainer_and_a_history_are_one_useful_line():
    runner = trainer(epochs=2)
    assert repr(runner) == "Trainer(Linear, backend='single', 1 process on cpu, not trained)"
    history = runner.fit(DATA, DATA)
    assert repr(runner) == "Trainer(Linear, backend='single', 1 process on cpu, trained to step 6)"
    best = f"best val_loss {history.best_metrics['val_loss']:.4g}"
    start = f"History(2 epochs, 6 steps, in {history.total_time:.1f} s, {best}"
    assert repr(history).startswith(start) and repr(history).endswith(f", run_dir='{history.run_dir}')")
    assert "\n" not in repr(history) and len(repr(history)) < 200
    assert repr(trainer(max_steps=1).fit(DATA)).startswith("History(1 epoch, 1 step, in ")
    cut = dataclasses.replace(history, stop_reason="early_stopping", best_metrics={}, run_dir=None)
    assert repr(cut) == f"History(2 epochs, 6 steps, in {history.total_time:.1f} s, stop_reason='early_stopping')"


def test_a_trainer_with_a_factory_is_named_after_it():
    def make_model():
        return torch.nn.Linear(2, 2)

    assert repr(Trainer(make_model, device="cpu", nproc_per_node=2)) == (
        "Trainer(make_model, backend='pytorch-ddp', 2 processes on cpu, not trained)"
    )


def test_a_second_fit_of_a_resumed_trainer_does_not_say_that_it_starts_anew(capsys):
    settings = {"device": "cpu", "batch_size": 4}
    history = Trainer(torch.nn.Linear(2, 2), epochs=1, **settings).fit(DATA)
    runner = Trainer(torch.nn.Linear(2, 2), epochs=2, resume_from_checkpoint=str(history.run_dir), **settings)
    runner.fit(DATA)
    assert "resumed from" in "".join(capsys.readouterr())
    runner.fit(DATA, epochs=3)
    assert "nothing to resume from" not in "".join(capsys.readouterr())


def test_a_fit_that_resumes_from_the_checkpoint_of_a_later_one_says_so(capsys):
    """A restart runs a script with two fits again from its beginning."""
    settings = {"backend": "single", "batch_size": 4, "epochs": 1}
    trainer = Trainer(torch.nn.Linear(2, 2), **settings)
    trainer.fit(DATA)
    history = trainer.fit(DATA)
    again = Trainer(torch.nn.Linear(2, 2), resume_from_checkpoint=str(history.run_dir), **settings)
    capsys.readouterr()
    again.fit(DATA)
    said = "".join(capsys.readouterr())
    assert "this is fit 1 of the trainer, and the checkpoint is from fit 2" in said
    assert "nothing is left to do" not in said
    again.fit(DATA)
    assert "the checkpoint is from" not in "".join(capsys.readouterr())
