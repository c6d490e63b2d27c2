"""The loop above a backend without a framework: cursor, logging, saving, stopping."""

from __future__ import annotations

import copy
import dataclasses
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distributed.callbacks import Callback, EarlyStopping
from distributed.callbacks.of_fit import bound
from distributed.checkpoints.store import CheckpointStore
from distributed.config.merging import Overrides, merge
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.errors import ConfigError, TrainingError
from distributed.loggers.files import MetricsFile
from distributed.state import TrainState, WorkerContext
from distributed.testing import FakeBackend, FakeData, FakeOptions
from distributed.training.common_step import CommonStep
from distributed.training.loop import Run
from distributed.training.loop import fit as fit_loop
from distributed.training.so_far import means_of_epoch
from distributed.training.validation import Validation, evaluate
from tests.unit.contexts import a_context
from tests.unit.test_common_step import Store

BATCH = BatchPlan(2, 2, 1, 4)


class Recorder(Callback):
    def __init__(self):
        self.hooks, self.logs, self.rows, self.checkpoints = [], [], [], []

    def on_train_start(self, state):
        self.hooks.append("start")

    def on_step_end(self, state, result):
        self.hooks.append(f"step {state.step}")

    def on_log(self, state, split, metrics):
        self.logs.append((state.step, split, dict(metrics)))

    def on_epoch_end(self, state, metrics):
        self.hooks.append(f"epoch {state.epoch}")
        self.rows.append(dict(metrics))

    def on_train_end(self, state):
        self.hooks.append("end")


def make(samples=10, state=None, callbacks=(), val=None, saved=None, shuffle=True, **settings):
    merged = merge(Overrides(), {"epochs": 2, **settings})
    backend = FakeBackend(merged, FakeOptions(), ProcessPlan(1, 1, "cpu", "fake"))
    backend.setup()
    common = CommonStep(0, 1, None, "test")
    state = state or TrainState()
    sets = val if isinstance(val, dict) else {"val_": val}
    validation = None if val is None else Validation(sets)
    run = Run(
        backend,
        merged.config,
        FakeData(samples, BATCH, shuffle=shuffle),
        validation,
        state,
        common,
        list(callbacks),
        lambda: None,
    )
    run.write_checkpoint = lambda: saved is None or saved.append(copy.deepcopy(state)) is None
    return run


def fit(run):
    write = run.write_checkpoint

    def written():  # as the session does it
        is_written = write()
        for callback in run.callbacks:
            callback.on_checkpoint(run.state, Path("/runs/one"))
        return is_written

    run.write_checkpoint = written
    with bound(run.callbacks, a_context(run.stop, run.config, log=run.backend.logged.log)):
        fit_loop(run)


def timeless(row):
    return {name: value for name, value in row.items() if name != "samples_per_second"}


class Stops(Callback):
    """Asks to stop in `hook`, at `step`."""

    def __init__(self, hook, step, reason="enough"):
        def stop(state, *rest):
            if state.step == step:
                self.context.stop(reason)

        setattr(self, hook, stop)


class StopsAtStep(Callback):
    def __init__(self, step):
        self.step = step

    def on_step_end(self, state, result):
        if state.step == self.step:
            self.context.stop("enough")


STOPPED = {  # hook -> where it asks, and (step, epochs finished, rows) at the end: five updates an epoch
    "on_train_start": (0, 0, 0, 0),
    "on_log": (2, 2, 0, 1),
    "on_times": (3, 3, 0, 1),
    "on_checkpoint": (4, 4, 0, 1),
    "on_epoch_end": (5, 5, 1, 1),
}


@pytest.mark.parametrize("hook", STOPPED)
def test_a_callback_ends_training_from_any_hook(hook):
    at, steps, epochs, rows = STOPPED[hook]
    saved = []
    run = make(
        samples=20,
        callbacks=[Stops(hook, at)],
        saved=saved,
        val=FakeData(3, BATCH),
        log_every_n_steps=1,
        checkpoint_every_n_steps=4,
    )
    fit(run)
    state = run.state
    assert (state.step, state.epoch, len(state.rows), state.stop_reason) == (steps, epochs, rows, "enough")
    assert all("val_loss" in row for row in state.rows)  # what is cut off is validated, as with max_steps
    assert (saved[-1].step, saved[-1].stop_reason) == (steps, "enough")


