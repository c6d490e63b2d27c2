"""Trainer(loggers=[...]): names, objects, what they get, in which order, and what happens if one fails."""

from __future__ import annotations

import csv
import json
import threading
import types
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from distributed import Callback, ConfigError, DistributedConfig, Logger, ResourceError, Trainer
from distributed.callbacks import EarlyStopping
from distributed.cli.__main__ import run
from distributed.loggers import delivery, logged, plugins
from distributed.loggers.csv_file import CsvFile
from distributed.loggers.delivery import Courier, Delivered
from distributed.loggers.files import MetricsFile
from distributed.loggers.logger import LoggedRun
from distributed.loggers.spool import Spool
from distributed.runs.directory import RunDirectory
from distributed.state import LoggedMedia, TrainState
from tests.conftest import poll

DATA = TensorDataset(torch.arange(32.0).reshape(16, 2) / 32, torch.arange(16) % 3)


@pytest.fixture(autouse=True)
def in_a_directory_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def trained(loggers, val=DATA, callbacks=(), **settings):
    settings = {"epochs": 1, "batch_size": 4, "log_every_n_steps": 2, "verbose": False, **settings}
    trainer = Trainer(
        lambda: torch.nn.Linear(2, 3), backend="single", device="cpu", loggers=loggers, callbacks=callbacks, **settings
    )
    return Path(trainer.fit(DATA, val).run_dir)


