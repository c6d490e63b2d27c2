"""Trainer.log and FitContext.log: what is reduced over steps and ranks, where it is recorded, and what is refused."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import Callback, ConfigError, Trainer
from distributed.backends.sums import added
from distributed.backends.world import World
from distributed.callbacks.of_fit import bound
from distributed.config.merging import Overrides, merge
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.loggers.base import Recorder
from distributed.loggers.logged import Logged, log
from distributed.state import MAX, StepResult, TrainState, WorkerContext
from distributed.testing import FakeBackend, FakeData, FakeOptions
from distributed.training.common_step import CommonStep
from distributed.training.loop import Run, fit
from distributed.training.validation import add, means_of
from tests.unit.contexts import a_context

SAMPLES = torch.arange(1.0, 11.0).reshape(10, 1)
DATA = TensorDataset(SAMPLES, 2 * SAMPLES)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def rows(run_dir, split="train"):
    lines = (json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def trained(log, data=DATA, val=None, callbacks=(), **settings):
    """The history of a fit whose step calls `log(trainer, x, loss)` and returns the mean of its inputs as `seen`."""

    def step(model, batch):
        x, y = batch
        loss = ((model(x) - y) ** 2).mean()
        log(trainer, x, loss)
        return {"loss": loss, "seen": x.mean()}

    settings = {"epochs": 1, "batch_size": 4, "log_every_n_steps": 2, "seed": 1, "verbose": False, **settings}
    trainer = Trainer(
        lambda: torch.nn.Linear(1, 1),
        training_step=step,
        backend="single",
        device="cpu",
        callbacks=callbacks,
        **settings,
    )
    return trainer, trainer.fit(data, val)


def test_a_mean_weighs_each_value_by_its_samples_as_a_metric_of_the_step_does():
    _, history = trained(lambda trainer, x, loss: trainer.log("logged", x.mean()))  # batches of 4, 4 and 2 samples
    logged = rows(history.run_dir)
    assert [row["step"] for row in logged] == [2, 3]
    assert [row["logged"] for row in logged] == [row["seen"] for row in logged]
    assert history.rows[0]["logged"] == history.rows[0]["seen"] == pytest.approx(5.5)


def test_sums_and_maxima_count_from_one_log_line_to_the_next():
    def log(trainer, x, loss):
        trainer.log("samples", len(x), reduce="sum")
        trainer.log("largest", x.max(), "max")
        trainer.log("largest", -1, "max")  # twice in one step

    _, history = trained(log, shuffle=False)
    assert [(row["samples"], row["largest"]) for row in rows(history.run_dir)] == [(8, 8), (2, 10)]
    assert (history.rows[0]["samples"], history.rows[0]["largest"]) == (10, 10)


def test_a_metric_of_a_step_may_have_any_name():
    sums = {}
    add(sums, {"a|max": [(1.0, 1.0), (3.0, 1.0)], "a|sum": [(4.0, 2.0)]})
    assert means_of(sums) == {"a|max": 2.0, "a|sum": 2.0}


def test_accumulation_does_not_change_what_is_logged():
    whole, parts = (
        trained(lambda trainer, x, loss: trainer.log("logged", x.mean()), shuffle=False, **sizes)[1]
        for sizes in ({"batch_size": 4}, {"batch_size": 2, "gradient_accumulation_steps": 2})
    )
    assert [row["logged"] for row in rows(whole.run_dir)] == [row["logged"] for row in rows(parts.run_dir)]


def test_a_forward_pass_that_is_computed_again_logs_once():
    class Logs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Tanh())

        def forward(self, x):
            log("samples", len(x), reduce="sum")
            return self.inner(x)

    found = []
    for is_recomputed in (False, True):
        trainer = Trainer(
            lambda: torch.nn.Sequential(Logs(), Logs()), backend="single", device="cpu", epochs=1, batch_size=4, verbose=False,
            activation_checkpointing=is_recomputed,
        )  # fmt: skip
        history = trainer.fit(torch.utils.data.TensorDataset(torch.ones(10, 1), torch.ones(10, 1)))
        found.append(history.rows[0]["samples"])
    assert found == [20, 20]


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_forward_that_the_model_itself_recomputes_logs_once_and_gradients_may_log(is_reentrant):
    class Logs(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(1, 1)

        def part(self, x):
            log("samples", len(x), reduce="sum")
            return self.inner(x)

        def forward(self, x):
            outputs = torch.utils.checkpoint.checkpoint(self.part, x.requires_grad_(), use_reentrant=is_reentrant)
            if outputs.requires_grad:
                outputs.register_hook(lambda gradient: log("gradients", 1, reduce="sum"))
            return outputs

    trainer = Trainer(Logs, backend="single", device="cpu", epochs=1, batch_size=4, verbose=False)
    history = trainer.fit(torch.utils.data.TensorDataset(torch.ones(10, 1), torch.ones(10, 1)))
    assert (history.rows[0]["samples"], history.rows[0]["gradients"]) == (10, 3)


def test_a_step_that_validates_logs_a_metric_of_the_validation():
    trainer, history = trained(lambda trainer, x, loss: trainer.log("logged", x.mean()), val=DATA, batch_size=4)
    assert history.rows[0]["val_logged"] == pytest.approx(5.5)
    assert rows(history.run_dir, "val")[0]["logged"] == pytest.approx(5.5)
    assert trainer.evaluate(DATA)["logged"] == pytest.approx(5.5)


class Evaluates(Callback):
    def on_step_end(self, state, result):
        self.context.log("before", state.step)
        if state.step == 1:
            self.found = self.context.evaluate(DATA)


def test_an_evaluation_in_a_hook_keeps_what_the_fit_has_logged():
    evaluates = Evaluates()
    _, history = trained(lambda trainer, x, loss: trainer.log("logged", x.mean()), callbacks=[evaluates])
    assert evaluates.found["logged"] == pytest.approx(5.5)
    logged = rows(history.run_dir)
    assert [(row["before"], row["logged"] == row["seen"]) for row in logged] == [(1.5, True), (3, True)]


def test_a_value_of_a_step_can_be_the_monitor():
    def log(trainer, x, loss):
        trainer.log("logged", x.mean())

    _, history = trained(log, val=DATA, monitor="val_logged", monitor_mode="max", keep_best=True)
    assert history.best_metrics["val_logged"] == pytest.approx(5.5)


def test_logging_changes_no_number_of_training():
    def noted(trainer, x, loss):
        trainer.log("logged", loss)
        trainer.log("most", x.max(), "max")

    one, _ = trained(lambda trainer, x, loss: None, epochs=3)
    other, _ = trained(noted, epochs=3)
    assert torch.equal(one.model.weight, other.model.weight)


class InHooks(Callback):
    def on_train_start(self, state):
        self.context.log("start", 1)

    def on_step_end(self, state, result):
        self.context.log("after", state.step)

    def on_validation_start(self, state):
        self.context.log("before_validation", state.step)

    def on_validation_end(self, state, metrics):
        self.context.log("after_validation", state.step)

    def on_epoch_end(self, state, metrics):
        self.context.log("after_epoch", state.step)

    def on_train_end(self, state):
        self.context.log("end", state.step)


def test_values_of_hooks_are_recorded_at_their_step():
    _, history = trained(lambda *_: None, val=DATA, callbacks=[InHooks()])
    assert [(row["step"], row["after"]) for row in rows(history.run_dir)] == [(2, 1.5), (3, 3)]
    found = [
        {k: v for k, v in row.items() if k not in ("time", "epoch", "split")} for row in rows(history.run_dir, "logged")
    ]
    assert found == [
        {"step": 0, "start": 1},
        {"step": 3, "before_validation": 3, "after_validation": 3, "after_epoch": 3},
        {"step": 3, "end": 3},
    ]
    assert not {"val_before_validation", "val_after"} & history.rows[0].keys()


def test_a_run_that_was_cut_logs_the_same_rows():
    def log(trainer, x, loss):
        trainer.log("seen_again", x.mean())
        trainer.log("samples", len(x), reduce="sum")
        trainer.log("largest", x.max(), reduce="max")

    def logged(run_dir):
        names = ("step", "loss", "seen_again", "samples", "largest", "after")
        return [[row.get(name) for name in names] for row in rows(run_dir)]

    class After(Callback):
        def on_step_end(self, state, result):
            self.context.log("after", state.step)

    _, whole = trained(
        log, epochs=4, log_every_n_steps=4, callbacks=[After()], checkpoint_every_n_steps=1, keep_latest_k=100
    )
    cut = Path(whole.run_dir) / "checkpoints" / "step-00000005"
    _, resumed = trained(log, epochs=4, log_every_n_steps=4, callbacks=[After()], resume_from_checkpoint=str(cut))
    assert [row[0] for row in logged(whole.run_dir)] == [3, 4, 6, 8, 9, 12]
    assert logged(resumed.run_dir) == logged(whole.run_dir)[2:]


# ---------------------------------------------------------------------- several ranks


class Threads(World):
    """A world whose ranks are threads."""

    def __init__(self, rank, parts, barrier):
        self.context = WorkerContext(rank, len(parts), rank, len(parts), 0, "cpu")
        self._parts, self._barrier = parts, barrier

    def gather(self, value):
        self._parts[self.rank] = value
        self._barrier.wait()
        found = list(self._parts)
        self._barrier.wait()
        return found

    def reduce(self, sums):
        parts = self.gather(dict(sums))
        return {name: sum(part[name] for part in parts) for name in sums}

    def broadcast(self, value, src=0):
        return self.gather(value)[src]

    def barrier(self):
        self.gather(None)

    def key_value_store(self):
        return None


class OnThreads(FakeBackend):
    def collect(self, results):
        sums = {}
        for index, result in enumerate(results):
            for name, value, scale, count in result.averages:
                array = sums.setdefault(name, numpy.zeros((len(results), 2)))
                array[index] += (value * scale, count)
        return added(self.world.gather(sums))


class Kept(Recorder):
    def __init__(self, log):
        self.lines, self.values, self.media, self._log = [], [], [], log

    def on_step_end(self, state, result):
        self._log(self.context, state, "step")

    def on_epoch_end(self, state, metrics):
        self._log(self.context, state, "epoch")

    def on_log(self, state, split, metrics):
        self.lines.append((state.step, dict(metrics)))

    def record_values(self, state, values):
        self.values.append((state.step, dict(values)))

    def record_media(self, state, media):
        self.media.append(media)


def on_ranks(num_ranks, log, **settings):
    """Values that each rank kept of a fit of 4 steps in which its hooks call `log(rank, context, state, hook)`."""
    parts, barrier = [None] * num_ranks, threading.Barrier(num_ranks, timeout=20)

    def work(rank):
        merged = merge(Overrides(), {"epochs": 1, "log_every_n_steps": 2, **settings})
        backend = OnThreads(merged, FakeOptions(), ProcessPlan(1, 1, "cpu", "fake"))
        backend.world = Threads(rank, parts, barrier)
        backend.context = backend.world.context
        backend.logged.begin(rank, (), takes_media=True)
        plan = BatchPlan(2, 1, num_ranks, 2 * num_ranks)
        kept = Kept(lambda *given: log(rank, *given))
        run = Run(
            backend, merged.config, FakeData(8 * num_ranks, plan, rank), None, TrainState(), CommonStep(0, 1, None, "t"),
            [kept], lambda: True,
        )  # fmt: skip
        with bound([kept], a_context(run.stop, merged.config, log=backend.logged.log)):
            fit(run)
        return kept

    with ThreadPoolExecutor(num_ranks) as pool:
        return [each.result(timeout=30) for each in [pool.submit(work, rank) for rank in range(num_ranks)]]


def test_values_are_reduced_over_all_ranks():
    def log(rank, context, state, hook):
        if hook == "step":
            context.log("mean", 10 * rank + state.step)
            context.log("sum", rank + 1, reduce="sum")
            context.log("max", -rank - state.step, reduce="max")

    kept = on_ranks(3, log)
    found = [[{name: line[name] for name in ("mean", "sum", "max")} for _, line in each.lines] for each in kept]
    assert found == [[{"mean": 11.5, "sum": 12, "max": -1}, {"mean": 13.5, "sum": 12, "max": -3}]] * 3


def test_a_value_that_only_some_ranks_log_is_reduced_over_these():
    def log(rank, context, state, hook):
        if rank == 1 and state.step in (2, 4):
            context.log(f"in_{hook}", state.step)
            context.log(f"most_in_{hook}", state.step, reduce="max")

    for each in on_ranks(2, log):
        lines = [{name: value for name, value in line.items() if "in_" in name} for _, line in each.lines]
        assert lines == [{"in_step": 2, "most_in_step": 2}, {"in_step": 4, "most_in_step": 4}]
        assert each.values == [(4, {"in_epoch": 4, "most_in_epoch": 4})]


def test_each_rank_can_keep_its_own_value():
    def log(rank, context, state, hook):
        context.log("own", rank + state.step, on_every_rank=True)

    for each in on_ranks(2, log):
        assert [(line["own/rank_0"], line["own/rank_1"]) for _, line in each.lines] == [(1.5, 2.5), (3.5, 4.5)]
        assert each.values == [(4, {"own/rank_0": 4, "own/rank_1": 5})]


# ---------------------------------------------------------------------- values


def summed(log):
    logged, result, sums = Logged(), StepResult([("loss", 1.0, 1.0, 1.0)]), {}
    logged.begin(0, ["accuracy"])
    log(logged)
    logged.attach(result)
    for name, value, scale, count in result.averages:
        add(sums, {name: [(float(value) * scale, count)]})
    return means_of(sums)


def test_a_tensor_is_read_as_it_is_when_it_is_logged():
    def log(logged):
        count = torch.tensor([1.0], requires_grad=True)
        logged.log("count", count)
        with torch.no_grad():
            count += 1

    assert summed(log)["count"] == 1


def test_a_rank_that_repeats_a_sample_logs_nothing():
    def log(logged):
        logged.log("seen", 1, reduce="sum")
        logged.weigh(0)
        logged.log("seen", 1, reduce="sum")

    assert summed(log)["seen"] == 1


def test_the_largest_of_values_with_nan_is_nan():
    def log(logged):
        for value in (1.0, math.nan, 2.0):
            logged.log("most", value, reduce="max")

    assert math.isnan(summed(log)["most"])
    nan = added([{f"a{MAX}1": numpy.array([[math.nan, 1.0]])}, {f"a{MAX}1": numpy.array([[2.0, 1.0]])}])
    assert math.isnan(nan[f"a{MAX}1"][0][0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("loss", 1), "cannot be called 'loss'"),
        (("accuracy", 1), "a name that a metric of the trainer uses"),
        (("val_usage", 1), "a name that a metric of the trainer uses"),
        (("", 1), "needs a name in words"),
        ((3, 1), "needs a name in words"),
        (("a\x1fb", 1), "needs a name in words"),
        (("usage", 1, "avg"), "is not a way to reduce: choose one of mean, sum, max"),
        (("usage", 1, "means"), "did you mean 'mean'"),
        (
            ("usage", torch.ones(2, 3)),
            r"a Tensor of shape \[2, 3\], not a number: pass value.mean\(\), or distributed.loggers.Image",
        ),
        (
            ("usage", "some words"),
            r"a str 'some words', not a number: pass a number, or distributed.loggers.Text\(value\)",
        ),
        (("usage", "high"), "a str 'high', not a number"),
        (("usage", None), "a NoneType None, not a number"),
        (("usage", torch.ones((), dtype=torch.complex64)), "not a number"),
    ],
)
def test_what_cannot_be_logged_is_refused_where_it_is_logged(arguments, message):
    logged = Logged()
    logged.begin(0, ["accuracy"])
    with pytest.raises(ConfigError, match=message):
        logged.log(*arguments)


def test_a_compiled_step_is_refused():
    logged = Logged()
    with logged.refusing("runs in a step that is compiled"), pytest.raises(ConfigError, match="runs in a step that is"):
        logged.log("usage", 1)
    logged.log("usage", 1)  # in a hook after it


def test_two_reductions_of_one_name_are_refused():
    logged = Logged()
    logged.log("usage", 1)
    with pytest.raises(ConfigError, match="was called with reduce='mean' before"):
        logged.log("usage", 1, reduce="max")


def test_the_name_of_a_metric_of_the_same_step_is_refused():
    with pytest.raises(ConfigError, match=r"'seen', \.\.\.\) has the name of a metric of the same step"):
        trained(lambda trainer, x, loss: trainer.log("seen", loss))


def test_log_outside_of_a_fit_says_where_to_call_it():
    trainer, _ = trained(lambda *_: None)
    with pytest.raises(ConfigError, match=r"only works while fit\(\) or evaluate\(\) runs"):
        trainer.log("late", 1)