def test_a_stop_in_on_train_end_is_told_to_have_no_effect():
    run = make(samples=20, callbacks=[Stops("on_train_end", 10)], val=FakeData(3, BATCH))
    told = []
    run.backend.configure(on_event=told.append)
    fit(run)
    assert [event["kind"] for event in told] == ["warning"]
    assert told[0]["text"].startswith("stop('enough') in on_train_end has no effect: training has ended")
    assert run.state.stop_reason is None and run.common_step.reasons == []


def test_a_stop_at_the_end_of_a_step_holds_for_the_next_one_and_in_validation_lets_the_epoch_finish():
    for step, epochs in ((2, 0), (5, 1)):
        saved = []
        run = make(
            samples=20, callbacks=[StopsAtStep(step)], saved=saved, val=FakeData(20, BATCH), log_every_n_steps=100
        )
        fit(run)
        assert (run.state.step, run.state.epoch, run.state.stop_reason) == (step, epochs, "enough")
        assert len(run.state.rows) == 1 and saved[-1].stop_reason == "enough"


def test_a_stop_goes_before_max_steps():
    run = make(samples=20, callbacks=[Stops("on_log", 3)], log_every_n_steps=1, max_steps=3)
    fit(run)
    assert (run.state.step, run.state.stop_reason) == (3, "enough")


def test_a_signal_after_a_stop_ends_the_validation_too():
    class Both(StopsAtStep):
        def on_step_end(self, state, result):
            super().on_step_end(state, result)
            run.common_step.request("signal 15")

    run = make(
        samples=20,
        callbacks=[Both(5)],
        val=FakeData(20, BATCH),
        log_every_n_steps=100,
        state=TrainState(step=4, samples_in_epoch=16),
    )
    fit(run)
    assert (run.state.step, run.state.epoch, run.state.stop_reason) == (5, 0, "signal 15")


@pytest.mark.parametrize("reason", ["", "signal 15", "max_steps", None, 3])
def test_a_reason_that_says_nothing_or_something_else_is_refused(reason):
    with pytest.raises(ConfigError, match="stop"):
        fit(make(callbacks=[Stops("on_log", 1, reason)], log_every_n_steps=1))


def test_one_rank_alone_stops_all_at_the_same_step():
    """Two ranks in threads, with a backend whose reduce and gather are theirs."""
    for hook, at, steps in (("on_epoch_end", 5, 5), ("on_log", 2, 2), ("on_train_start", 0, 0)):
        ended, asked = stop_on_rank_1(Stops(hook, at))
        assert ended == [(steps, "enough")] * 2, hook
        assert len(set(asked)) == 1, "both ranks must have called the same collectives"
    ended, _ = stop_on_rank_1(StopsAtStep(2), pause_s=0.002, epochs=10**6)  # met by the watcher, some steps later
    assert ended[0] == ended[1] and ended[0][0] >= 2 and ended[0][1] == "enough"


def stop_on_rank_1(callback, pause_s=0.0, **settings):
    store, barrier, parts = Store(), threading.Barrier(2, timeout=20), [None, None]

    def rank_of(rank):
        run = make(samples=20, callbacks=[callback] if rank else [], **{"log_every_n_steps": 1, **settings})
        world = run.backend.world
        world.context = WorkerContext(rank, 2, rank, 2, 0, "cpu")
        run.common_step = CommonStep(rank, 2, store, "fit", poll_s=0.01)
        called = []

        def gather(value):
            called.append(sorted(value) if isinstance(value, dict) else "gather")
            parts[rank] = value
            barrier.wait()
            both = list(parts)
            barrier.wait()
            return both

        def train_step(group, step=run.backend.train_step):
            time.sleep(pause_s)
            barrier.wait()
            return step(group)

        run.backend.train_step, world.gather = train_step, gather
        world.reduce = lambda sums: {name: sum(each[name] for each in gather(dict(sums))) for name in sums}
        try:
            fit(run)
        finally:
            run.common_step.close()
        return (run.state.step, run.state.stop_reason), str(called)

    with ThreadPoolExecutor(2) as pool:
        ended = list(pool.map(rank_of, range(2)))
    return [end for end, _ in ended], [called for _, called in ended]


