"""The display: plain lines in a file, one line that never wraps in a terminal."""

from __future__ import annotations

import io

import pytest

from distributed.loggers.console import Display, bar_line, duration, number

EVENT = {
    "kind": "log", "step": 50, "total_steps": 230, "epoch": 1, "epochs": 5,
    "metrics": {"loss": 0.12341, "learning_rate": 1e-3}, "samples_per_second": 1234.4, "eta_s": 12.2,
}  # fmt: skip
LINE = "step 50/230  epoch 1/5  loss 0.1234  lr 1e-3  1234 samples/s  ETA 12 s\n"


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
    Display(stream).handle({"kind": "epoch", "row": row})

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


def test_the_bar_fills():
    assert [bar_line({"step": step, "total_steps": 10}, 80).count("━") for step in (0, 5, 10)] == [0, 8, 16]


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
