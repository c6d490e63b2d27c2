"""The display: plain lines in a file, one line that never wraps in a terminal."""

from __future__ import annotations

import io
import json
import os

import pytest

from distributed.config.merging import Overrides
from distributed.config.settings import DistributedConfig
from distributed.launching import output
from distributed.launching.request import LaunchRequest
from distributed.loggers import console, notebook
from distributed.loggers.console import Display
from distributed.loggers.progress import ProgressLogger
from distributed.loggers.wording import bar_line, duration, number
from distributed.state import StepResult, TrainState

EVENT = {
    "kind": "log", "step": 50, "total_steps": 230, "epoch": 1, "epochs": 5,
    "metrics": {"loss": 0.12341, "learning_rate": 1e-3}, "samples_per_second": 1234.4, "elapsed_s": 3.4, "eta_s": 12.2,
}  # fmt: skip
LINE = "step 50/230  epoch 1/5  loss 0.1234  lr 1e-3  1234 samples/s  3 s, ETA 12 s\n"


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def stream():
    return io.StringIO()


def test_a_log_event_is_one_line_of_at_most_80_columns(stream):
    Display(stream).handle(EVENT)

    assert stream.getvalue() == LINE
    assert len(LINE) <= 81


def test_what_is_not_known_is_left_out(stream):
    Display(stream).handle({"kind": "log", "step": 7, "total_steps": None, "epoch": 1, "epochs": None, "metrics": {}})

    assert stream.getvalue() == "step 7  epoch 1\n"


def test_progress_is_for_terminals(stream):
    display = Display(stream)
    display.handle({**EVENT, "kind": "progress"})
    display.handle({"kind": "something new"})

    assert stream.getvalue() == ""


def test_an_epoch_is_one_line(stream):
    row = {"epoch": 1, "epochs": 5, "step": 46, "loss": 0.5, "val_loss": 0.25, "val_accuracy": 0.9712}
    Display(stream).handle({"kind": "row", "row": row})

    assert stream.getvalue() == "epoch 1/5  loss 0.5  val_loss 0.25  val_accuracy 0.9712\n"


def test_the_scripts_output_is_untouched_and_our_lines_never_join_it(stream):
    display = Display(stream)
    display.print_output("loading", False)
    display.handle({"kind": "notice", "text": "starting"})
    display.print_output("tail without end", False)
    display.close()

    assert stream.getvalue() == "loading\nstarting\ntail without end\n"


def test_quiet_shows_warnings_and_errors_only(stream, capsys):
    display = Display(stream, verbose=False)
    for kind in ("notice", "warning", "error"):
        display.handle({"kind": kind, "text": f"a {kind}"})
    display.handle(EVENT)
    display.print_output("the script's\n", False)

    assert stream.getvalue() == "the script's\n"
    assert capsys.readouterr().err == "warning: a warning\na error\n"


def test_a_stream_without_unicode_gets_question_marks():
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding="ascii")

    Display(stream).handle({"kind": "notice", "text": "größer"})

    assert buffer.getvalue() == b"gr??er\n"


@pytest.mark.parametrize("width", [20, 40, 79, 80, 81, 100, 200])
@pytest.mark.parametrize("total", [230, None])
def test_the_bar_is_never_wider_than_the_terminal(width, total):
    metrics = {"loss": 0.1, "accuracy": 0.5, "grad_norm": 12.5, "learning_rate": 1e-3}

    line = bar_line({**EVENT, "total_steps": total, "metrics": metrics}, width)

    assert len(line) < width
    assert "step 50" in line


def test_what_a_short_line_leaves_out_is_other_metrics():
    metrics = {"accuracy": 0.5, "f1": 0.25, "loss": 0.1, "learning_rate": 1e-3, "grad_norm": 12.5}

    line = bar_line({**EVENT, "step": 1000, "total_steps": 23000, "metrics": metrics}, 80)

    assert line.split("  ")[1:] == ["step 1000/23000", "epoch 1/5", "loss 0.1", "1234 samples/s", "3 s, ETA 12 s"]