def test_hooks_come_in_order_and_the_last_step_is_saved():
    recorder, saved = Recorder(), []
    run = make(callbacks=[recorder], saved=saved, checkpoint_frequency=None)
    fit(run)
    assert recorder.hooks == [
        "start",
        "step 1",
        "step 2",
        "step 3",
        "epoch 1",
        "step 4",
        "step 5",
        "step 6",
        "epoch 2",
        "end",
    ]
    assert [state.step for state in saved] == [6]


def test_an_epoch_starts_before_its_first_update_and_where_a_run_resumes_inside_it():
    class Starts(Callback):
        def __init__(self):
            self.starts = []

        def on_epoch_start(self, state):
            self.starts.append((state.epoch, state.samples_in_epoch))

    whole, cut = Starts(), Starts()
    fit(make(callbacks=[whole]))
    run = make(callbacks=[cut], max_steps=2, epochs=1)
    fit(run)
    fit(make(callbacks=[cut], state=dataclasses.replace(run.state, stop_reason=None)))
    assert whole.starts == [(0, 0), (1, 0)]
    assert cut.starts == [(0, 0), (0, 8), (1, 0)]


def test_no_epoch_starts_after_the_last_update():
    class Starts(Callback):
        starts = 0

        def on_epoch_start(self, state):
            self.starts += 1

    callback = Starts()
    fit(make(callbacks=[callback], max_steps=3))  # the updates of one epoch
    assert callback.starts == 1


def test_the_means_of_an_epoch_can_be_read_after_each_update_and_change_nothing():
    class Reads(Callback):
        def __init__(self):
            self.run, self.means, self.at_ends = None, [], []

        def on_step_end(self, state, result):
            self.means.append(means_of_epoch(self.run)["loss"])

        def on_epoch_end(self, state, metrics):
            self.at_ends.append((means_of_epoch(self.run)["loss"], metrics["loss"]))

        def on_train_end(self, state):
            assert means_of_epoch(self.run) == {}

    plain, reads, recorder = Recorder(), Reads(), Recorder()
    fit(make(callbacks=[plain], epochs=1, shuffle=False, log_every_n_steps=2))
    reads.run = run = make(callbacks=[reads, recorder], epochs=1, shuffle=False, log_every_n_steps=2)
    fit(run)
    assert reads.means == [sum(range(4)) / 4, sum(range(8)) / 8, sum(range(10)) / 10]
    assert reads.at_ends == [(sum(range(10)) / 10,) * 2]
    assert [row["loss"] for row in recorder.rows] == [row["loss"] for row in plain.rows]
    assert [log[2]["loss"] for log in recorder.logs] == [log[2]["loss"] for log in plain.logs]


def test_the_mean_of_an_epoch_weighs_the_short_last_batch_right():
    recorder = Recorder()
    fit(make(callbacks=[recorder], epochs=1, log_every_n_steps=1))
    assert recorder.rows[0]["loss"] == pytest.approx(sum(range(10)) / 10)
    assert [step for step, split, _ in recorder.logs] == [1, 2, 3]


@pytest.mark.parametrize("every", [1, 2, 4])
def test_every_saved_state_leads_to_the_same_end(every):
    reference = make(epochs=3)
    fit(reference)
    saved = []
    fit(make(epochs=3, saved=saved, checkpoint_every_n_steps=every))
    for state in saved:
        again = make(epochs=3, state=copy.deepcopy(state))
        again.last_saved = (state.step, state.epoch)
        fit(again)
        assert again.state.step == reference.state.step == 9
        rows = [[row["loss"] for row in run.state.rows] for run in (again, reference)]
        assert rows[0] == pytest.approx(rows[1])
        assert again.backend.seen == reference.backend.seen[state.samples_seen :]


def test_max_steps_ends_in_the_middle_of_an_epoch_and_saves_there():
    saved = []
    run = make(max_steps=5, saved=saved)
    fit(run)
    assert (run.state.step, run.state.epoch, run.state.samples_in_epoch) == (5, 1, 8)
    assert run.state.stop_reason == "max_steps" and saved[-1].step == 5