def rows(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def table(run_dir):
    with (run_dir / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


class Kept(Logger):
    """Keeps its calls."""

    def __init__(self):
        self.calls, self.threads = [], set()

    def open(self, run):
        self.run = run
        self.calls.append("open")
        self.threads.add(threading.current_thread())

    def log_metrics(self, step, metrics):
        self.calls.append((step, dict(metrics)))
        self.threads.add(threading.current_thread())

    def close(self, status):
        self.calls.append(status)
        self.threads.add(threading.current_thread())


# ---------------------------------------------------------------------- names


def test_names_switch_loggers_on():
    run_dir = trained(["csv", "tensorboard"])
    assert (run_dir / "metrics.csv").exists() and any((run_dir / "tensorboard").iterdir())
    assert "loggers: csv,tensorboard" in (run_dir / "config.yaml").read_text()
    assert not (trained(()) / "metrics.csv").exists()


def test_a_configuration_takes_names_in_each_form():
    assert DistributedConfig(loggers=["csv", "tensorboard"]).logger_names == ("csv", "tensorboard")
    assert DistributedConfig(loggers="csv, csv").logger_names == ("csv",)
    assert DistributedConfig().logger_names == ()


@pytest.mark.parametrize(
    ("loggers", "settings", "message"),
    [
        (["tensorbord"], {}, "loggers='tensorbord' is not a logger .did you mean 'tensorboard'"),
        ([Logger], {}, r"loggers has the class Logger instead of an object of it: pass Logger\(\)"),
        ([3], {}, "logger 3 is not a name or a distributed.Logger"),
        ([Callback()], {}, "is not a name or a distributed.Logger"),
        (Kept(), {}, "loggers is a Kept: pass a list"),
        (["tensorboard"], {"tensorboard": False}, "tensorboard=False switches it off"),
        (["mlflow"], {"mlflow_tracking": False}, "mlflow_tracking=False switches it off"),
    ],
)
def test_what_is_no_logger_is_refused_before_training(loggers, settings, message):
    with pytest.raises(ConfigError, match=message):
        trained(loggers, **settings)
    assert not Path("runs").exists()


def test_the_command_line_refuses_a_name_before_anything_starts(tmp_path):
    (tmp_path / "train.py").write_text("")
    with pytest.raises(ConfigError, match="loggers='tensorbord' is not a logger"):
        run(["train", "--script", "train.py", "--loggers", "csv,tensorbord", "--nproc-per-node", "1"])


def test_an_installed_package_registers_a_logger(monkeypatch):
    Path("kept_logger.py").write_text("from distributed import Logger\nclass Kept(Logger):\n    pass\n")
    Path("kept_logger-1.0.dist-info").mkdir()  # as pip installs it
    Path("kept_logger-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: kept-logger\nVersion: 1.0\n")
    Path("kept_logger-1.0.dist-info/entry_points.txt").write_text(f"[{plugins.GROUP}]\nkept = kept_logger:Kept\n")
    monkeypatch.syspath_prepend(Path.cwd())
    run_dir = trained("kept")
    delivered = json.loads((run_dir / "loggers" / "kept.json").read_text())["delivered"]
    assert delivered == (run_dir / "loggers" / "kept.jsonl").stat().st_size > 0


def test_a_logger_without_its_library_is_refused_before_training():
    class Lacking(Logger):
        def check(self):
            raise ResourceError("loggers=lacking needs lacking, which is not installed: run pip install lacking")

    with pytest.raises(ResourceError, match="run pip install lacking"):
        trained([Lacking()])
    assert not Path("runs").exists()


# ---------------------------------------------------------------------- CSV


def test_the_table_has_every_row_under_one_header():
    run_dir = trained("csv", epochs=2)
    found, wanted = table(run_dir), rows(run_dir)
    assert [int(row["step"]) for row in found] == [row["step"] for row in wanted] == [2, 4, 4, 6, 8, 8]
    for row, other in zip(found, wanted, strict=True):
        name = "val_loss" if other["split"] == "val" else "loss"
        assert float(row[name]) == other["loss"] and float(row["time"]) == other["time"]


def test_a_column_that_appears_late_is_in_the_header():
    class Late(Callback):
        def on_step_end(self, state, result):
            if state.step == 5:
                self.context.log("late", 7)

    run_dir = trained("csv", epochs=2, callbacks=[Late()])
    assert [row["late"] for row in table(run_dir)] == ["", "", "", "7.0", "", ""]


def test_a_resumed_table_has_each_row_once(tmp_path):
    def log(steps, state):
        files = [MetricsFile(tmp_path / "metrics.jsonl"), CsvFile(tmp_path / "metrics.jsonl")]
        for file in files:
            file.on_train_start(state)
        for state.step in steps:
            for file in files:
                file.on_log(state, "train", {"loss": 1 / state.step})
        for file in files:
            file.on_error(state, KeyError())

    log([1, 2, 3], TrainState())
    log([3, 4], TrainState(step=2))
    assert [row["step"] for row in table(tmp_path)] == ["1", "2", "3", "4"]


# ---------------------------------------------------------------------- objects


def test_a_logger_gets_every_row_in_order_in_one_thread():
    kept = Kept()
    run_dir = trained([kept], learning_rate=0.25)
    assert kept.calls[0] == "open" and kept.calls[-1] == "finished"
    assert kept.run.hyperparameters["learning_rate"] == 0.25 and kept.run.run_dir == run_dir.absolute()
    losses = [(step, values["loss"]) for step, values in kept.calls[1:-1] if "loss" in values]
    assert losses == [(row["step"], row["loss"]) for row in rows(run_dir) if row["split"] == "train"]
    validated = [(step, values["val_loss"]) for step, values in kept.calls[1:-1] if "val_loss" in values]
    assert validated == [(4, rows(run_dir)[-1]["loss"])]
    assert any("time/step_s" in values for _, values in kept.calls[1:-1])
    (thread,) = kept.threads
    assert thread is not threading.main_thread() and not thread.is_alive()


def test_a_further_fit_opens_the_logger_again_under_the_same_id():
    kept = Kept()
    trainer = Trainer(
        lambda: torch.nn.Linear(2, 3),
        backend="single",
        device="cpu",
        loggers=[kept],
        epochs=1,
        batch_size=4,
        verbose=False,
    )
    trainer.fit(DATA)
    first = kept.run
    trainer.fit(DATA)
    assert [call for call in kept.calls if isinstance(call, str)] == ["open", "finished"] * 2
    assert kept.run.id == first.id and (first.step, kept.run.step) == (0, 4)


class Slow(Kept):
    def __init__(self):
        super().__init__()
        self.may_go = threading.Event()

    def log_metrics(self, step, metrics):
        assert self.may_go.wait(20)
        super().log_metrics(step, metrics)


def test_training_never_waits_for_a_logger():
    slow = Slow()

    class LetsGo(Callback):
        def on_train_end(self, state):
            assert slow.calls in ([], ["open"])  # all steps are done, and the logger has got nothing
            slow.may_go.set()

    trained([slow], callbacks=[LetsGo()])
    assert slow.calls[-1] == "finished" and len(slow.calls) > 3


class Failing(Kept):
    def __init__(self, error, times=1):
        super().__init__()
        self.error, self.times = error, times

    def log_metrics(self, step, metrics):
        if self.times:
            self.times -= 1
            raise self.error
        super().log_metrics(step, metrics)


def courier(tmp_path, users, entries):
    """A courier that has delivered `entries`, and what it warned of."""
    spool, warnings = Spool(tmp_path / "spool.jsonl"), []
    spool.open()
    for entry in entries:
        spool.append(entry)
    made = Courier(users, LoggedRun("", "run", tmp_path, {}, 0), spool, tmp_path / "kept.json", warnings.append)
    made.start()
    is_done = made.finish(20)
    spool.close()
    return is_done, warnings


ENTRIES = [{"kind": "start"}, *({"kind": "metrics", "step": step, "values": {"loss": 1.0}} for step in (1, 2))]


def test_a_call_that_raises_is_left_out_and_named_once(tmp_path):
    users = Failing(ValueError("no such name"), 2)
    is_done, warnings = courier(tmp_path, users, [*ENTRIES, ENTRIES[1]])
    assert is_done and users.calls == ["open", (1, {"loss": 1.0})]
    (text,) = warnings
    assert text.startswith("logger kept failed (ValueError: no such name): training continues")


def test_a_call_that_finds_no_server_is_repeated_by_the_next_attempt(tmp_path):
    is_done, warnings = courier(tmp_path, Failing(ConnectionError("refused"), 1000), ENTRIES)
    assert not is_done and "ConnectionError: refused" in warnings[0]
    users = Kept()
    assert courier(tmp_path, users, [{"kind": "end", "status": "finished"}]) == (True, [])
    assert users.calls == ["open", (1, {"loss": 1.0}), (2, {"loss": 1.0}), "finished"]


def test_a_call_that_finds_no_server_is_repeated_while_training_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(delivery, "_FIRST_PAUSE_S", 0.01)
    users, told = Failing(ConnectionError("refused"), 3), threading.Event()
    users.close = lambda status: told.set()
    spool = Spool(tmp_path / "spool.jsonl")
    spool.open()
    made = Courier(users, LoggedRun("", "run", tmp_path, {}, 0), spool, tmp_path / "kept.json", lambda text: None)
    for entry in (*ENTRIES, {"kind": "end", "status": "finished"}):
        spool.append(entry)
    made.start()
    assert told.wait(20) and users.calls == ["open", (1, {"loss": 1.0}), (2, {"loss": 1.0})]
    assert made.finish(20)
    spool.close()


def test_a_failing_logger_does_not_end_training(capsys):
    users = Failing(RuntimeError("broken"), 1000)
    run_dir = trained([users], verbose=True)
    assert json.loads((run_dir / "result.json").read_text())["status"] == "finished"
    assert capsys.readouterr().err.count("logger Failing failed (RuntimeError: broken)") == 1


def test_a_logger_that_hangs_does_not_keep_the_run_from_ending(monkeypatch, capsys):
    monkeypatch.setattr(delivery, "_PATIENCE_S", 0.2)
    slow = Slow()
    run_dir = trained([slow], verbose=True)
    assert "logger Slow has not taken everything" in capsys.readouterr().out
    delivered = json.loads((run_dir / "loggers" / "Slow.json").read_text())["delivered"]
    assert delivered < (run_dir / "loggers" / "Slow.jsonl").stat().st_size  # the rest is kept for the next attempt
    slow.may_go.set()


def test_hooks_run_in_the_order_of_the_callbacks_then_early_stopping_then_the_loggers(monkeypatch):
    called = []

    def note(kind, hook):
        own = getattr(kind, hook)

        def noted(self, *arguments):
            called.append((hook, kind))
            own(self, *arguments)

        monkeypatch.setattr(kind, hook, noted)

    class First(Callback): ...

    class Second(Callback): ...

    hooks, order = ("on_train_start", "on_log", "on_train_end"), [Second, First, EarlyStopping, MetricsFile, CsvFile]
    for kind in order:
        for hook in hooks:
            note(kind, hook)
    trained(["csv"], callbacks=[Second(), First()], early_stopping_patience=5)
    found = {hook: [kind for each, kind in called if each == hook] for hook in hooks}
    assert found == {"on_train_start": order, "on_log": order * 3, "on_train_end": order}


def test_what_was_logged_is_not_logged_again_after_a_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(delivery, "hyperparameters", lambda fit: {})
    kept, texts = Kept(), []
    kept.log_media = lambda media: texts.append((media.name, media.step, media.content))

    def attempt(steps, state):
        fit = types.SimpleNamespace(run=RunDirectory(tmp_path), state=state, on_event=print)
        delivered = Delivered(fit, "kept", kept)
        for state.step in steps:
            delivered.on_log(state, "train", {"loss": float(state.step)})
            path = f"media/note-{state.step}.txt"
            (tmp_path / path).parent.mkdir(exist_ok=True)
            (tmp_path / path).write_bytes(b"a")
            delivered.record_media(state, LoggedMedia("note", "text", state.step, None, path, b"a"))
        delivered.close()

    attempt([1, 2, 3], TrainState())
    attempt([3, 4], TrainState(step=2))
    logged = [(step, values["loss"]) for step, values in (call for call in kept.calls if not isinstance(call, str))]
    assert logged == [(step, float(step)) for step in (1, 2, 3, 4)]
    assert texts == [("note", step, b"a") for step in (1, 2, 3, 4)]
    assert [call for call in kept.calls if isinstance(call, str)] == ["open", "failed"] * 2


@pytest.mark.parametrize(("buffered_s", "repeated"), [(0.0, []), (60.0, [1, 2])])
def test_what_a_library_may_have_kept_in_memory_is_logged_again_after_a_kill(
    tmp_path, monkeypatch, buffered_s, repeated
):
    monkeypatch.setattr(delivery, "hyperparameters", lambda fit: {})
    kept = Kept()
    kept.buffered_s = buffered_s

    def begin(state):
        return Delivered(types.SimpleNamespace(run=RunDirectory(tmp_path), state=state, on_event=print), "kept", kept)

    first = begin(state := TrainState())
    for state.step in (1, 2):
        first.on_log(state, "train", {"loss": float(state.step)})
    record = tmp_path / "loggers/kept.json"
    poll(
        lambda: first._courier.left == 0 and (buffered_s or json.loads(record.read_text())["delivered"] == first._spool.size),
        10, lambda: "not logged",
    )  # fmt: skip
    first._courier._is_given_up.set()  # as after a kill, nothing more is logged or recorded

    second = begin(state := TrainState(step=2))
    state.step = 3
    second.on_log(state, "train", {"loss": 3.0})
    second.close()
    assert [step for step, _ in (call for call in kept.calls if not isinstance(call, str))] == [1, 2, *repeated, 3]


def logged_step(model, batch):
    x, y = batch
    loss = torch.nn.functional.cross_entropy(model(x), y)
    logged.log("samples", len(x), reduce="sum")  # as a copy of the trainer does, which is sent along with a step
    logged.log("mean", x.mean())
    return {"loss": loss, "same": x.mean()}


def test_loggers_and_steps_that_log_travel_to_workers_that_are_started():
    trainer = Trainer(
        lambda: torch.nn.Linear(2, 3), nproc_per_node=2, device="cpu", batch_size=3, epochs=1, training_step=logged_step,
        loggers=["csv", Travels()], verbose=False,
    )  # fmt: skip
    history = trainer.fit(DATA)
    assert history.rows[0]["samples"] == 16  # of ranks whose last batches differ
    assert history.rows[0]["mean"] == history.rows[0]["same"]
    assert (Path(history.run_dir) / "metrics.csv").exists()
    assert (Path(history.run_dir) / "loggers" / "travels.txt").read_text().split() == ["open", "finished"]


class Travels(Logger):
    """Writes what happens into the run directory, because a worker has a copy of it."""

    def open(self, run):
        self.path = run.run_dir / "loggers" / "travels.txt"
        self.path.write_text("open\n")

    def close(self, status):
        with self.path.open("a") as file:
            file.write(f"{status}\n")


class Broken(Logger):
    def __init__(self):
        self.opened = 0

    def open(self, run):
        self.opened += 1
        raise RuntimeError("bad key")


def test_a_logger_that_cannot_be_opened_is_asked_once_in_an_attempt():
    broken = Broken()
    trained([broken], epochs=3)
    assert broken.opened == 1


def test_two_classes_of_one_name_are_two_loggers():
    def made():
        class Same(Kept):
            pass

        return Same()

    one, other = made(), made()
    trained([one, other])
    assert one.calls == other.calls != []


def test_a_file_that_cannot_be_logged_does_not_keep_back_what_follows(tmp_path):
    class Picky(Kept):
        tried = 0

        def log_media(self, media):
            self.tried += 1
            raise OSError("cannot identify image file")

    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "a.png").write_bytes(b"no image")
    media = {"kind": "media", "of": "image", "name": "a", "step": 1, "rank": None, "path": "media/a.png"}
    picky = Picky()
    is_done, _ = courier(tmp_path, picky, [ENTRIES[0], media, *ENTRIES[1:]])
    assert not is_done and picky.calls == ["open"]
    for _ in range(4):  # further attempts at the run
        is_done, _ = courier(tmp_path, picky, [])
    assert is_done and picky.tried == 5 and [each for each in picky.calls if each != "open"] == [
        (1, {"loss": 1.0}), (2, {"loss": 1.0}),
    ]  # fmt: skip


def test_a_file_outside_of_the_run_is_not_read(tmp_path):
    kept = Kept()
    kept.log_media = lambda media: kept.calls.append(media.path)
    (tmp_path / "secret").write_text("key")
    media = {"kind": "media", "of": "text", "name": "a", "step": 1, "rank": None, "path": "media/../secret"}
    (tmp_path / "media").mkdir()
    assert courier(tmp_path, kept, [ENTRIES[0], media])[0] and kept.calls == ["open"]


def test_a_row_that_is_cut_off_is_not_in_the_table(tmp_path):
    source = tmp_path / "metrics.jsonl"
    source.write_text('{"step": 1, "epoch": 0, "time": 0.0, "split": "train", "loss": 2.0}\n{"step": 2, "ep')
    table_file = CsvFile(source)
    table_file.on_train_start(TrainState())
    assert (tmp_path / "metrics.csv").read_text().splitlines() == ["step,epoch,time,loss", "1,0,0.0,2.0"]
