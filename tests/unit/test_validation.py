"""Validation when it is due: by updates, by the clock, at the start, on several sets, on a part of a set."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, SequentialSampler, Subset, TensorDataset

from distributed import Callback, Trainer, load_weights
from distributed.backends._torch.schedule import Schedule
from distributed.callbacks import EarlyStopping
from distributed.checkpoints.state_file import from_json
from distributed.config.merging import Overrides, merge
from distributed.errors import ConfigError
from distributed.metrics.monitor import check_monitor
from distributed.state import Job, StepResult, TrainState
from distributed.testing import FakeData
from distributed.training.loop import Run
from distributed.training.trial import Trial, inside
from distributed.training.validation import sets_of
from distributed.tuning.results import rows_of
from distributed.tuning.sweep import progress_of
from tests import event_files
from tests.unit.ranks import groups_of_ranks, plan, samples_used
from tests.unit.test_loading import Numbers
from tests.unit.test_loading_streams import Sized, Stream
from tests.unit.test_loop import BATCH, fit, make, timeless

PER_EPOCH = 5  # updates of 18 samples


class Hooks(Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_log(self, state: TrainState, split: str, metrics: Any) -> None:
        if split == "val":
            self.seen.append(("log", state.step, sorted(metrics)))

    def on_validation_start(self, state: TrainState) -> None:
        self.seen.append(("start", state.step))

    def on_validation_end(self, state: TrainState, metrics: Any) -> None:
        self.seen.append(("end", state.step, metrics.get("step")))

    def on_epoch_end(self, state: TrainState, metrics: Any) -> None:
        self.seen.append(("epoch", state.epoch, "val_loss" in metrics))

    @property
    def validated(self) -> list[int]:
        return [each[1] for each in self.seen if each[0] == "end" and each[2] is not None]


def a_run(losses: dict[int, float] | None = None, **given: Any) -> Run:
    """Return a run of two epochs with five updates each. `losses` are the losses of validation by step; the rest is 1 / step."""
    run: Run = make(**{"samples": 18, "val": FakeData(3, BATCH), "log_every_n_steps": 100, **given})

    def eval_step(micro: Any) -> StepResult:
        loss = (losses or {}).get(run.state.step, 1 / (run.state.step + 1))
        return StepResult([("loss", loss * micro.num_samples, 1.0, micro.num_samples)], micro.num_samples)

    run.backend.eval_step = eval_step  # type: ignore[method-assign]
    return run


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [5, 10]),
        ({"validate_every_n_steps": 4}, [4, 8, 10]),
        ({"validate_every_n_steps": 5}, [5, 10]),
        ({"validate_every_n_steps": 7}, [7, 10]),
        ({"validate_every_n_steps": 99}, [10]),
        ({"validate_every_n_steps": 4, "max_steps": 6}, [4, 6]),
        ({"validate_every_n_steps": 4, "max_steps": 8}, [4, 8]),
        ({"validate_every_n_steps": 4, "max_steps": 5}, [4, 5]),
        ({"validate_every_n_steps": 4, "validate_at_start": True}, [0, 4, 8, 10]),
        ({"validate_at_start": True}, [0, 5, 10]),
    ],
)
def test_validations_are_at_their_steps_and_at_the_end_and_each_has_a_row(
    settings: dict[str, Any], steps: list[int]
) -> None:
    hooks = Hooks()
    run = a_run(callbacks=[hooks], **settings)
    fit(run)
    assert hooks.validated == steps == [row["step"] for row in run.state.rows]
    assert [row["epoch"] for row in run.state.rows] == [-(-step // PER_EPOCH) for step in steps]
    assert all(row["val_loss"] == pytest.approx(1 / (row["step"] + 1)) for row in run.state.rows)
    assert all(("loss" in row) == (row["step"] > 0) for row in run.state.rows)
    ends = [each for each in hooks.seen if each[0] == "epoch"]
    is_by_steps = "validate_every_n_steps" in settings
    assert [each[2] for each in ends[: (run.state.epoch) - 1]] == [not is_by_steps] * (run.state.epoch - 1)


def test_a_row_has_the_means_of_its_epoch_so_far() -> None:
    run = a_run(validate_every_n_steps=2, shuffle=False)
    fit(run)
    losses = {2: numpy.mean(range(8)), 4: numpy.mean(range(16)), 6: numpy.mean(range(4)), 10: numpy.mean(range(18))}
    assert {row["step"]: row["loss"] for row in run.state.rows if row["step"] in losses} == pytest.approx(losses)


@pytest.mark.parametrize("cut", range(1, 10))
def test_a_run_that_was_cut_off_anywhere_goes_on_with_the_same_rows(cut: int) -> None:
    settings = {"validate_every_n_steps": 3}
    whole_stopping, stopping, again_stopping = (EarlyStopping("val_loss", patience=2) for _ in range(3))
    losses = {3: 0.5, 6: 0.6, 9: 0.4, 10: 9.0}
    losses.setdefault(cut, 0.9)
    whole = a_run(losses, callbacks=[whole_stopping], **settings)
    fit(whole)
    first = a_run(losses, max_steps=cut, callbacks=[stopping], **settings)
    fit(first)
    assert first.state.rows[-1]["step"] == cut and first.state.is_last_row_open == (cut % 3 > 0)
    state = from_json(dataclasses.asdict(first.state))
    state.stop_reason = None
    again_stopping.load_state_dict(stopping.state_dict())
    again = a_run(losses, state=state, callbacks=[again_stopping], **settings)
    fit(again)
    assert [timeless(row) for row in again.state.rows] == [timeless(row) for row in whole.state.rows]
    assert timeless(again.state.best) == timeless(whole.state.best)
    assert again_stopping.state_dict() == whole_stopping.state_dict()
    assert whole_stopping.best == pytest.approx(0.4) and whole_stopping.bad_epochs == 0


def test_a_finished_run_that_is_resumed_with_nothing_left_measures_its_last_row_again() -> None:
    for settings, rows in (({"validate_every_n_steps": 4}, [4, 8, 10]), ({"validate_every_n_steps": 5}, [5, 10])):
        run = a_run(**settings)
        fit(run)
        hooks = Hooks()
        again = a_run(state=from_json(dataclasses.asdict(run.state)), callbacks=[hooks], **settings)
        fit(again)
        assert [row["step"] for row in again.state.rows] == rows
        assert hooks.validated == (
            [10] if settings["validate_every_n_steps"] == 4 else []
        )  # its line of metrics.jsonl was cut


def test_a_checkpoint_of_an_older_version_says_by_its_epochs_whether_its_last_row_stays() -> None:
    rows = [{"epoch": 1, "step": 5}, {"epoch": 2, "step": 7}]
    content = {"epoch": 1, "step": 7, "samples_in_epoch": 8, "rows": rows}
    assert from_json(content).is_last_row_open
    assert not from_json({**content, "rows": rows[:1]}).is_last_row_open


def test_the_clock_asks_for_a_validation_which_nothing_else_repeats() -> None:
    class Ask(Hooks):
        def on_step_end(self, state: TrainState, result: StepResult) -> None:
            if state.step in (2, 4):
                run.common_step.request("validate")

    hooks = Ask()
    run = a_run(callbacks=[hooks], validate_every_s=1e6, validate_every_n_steps=4)
    fit(run)
    assert hooks.validated == [2, 4, 8, 10] and run.validated.is_set()


def test_a_validation_with_a_better_monitor_saves() -> None:
    losses = {2: 0.5, 4: 0.7, 6: 0.4, 8: 0.45, 10: 0.3}
    saved: list[TrainState] = []
    fit(a_run(losses, saved=saved, validate_every_n_steps=2, checkpoint_frequency=None))
    assert [(state.step, state.rows[-1]["step"]) for state in saved] == [(2, 2), (6, 6), (10, 10)]
    saved.clear()
    fit(a_run(losses, saved=saved, validate_every_n_steps=2, checkpoint_frequency=None, keep_best=False))
    assert [state.step for state in saved] == [10]
    saved.clear()
    fit(a_run(losses, saved=saved, validate_every_n_steps=2, checkpoint_frequency=None, checkpoint_every_n_steps=2))
    assert [state.step for state in saved] == [2, 4, 6, 8, 10]


def test_patience_counts_validations_and_not_the_one_at_the_end() -> None:
    losses = {1: 0.5, 2: 0.6, 3: 0.7, 4: 0.8}
    stopping = EarlyStopping("val_loss", patience=3)
    run = a_run(losses, callbacks=[stopping], validate_every_n_steps=1)
    fit(run)
    assert (run.state.step, run.state.stop_reason) == (4, "early_stopping")
    stopping = EarlyStopping("val_loss", patience=2)
    run = a_run({4: 0.5, 8: 0.6, 10: 0.7}, callbacks=[stopping], validate_every_n_steps=4)
    fit(run)
    assert run.state.stop_reason is None and stopping.bad_epochs == 1
    by_training = EarlyStopping("loss", patience=1)
    run = a_run(callbacks=[by_training], validate_every_n_steps=1, epochs=9, monitor="loss")
    fit(run)
    assert run.state.epoch == 2 and run.state.stop_reason == "early_stopping"  # the mean of the samples never changes


def test_a_schedule_that_watches_a_metric_follows_the_validations_and_one_that_counts_epochs_the_epochs() -> None:
    def calls(**settings: Any) -> list[tuple[int, bool, bool]]:
        run = a_run(**settings)
        seen: list[tuple[int, bool, bool]] = []
        run.backend.step_schedule = lambda metrics, *, is_epoch_end: seen.append(  # type: ignore[method-assign]
            (run.state.step, metrics is not None and "val_loss" in metrics, is_epoch_end)
        )
        fit(run)
        return seen

    assert calls() == [(5, True, True), (10, True, True)]
    by_steps = calls(validate_every_n_steps=4)
    assert by_steps == [(4, True, False), (5, False, True), (8, True, False), (10, False, True)]
    assert calls(validate_at_start=True) == calls()


def test_schedules_step_where_they_are_asked_to() -> None:
    def rates(make_schedule: Any, *points: tuple[Any, bool]) -> list[float]:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
        merged = merge(Overrides(), {"scheduler_interval": "epoch"})
        schedule = Schedule(make_schedule(optimizer), optimizer, merged)
        optimizer.step()
        found = []
        for metrics, is_epoch_end in points:
            schedule.step_outside(metrics, is_epoch_end=is_epoch_end)
            found.append(float(optimizer.param_groups[0]["lr"]))
        return found

    worse = [({"val_loss": 1.0}, False), (None, True), ({"val_loss": 2.0}, False), ({"val_loss": 2.0}, False)]
    assert rates(lambda o: ReduceLROnPlateau(o, factor=0.5, patience=0), *worse) == [1.0, 1.0, 0.5, 0.25]
    assert rates(lambda o: StepLR(o, 1, gamma=0.5), *worse) == [1.0, 0.5, 0.5, 0.5]


def test_a_signal_in_a_validation_ends_it_with_empty_metrics_and_it_is_due_again_after_a_resume() -> None:
    class Stop(Hooks):
        def on_validation_start(self, state: TrainState) -> None:
            super().on_validation_start(state)
            if state.step == 4:
                run.common_step.request("signal 15")

    hooks = Stop()
    saved: list[TrainState] = []
    run = a_run(callbacks=[hooks], saved=saved, validate_every_n_steps=4)
    fit(run)
    assert run.state.stop_reason == "signal 15" and run.state.step == 4 and run.state.rows == []
    assert hooks.seen[-2:] == [("start", 4), ("end", 4, None)] and saved[-1].step == 4
    saved[-1].stop_reason = None
    again = Hooks()
    resumed = a_run(state=saved[-1], callbacks=[again], validate_every_n_steps=4)
    fit(resumed)
    assert again.validated == [4, 8, 10]
    whole = a_run(validate_every_n_steps=4)
    fit(whole)
    assert [timeless(row) for row in resumed.state.rows] == [timeless(row) for row in whole.state.rows]


def test_a_save_that_falls_due_in_a_validation_is_made_after_it() -> None:
    class Ask(Hooks):
        def on_validation_start(self, state: TrainState) -> None:
            super().on_validation_start(state)
            run.common_step.request("save")

        def on_checkpoint(self, state: TrainState, path: Path) -> None:
            self.seen.append(("saved", state.step))

    for settings, point in (({"validate_every_n_steps": 4}, 4), ({}, 5)):
        hooks = Ask()
        run = a_run(callbacks=[hooks], keep_best=False, checkpoint_frequency=None, **settings)
        fit(run)
        kinds = [each[0] for each in hooks.seen if each[1] == point]
        assert kinds.index("saved") > kinds.index("end") > kinds.index("start")


# ------------------------------------------------------------------ in a fit of a real engine

PAIRS = TensorDataset(torch.arange(18.0)[:, None] / 18, torch.arange(18.0)[:, None] / 9)
FIT: dict[str, Any] = {
    "optimizer": "sgd", "learning_rate": 0.1, "loss_fn": torch.nn.functional.mse_loss, "global_batch_size": 4, "shuffle": False,
    "dtype": "float64", "device": "cpu", "verbose": False,
}  # fmt: skip


def line() -> torch.nn.Module:
    model = torch.nn.Linear(1, 1)
    torch.nn.init.constant_(model.weight, 0.5)
    torch.nn.init.constant_(model.bias, 0.0)
    return model


def losses_by_hand(steps: list[int]) -> list[float]:
    """Return the loss over all samples after each of `steps` updates of a plain loop, which never begins a new epoch."""
    model, found = line().double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = (column.double() for column in PAIRS.tensors)
    for step in range(max(steps)):
        batch = torch.arange(4 * step, 4 * step + 4) % len(x)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()
        optimizer.step()
        if step + 1 in steps:
            found.append(torch.nn.functional.mse_loss(model(x), y).item())
    return found


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        while True:
            yield from PAIRS


def test_a_stream_that_never_ends_is_validated_within(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = Trainer(line, **FIT, max_steps=10, validate_every_n_steps=4).fit(Endless(), PAIRS).rows
    assert [row["step"] for row in rows] == [4, 8, 10]
    assert [row["val_loss"] for row in rows] == pytest.approx(losses_by_hand([4, 8, 10]), rel=1e-12)


def test_the_best_of_the_validations_within_an_epoch_is_kept_beside_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first = Trainer(line, **FIT, max_steps=6).fit(Endless())  # the targets of validation are its outputs
    best = line().double()
    load_weights(best, first.run_dir)
    wanted = TensorDataset(PAIRS.tensors[0], best(PAIRS.tensors[0].double()).detach().float())
    settings = {"max_steps": 11, "validate_every_n_steps": 2, "checkpoint_every_n_steps": 1, "keep_latest_k": 1}
    history = Trainer(line, **FIT, **settings).fit(Endless(), wanted)

    assert min(history.rows, key=lambda row: row["val_loss"])["step"] == 6
    kept = sorted(path.name for path in Path(history.run_dir, "checkpoints").glob("step-*"))
    assert kept == ["step-00000006", "step-00000011"]
    loaded = line().double()
    load_weights(loaded, history.run_dir)
    assert torch.equal(loaded.weight, best.weight) and torch.equal(loaded.bias, best.bias)


class Seekable(IterableDataset[Any]):
    """Go on from a position in the epoch of that position, as the streams of `datasets` do, and from the beginning in others."""

    at, start, epoch = 0, (0, 0), 0

    def __iter__(self) -> Any:
        for i in range(self.start[1] if self.start[0] == self.epoch else 0, len(PAIRS)):
            self.at = i + 1
            yield PAIRS[i]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.start = state["epoch"], state["at"]


class Locked(Seekable):
    def __init__(self) -> None:
        self.lock = threading.Lock()


def test_a_stream_with_a_position_may_be_validation_data_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    settings = {**FIT, "epochs": 2, "validate_every_n_steps": 2, "checkpoint_every_n_steps": 1, "keep_latest_k": 20}
    data = Seekable()
    whole = Trainer(line, **settings).fit(data, data)
    plain = Trainer(line, **settings).fit(PAIRS, PAIRS).rows
    assert [row["val_loss"] for row in whole.rows] == [row["val_loss"] for row in plain]
    for step in range(1, whole.steps):
        checkpoint = Path(whole.run_dir, "checkpoints", f"step-{step:08d}")
        data = Seekable()
        trainer = Trainer(line, **settings, resume_from_checkpoint=str(checkpoint))
        resumed = trainer.fit(data, data)
        assert [row["val_loss"] for row in resumed.rows] == [row["val_loss"] for row in whole.rows], step
        assert trainer.evaluate(data) == trainer.evaluate(PAIRS), step


def test_a_stream_that_cannot_be_copied_is_refused_as_validation_data_of_its_own_training(tmp_path: Path) -> None:
    data = Locked()
    with pytest.raises(
        ConfigError, match=r"^val_data is the stream that train_data is, .* pass another object with the same"
    ):
        Trainer(line, **FIT).fit(data, data)


def test_a_trial_reports_its_validations_and_the_hparams_tab_has_the_last_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard")
    monkeypatch.chdir(tmp_path)
    reported: list[Any] = []
    with inside(Trial(tmp_path / "trial", False, reported.append)):
        Trainer(
            line, **FIT, epochs=2, validate_every_n_steps=3, validate_at_start=True, tensorboard=True,
        ).fit(PAIRS, PAIRS)  # fmt: skip
    # Nothing was trained before the first update, so the validation at the start is none of a trial's.
    points = [(3, 1), (6, 2), (9, 3), (10, 4)]
    assert [(row["step"], progress_of(row, 0)) for row in reported] == points
    measured = [json.loads(text) for text in (tmp_path / "trial" / "metrics.jsonl").read_text().splitlines()]
    losses = [row["loss"] for row in measured if row["split"] == "val"]
    assert [row["val_loss"] for row in reported] == losses[1:] and len(set(losses)) == 5
    caught_up = rows_of(tmp_path / "trial")  # what is reported of a script whose reports were lost
    assert [(row["step"], progress_of(row, 0), row["val_loss"]) for row in caught_up] == [
        (*point, loss) for point, loss in zip(points, losses[1:], strict=True)
    ]
    ((_, shown),) = event_files.sessions(tmp_path / "trial").values()
    assert shown["val/loss"] == pytest.approx(losses[-1], rel=1e-6)


# ------------------------------------------------------------------ several sets


def test_each_set_has_its_prefix_and_each_sample_counts_once() -> None:
    hooks = Hooks()
    run = make(
        samples=18, callbacks=[hooks], val={"val_in_": FakeData(3, BATCH), "val_out_": FakeData(5, BATCH)},
        validate_every_n_steps=4, monitor="val_out_loss",
    )  # fmt: skip
    fit(run)
    assert [(row["val_in_loss"], row["val_out_loss"]) for row in run.state.rows] == [(1.0, 2.0)] * 3
    assert ("log", 4, ["in_loss", "out_loss"]) in hooks.seen
    assert run.state.best["val_in_loss"] == 1.0


def test_a_dict_names_the_sets_and_a_dict_of_arrays_is_one_set() -> None:
    data = TensorDataset(torch.zeros(3))
    assert list(sets_of({"in": data, "out-of.domain": data})) == ["val_in_", "val_out-of.domain_"]
    assert list(sets_of(data)) == list(sets_of({"x": numpy.zeros(3), "y": torch.zeros(3)})) == ["val_"]
    assert sets_of(None) == {}
    for wrong, text in (
        ({}, "has no validation set"),
        ({1: data}, "called 1"),
        ({"in domain": data}, "called 'in domain'"),
        ({"in": None}, "val_data['in'] is None"),
        ({"in": data, "out": numpy.zeros(3)}, "val_data['out'] is an array"),
        ({"in": "file.csv"}, "val_data['in'] is 'file.csv'"),
    ):
        with pytest.raises(ConfigError) as error:
            sets_of(wrong)
        assert text in str(error.value)


def test_validation_sets_under_one_name_are_refused_before_training():
    data = TensorDataset(torch.zeros(2, 1), torch.zeros(2, 1))
    for several in ([data, data], [("a", data), ("a", data)], (DataLoader(data), data)):
        with pytest.raises(ConfigError, match=r"of data sets, but each needs a name of its own.*: give a dict"):
            sets_of(several)
    samples = [data[0], data[1]]
    assert sets_of(samples) == {"val_": samples}
    with pytest.raises(ConfigError, match="sets 'a' and 'a_b' both report val_a_b_loss: give one of them another name"):
        sets_of({"a": data, "a_b": data}, ["b_loss"])


COLUMNS = {"inputs": torch.zeros(4, 1), "labels": torch.zeros(4, 1)}
ROWS = [{name: column[i] for name, column in COLUMNS.items()} for i in range(4)]
WITHOUT = [{"inputs": row["inputs"]} for row in ROWS]


@pytest.mark.parametrize(
    ("train", "val", "said"),
    [
        (PAIRS, TensorDataset(PAIRS.tensors[0]), "a sample of val_data has one element, and one of the training data has 2"),
        (
            DataLoader(PAIRS, batch_size=4), {"a": PAIRS, "b": Subset(TensorDataset(PAIRS.tensors[0]), [0])},
            r"a sample of val_data\['b'\] has one element",
        ),
        (ROWS, WITHOUT, "the samples of val_data have no 'labels', and those of the training data have it: add it"),
    ],
)  # fmt: skip
def test_a_validation_set_without_targets_is_refused_before_training(train: Any, val: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Trainer(line, **FIT, **({"monitor": "val_a_loss"} if isinstance(val, dict) else {})).fit(train, val)


def test_a_monitor_that_no_validation_set_with_a_name_can_report_is_refused_before_training() -> None:
    with pytest.raises(
        ConfigError, match=r"monitor='val_loss' is not reported .*: choose one of val_a_loss, val_b_loss"
    ):
        Trainer(line, **FIT, monitor="val_loss").fit(PAIRS, {"a": PAIRS, "b": PAIRS})


def test_a_validation_set_may_have_another_form_with_a_training_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def step(model: Any, batch: Any) -> Any:
        return model(batch[0]).square().mean()

    settings = {name: value for name, value in FIT.items() if name != "loss_fn"}
    row = Trainer(line, **settings, training_step=step, epochs=1).fit(PAIRS, TensorDataset(PAIRS.tensors[0])).rows[-1]
    assert row["val_loss"] > 0


def test_sets_with_names_need_a_monitor_that_one_of_them_reports() -> None:
    job = Job(type("Model", (), {"parameters": None})())

    def check(prefixes: list[str], **settings: Any) -> str:
        try:
            check_monitor(merge(Overrides(), settings), prefixes, job)
        except ConfigError as error:
            return str(error)
        return ""

    named = ["val_in_", "val_out_"]
    assert "set monitor to one of 'val_in_loss', 'val_out_loss'" in check(named)
    assert check(named, monitor="val_in_loss") == check(named, monitor="val_out_accuracy", monitor_mode="max") == ""
    assert check(named, keep_best=False) == "" and "need a monitor" in check(
        named, keep_best=False, early_stopping_patience=1
    )
    assert "did you mean 'val_out_loss'" in check(named, monitor="val_ot_loss")
    assert "monitor_mode='max'" in check(named, monitor="val_in_accuracy")
    job.metrics = {"hard_loss": lambda outputs, targets: 0.0}
    assert "would both report 'val_in_hard_loss'" in check(["val_in_", "val_in_hard_"], monitor="val_in_loss")


@pytest.mark.parametrize(
    "settings",
    [
        {"validate_every_n_steps": 2},
        {"validate_every_s": 5.0},
        {"validate_at_start": True},
        {"max_validation_batches": 1},
    ],
)
def test_settings_of_validation_without_validation_data_are_refused(settings: dict[str, Any]) -> None:
    (name,) = settings
    with pytest.raises(
        ConfigError, match=f"{name}=.* but fit\\(\\) got no validation data: pass val_data, or drop {name}"
    ):
        check_monitor(merge(Overrides(), settings), [])


# ------------------------------------------------------------------ a part of a set


def values(**settings: Any) -> Any:
    """Return the mean of the samples that a validation reads, by `val_data`."""
    name, data = settings.pop("data")
    trainer = Trainer(
        torch.nn.Linear(1, 1), training_step=lambda model, batch: model(batch[0]).sum() * 0 + batch[0].mean(),
        device="cpu", verbose=False, keep_best=False, **settings,
    )  # fmt: skip
    train = TensorDataset(torch.zeros(8, 1))
    return {key: value for key, value in trainer.fit(train, data).rows[-1].items() if key.startswith(name)}


class Rows(Stream):
    def __iter__(self) -> Any:
        for value in super().__iter__():
            yield (torch.full((1,), float(value)),)


def test_a_validation_reads_the_first_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = TensorDataset(torch.arange(20.0)[:, None])
    sampler = BatchSampler(SequentialSampler(data), 6, False)
    forms = {
        "data": (data, 8),  # two batches of the global batch size
        "loader": (DataLoader(data, batch_size=3), 6),
        "long": (DataLoader(data, batch_size=15), 20),
        "items": (DataLoader(data, batch_sampler=Sizes(sampler, [5, 2, 9])), 7),
        "stream": (Rows(20), 8),
    }
    for name, (each, count) in forms.items():
        found = values(data=("val_loss", each), batch_size=4, max_validation_batches=2)
        assert found["val_loss"] == pytest.approx(numpy.mean(range(count))), name


class Sizes(BatchSampler):
    """A batch sampler with items of the given sizes, which no batch size describes."""

    def __init__(self, sampler: Any, sizes: list[int]) -> None:
        super().__init__(sampler.sampler, 6, False)
        self.sizes = sizes

    def __iter__(self) -> Any:
        ends = list(itertools.accumulate(self.sizes))
        return iter([list(range(end - size, end)) for size, end in zip(self.sizes, ends, strict=True)])

    def __len__(self) -> int:
        return len(self.sizes)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("make_data", [lambda: Numbers(20), lambda: Stream(20), lambda: Sized(20)])
def test_every_world_size_reads_the_same_part(world: int, make_data: Any) -> None:
    batch = dataclasses.replace(plan(world), max_samples=7, max_batches=7)
    ranks = groups_of_ranks(make_data(), batch, train=False)
    assert sorted(value for used in samples_used(ranks, torch.Tensor.tolist) for value in used) == list(range(7))