def test_what_max_steps_cut_off_is_measured_and_its_row_stands_until_the_epoch_is_finished():
    recorder, saved = Recorder(), []
    run = make(max_steps=5, saved=saved, val=FakeData(3, BATCH), callbacks=[recorder], checkpoint_every_n_steps=5)
    fit(run)
    assert [(row["epoch"], row["step"]) for row in run.state.rows] == [(1, 3), (2, 5)]
    assert run.state.rows[1]["val_loss"] == run.state.best["val_loss"] == pytest.approx(1.0)
    assert [state.step for state in saved] == [3, 5] and saved[-1].rows == run.state.rows
    assert run.backend.calls.count("step_schedule") == 1 and recorder.hooks[-2:] == ["step 5", "end"]

    again = make(state=copy.deepcopy(saved[-1]), val=FakeData(3, BATCH))
    again.state.stop_reason = None
    whole = make(val=FakeData(3, BATCH))
    fit(again)
    fit(whole)
    assert [timeless(row) for row in again.state.rows] == [timeless(row) for row in whole.state.rows]
    assert timeless(again.state.best) == timeless(whole.state.best)


def test_a_signal_in_the_validation_of_what_max_steps_cut_off_ends_it():
    class Ask(Callback):
        def on_step_end(self, state, result):
            if state.step == 5:
                run.common_step.request("signal 15")

    saved = []
    run = make(max_steps=5, saved=saved, val=FakeData(20, BATCH), callbacks=[Ask()])
    fit(run)
    assert run.state.stop_reason == "signal 15" and len(run.state.rows) == 1 and saved[-1].step == 5


def test_max_steps_at_the_end_of_an_epoch_still_validates():
    run = make(max_steps=3, val=FakeData(3, BATCH))
    fit(run)
    assert run.state.rows[0]["val_loss"] == pytest.approx(1.0) and run.state.epoch == 1


def test_checkpoints_by_epochs_and_by_steps():
    saved = []
    fit(make(epochs=4, checkpoint_frequency=2, saved=saved))
    assert [(state.step, state.epoch) for state in saved] == [(6, 2), (12, 4)]
    saved = []
    fit(make(epochs=2, checkpoint_frequency=None, checkpoint_every_n_steps=4, saved=saved))
    assert [(state.step, state.epoch) for state in saved] == [(4, 1), (6, 2)]


def test_an_epoch_that_ends_where_a_save_is_due_is_saved_once_and_with_its_metrics():
    saved = []
    fit(make(epochs=2, checkpoint_every_n_steps=3, saved=saved, val=FakeData(3, BATCH)))
    assert [(state.step, state.epoch, len(state.rows)) for state in saved] == [(3, 1, 1), (6, 2, 2)]
    saved.clear()
    fit(make(epochs=2, checkpoint_frequency=None, checkpoint_every_n_steps=3, saved=saved))
    assert [(state.step, state.epoch) for state in saved] == [(3, 1), (6, 2)]


def test_a_misspelt_monitor_is_an_error_after_the_first_update():
    run = make(val=FakeData(3, BATCH), monitor="val_los")
    with pytest.raises(ConfigError, match="did you mean 'val_loss'"):
        fit(run)
    assert run.state.step == 1


def test_a_request_to_stop_is_done_before_the_next_step_and_saved():
    class Ask(Callback):
        def on_step_end(self, state, result):
            if state.step == 2:
                run.common_step.request("signal 15")

    saved = []
    run = make(callbacks=[Ask()], saved=saved)
    fit(run)
    assert run.state.step == 2 and run.state.stop_reason == "signal 15" and saved[-1].step == 2


def test_a_request_to_stop_in_validation_leaves_the_epoch_unfinished():
    class Ask(Callback):
        def on_log(self, state, split, metrics):
            run.common_step.request("signal 15")

    run = make(callbacks=[Ask()], val=FakeData(20, BATCH), log_every_n_steps=100)
    fit(run)
    assert (run.state.step, run.state.epoch, run.state.samples_in_epoch) == (3, 0, 10)
    again = make(state=run.state, val=FakeData(20, BATCH))
    again.state.stop_reason = None
    fit(again)
    assert [row["epoch"] for row in again.state.rows] == [1, 2] and again.state.step == 6


def test_a_request_to_save_saves_and_goes_on():
    class Ask(Callback):
        def on_step_end(self, state, result):
            if state.step in (1, 4):
                run.common_step.request("save")

    saved = []
    run = make(callbacks=[Ask()], saved=saved, checkpoint_frequency=None)
    fit(run)
    assert [state.step for state in saved] == [1, 4, 6]


def test_early_stopping_stops_after_its_patience_and_remembers_over_a_resume():
    stopping = EarlyStopping("val_loss", patience=2)
    saved = []
    run = make(epochs=10, callbacks=[stopping], val=FakeData(3, BATCH), saved=saved)
    fit(run)
    assert run.state.epoch == 3 and run.state.stop_reason == "early_stopping"
    other = EarlyStopping("val_loss", patience=2)
    other.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    assert (other.best, other.bad_epochs) == (stopping.best, 2)