def test_a_terminal_that_cannot_move_gets_lines(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    stream = Terminal()
    display = Display(stream)
    display.handle({**EVENT, "kind": "progress"})
    display.handle(EVENT)
    assert " ".join(stream.getvalue().split()) == " ".join(LINE.split())


def test_where_no_end_is_known_the_line_says_how_long_it_has_gone():
    event = {**EVENT, "total_steps": None, "eta_s": None, "elapsed_s": 200}
    assert bar_line(event, 80).endswith("1234 samples/s  elapsed 3 min 20 s")
    assert "elapsed" not in bar_line(event, 40) and "loss" in bar_line(event, 40)


def test_the_time_in_the_bar_goes_on_between_two_events(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(console, "monotonic", lambda: now[0])
    bar = console._TerminalBar(Terminal())
    try:
        bar.show({**EVENT, "elapsed_s": 3.4})
        assert "3 s, ETA 12 s" in bar._line().plain
        now[0] += 60
        assert "1 min 03 s, ETA 12 s" in bar._line().plain
    finally:
        bar.stop()


def test_the_bar_fills():
    assert [bar_line({"step": step, "total_steps": 10}, 80).count("━") for step in (0, 5, 10)] == [0, 8, 16]


def test_a_terminal_without_unicode_gets_a_plain_bar(monkeypatch):
    class Old(io.TextIOWrapper):
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    buffer = io.BytesIO()
    display = Display(Old(buffer, encoding="latin-1", newline=""))
    display.handle({**EVENT, "kind": "progress"})
    display.print_output("größer ✓\n", False)
    display.close()

    text = buffer.getvalue().decode("latin-1")
    assert "##---" in text and "größer ?\n" in text


def test_a_terminal_shows_output_above_the_bar(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    stream = Terminal()
    display = Display(stream)
    display.handle({**EVENT, "kind": "progress"})
    display.print_output("a [bold]line[/bold]\nbegun", False)
    display.print_output(" and ended\n50%\r100%\n", False)
    display.handle({"kind": "finished", "lines": ["done in 3 s"]})
    display.close()

    text = stream.getvalue()
    assert "a [bold]line[/bold]\n" in text
    assert "begun and ended\n100%\n" in text
    assert "done in 3 s\n" in text
    assert "step 50/230" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12341, "0.1234"),
        (1e-3, "1e-3"),
        (3.25e-5, "3.25e-5"),
        (12.5, "12.5"),
        (12780.4, "12780"),
        (0.0, "0"),
        (5, "5"),
        (float("nan"), "nan"),
    ],
)
def test_numbers_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(12.4, "12 s"), (59.9, "1 min 00 s"), (200, "3 min 20 s"), (7500, "2 h 05 min")]
)
def test_durations_are_for_people(seconds, text):
    assert duration(seconds) == text


def test_a_notebook_gets_the_browsers_own_bar_with_the_same_parts():
    html = notebook.bar_html({**EVENT, "metrics": {"a<b": 1.0}})

    assert html.startswith('<div><progress value="50" max="230"></progress>')
    assert "step 50/230" in html and "1234 samples/s" in html and "ETA 12 s" in html
    assert "a&lt;b 1" in html
    assert "<progress" not in notebook.bar_html({**EVENT, "total_steps": None})


def test_a_launcher_sends_its_bar_to_the_caller_and_prints_the_rest(capsys):
    read, write = os.pipe()
    request = LaunchRequest(run_dir="", overrides=Overrides(), bar_fd=write)
    display = output.display_of(request)
    display.print_output("no end", False)
    display.handle({**EVENT, "kind": "progress"})
    display.handle(EVENT)
    display.handle({"kind": "row", "row": {"epoch": 1, "epochs": 5, "loss": 0.5}})
    display.close()
    display.handle(EVENT)

    sent = [json.loads(line) for line in os.read(read, 65536).decode().splitlines()]
    assert sent == [{**EVENT, "kind": "progress"}, EVENT, None]
    assert capsys.readouterr().out == "no end\nepoch 1/5  loss 0.5\n" + LINE
    for fd in (read, write):
        os.close(fd)


def test_the_bar_keeps_the_throughput_of_the_last_log_line():
    told = []
    progress = ProgressLogger(told.append, DistributedConfig(log_every_n_steps=2), 10, "run")
    progress.on_train_start(TrainState())
    progress.on_step_end(TrainState(step=1), StepResult([]))
    progress.on_log(TrainState(step=2), "train", {"loss": 0.5, "samples_per_second": 64.0})
    progress._next = 0.0
    progress.on_step_end(TrainState(step=3), StepResult([]))

    assert all(0 <= each["elapsed_s"] < 60 for each in told)
    assert [(each["kind"], each["samples_per_second"]) for each in told] == [
        ("progress", None), ("log", 64.0), ("progress", 64.0),
    ]  # fmt: skip