def test_early_stopping_on_an_unknown_metric_lists_the_reported_ones():
    with pytest.raises(ConfigError, match=r"val_f1.*val_loss"):
        fit(make(callbacks=[EarlyStopping("val_f1")], val=FakeData(3, BATCH)))


def test_evaluation_sees_each_sample_once():
    run = make()
    assert evaluate(run.backend, FakeData(1001, BATCH)) == {"loss": pytest.approx(500.0)}


def test_metrics_of_a_killed_attempt_are_written_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    saved = []
    fit(
        make(
            epochs=3,
            saved=saved,
            callbacks=[MetricsFile(path)],
            log_every_n_steps=1,
            checkpoint_every_n_steps=4,
            checkpoint_frequency=None,
        )
    )
    clean = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text(path.read_text() + '{"step": 99, "epo')  # killed in the middle of a line
    fit(make(epochs=3, state=saved[0], callbacks=[MetricsFile(path)], log_every_n_steps=1))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["step"], row["split"], row["loss"]) for row in rows] == [
        (row["step"], row["split"], row["loss"]) for row in clean
    ]


@pytest.mark.parametrize(
    "saves",
    [
        {"epochs": 1, "samples": 16, "checkpoint_every_n_steps": 2},
        {"epochs": 2, "samples": 8, "checkpoint_frequency": 1},
    ],
    ids=["within an epoch", "between two"],
)
def test_times_say_what_waiting_for_data_and_saving_took(monkeypatch, saves):
    """By a clock that only they move: data 1 s, a step 3 s, a save 8 s."""
    now = [0.0]
    monkeypatch.setattr("time.perf_counter", lambda: now[0])

    def passing(seconds, call):
        def passed(*args):
            now[0] += seconds
            return call(*args)

        return passed

    class Times(Callback):
        def __init__(self):
            self.rows = []

        def on_times(self, state, seconds):
            self.rows.append((state.step, seconds))

    watch = Times()
    run = make(callbacks=[watch], log_every_n_steps=2, **saves)
    run.backend.train_step = passing(3.0, run.backend.train_step)
    run.write_checkpoint = passing(8.0, lambda: True)
    groups = run.train.epoch

    def slow(*args):
        for group in groups(*args):
            now[0] += 1.0
            yield group

    run.train.epoch = slow
    fit(run)
    even = {
        "step_s": 4.0,
        "data_s": 1.0,
        "compute_s": 3.0,
        "communication_s": 0.0,
        "checkpoint_s": 0.0,
        "rank_0_s": 4.0,
    }
    assert watch.rows == [(2, even), (4, {**even, "step_s": 8.0, "checkpoint_s": 4.0})]


def test_a_store_gives_back_what_the_loop_saved(tmp_path):
    run = make(epochs=2)
    context = run.backend.world.context
    store = CheckpointStore(
        tmp_path,
        run.backend,
        keep_latest_k=2,
        keep_best=True,
        monitor="loss",
        monitor_mode="min",
        context=context,
        on_event=print,
    )
    run.write_checkpoint = lambda: store.save(run.state, {}, run.state.metrics.get("loss"))
    fit(run)
    other = make()
    again = CheckpointStore(
        tmp_path,
        other.backend,
        keep_latest_k=2,
        keep_best=True,
        monitor="loss",
        monitor_mode="min",
        context=context,
        on_event=print,
    )
    _, state = again.resume(again.find())
    assert dataclasses.asdict(state) == dataclasses.asdict(run.state) and other.backend.weight == run.backend.weight


def test_a_last_checkpoint_that_was_deleted_is_saved_again():
    saved = []
    run = make(samples=8, epochs=1, saved=saved, checkpoint_every_n_steps=2)
    run.is_checkpoint_lost = lambda: True
    fit(run)
    assert [state.step for state in saved] == [2, 2]


def test_a_last_checkpoint_that_cannot_be_written_is_tried_again_and_then_an_error():
    tries = []
    run = make(epochs=2)
    run.write_checkpoint = lambda: tries.append(run.state.step) is not None  # the disk refuses each
    with pytest.raises(TrainingError, match="step 6"):
        fit(run)
    assert tries == [3, 6, 6]
