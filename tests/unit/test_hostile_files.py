"""Files that somebody wrote to harm their reader are refused in one line, soon and with little memory, and never move the cursor."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from distributed.checkpoints.state_file import write_state
from distributed.cli.__main__ import main
from distributed.config import reading
from distributed.config.json_lines import JOURNAL_MEMORY, METRICS_MEMORY, Memory
from distributed.config.reading import LimitError, parse_json, parse_yaml
from distributed.errors import ConfigError, TrainingError, shown
from distributed.loggers.console import Display
from distributed.runs.summary import MAX_METRICS, read_result, write_result
from distributed.state import TrainState
from tests.unit.hostile_files import CASES, FULL, SECONDS, write_checkpoint
from tests.unit.report_files import BEGAN, write_lines, write_run, write_sweep

ESCAPE = "\x1b[2J\x1b]0;owned\x07"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the answer of the reader of each file. One process reads them all, because its limit of memory is its own."""
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(
        [sys.executable, "-m", "tests.unit.hostile_files"], cwd=root, env=environment, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return {line["name"]: line for line in map(json.loads, ended.stdout.splitlines())}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_file_is_one_line_within_two_seconds_and_200_mib(found: dict[str, Any], name: str) -> None:
    line = found[name]
    assert line["kind"] in ("CheckpointError", "DamagedError", "ConfigError"), line["trace"]
    assert CASES[name][1] in line["message"] and "\n" not in line["message"]
    assert len(line["message"]) < 1000 and line["cpu_s"] < SECONDS


@pytest.mark.parametrize("name", FULL)
def test_a_file_just_within_the_limits_takes_two_seconds_and_200_mib_at_most(found: dict[str, Any], name: str) -> None:
    line = found[name]
    assert line["kind"] in ("NoneType", "CheckpointError", "DamagedError", "ConfigError"), line["trace"]
    assert "\n" not in line["message"] and line["cpu_s"] < SECONDS


def test_what_is_within_the_limits_is_read() -> None:
    deep = "[" * 100 + "]" * 100
    assert parse_json(deep) == parse_yaml(deep.encode())
    with pytest.raises(LimitError, match="more than 100 deep"):
        parse_json(f"[{deep}]")
    assert parse_json("9" * 300) == parse_yaml(b"9" * 300) == int("9" * 300)
    assert parse_json("[1e308, NaN]")[0] == parse_yaml(b"1.0e+308") == 1e308
    assert parse_yaml(b"a: &a [1, 2]\nb: *a\nc: {<<: {d: 1:4}}") == {"a": [1, 2], "b": [1, 2], "c": {"d": "1:4"}}


LARGE = ["1e309", "-1E309", "1e+309", "1E+309", f"{'9' * 250}e60", f"1{'0' * 309}.5", "9" * 301]


@pytest.mark.parametrize("text", LARGE)
def test_a_number_that_no_float_holds_is_refused_however_it_is_written(text: str) -> None:
    with pytest.raises(LimitError):
        parse_json(f"[{text}]")
    assert parse_json(f'["{text}", 1e-400, 1e99]') == [text, 0.0, 1e99]


def test_infinity_is_read_as_python_writes_it_and_no_other_number_becomes_infinity() -> None:
    assert parse_json('{"a": [Infinity, -Infinity, 1e0300, "1e999"]}') == {"a": [math.inf, -math.inf, 1e300, "1e999"]}
    for text in ("[Infinity, 1e999]", '["1e777x", [[{"a": 1e999}]], -Infinity]', '["a 1e777", 1e100, 1e999 ]'):
        with pytest.raises(LimitError, match="has the number 1e999, which is too large"):
            parse_json(text)


NAMED = {
    '[1e100, ",1.2.3e999,", -1.5E+0000999]': "has the number -1.5E+0000999, which",
    "[1e999999999999]": "has the number 1e999999999999, which",
    f"[{'9' * 310}.5]": f"has the number {'9' * 20}, which",
    f"[{'1e100,' * 2000}1e999]": "has a number that is too large",
    f'["{"1" * 9000}", {"9" * 4400}]': "has a number of 4400 digits",
    f'["{"1" * 9000}", -{"9" * 400}]': "has a number of 400 digits",
}


@pytest.mark.parametrize("text", NAMED)
def test_the_number_that_is_too_large_is_named(text: str) -> None:
    with pytest.raises(LimitError, match=f"^{re.escape(NAMED[text])}"):
        parse_json(text)


def test_numbers_are_limited_even_if_python_limits_none(monkeypatch: pytest.MonkeyPatch) -> None:
    before, longest = sys.get_int_max_str_digits(), list[int]()
    monkeypatch.setattr(reading, "int", lambda text: longest.append(len(text)) or 7, raising=False)
    sys.set_int_max_str_digits(0)
    try:
        with pytest.raises(LimitError, match="has a number of 1000000 digits, 300 are allowed"):
            parse_json(f'{{"a": [1, {"9" * 1_000_000}]}}')  # to convert it takes minutes
        assert longest == [1] and parse_json(f'["{"9" * 5000}", 7]') == ["9" * 5000, 7]
    finally:
        sys.set_int_max_str_digits(before)


def test_names_of_many_lines_are_stored_and_counted_once() -> None:
    """The lines of times.jsonl have a name for each rank."""
    memory, line = Memory(4 << 20), {f"rank_{i}_s": [{"a": i}] for i in range(1024)}
    taken = [memory.take(json.loads(json.dumps(line))) for _ in range(10)]
    assert taken == [line] * 10 and memory.num_names == 1024 + 1
    assert all(one is other for one, other in zip(taken[0], taken[9], strict=True))


def test_names_beyond_the_limit_of_the_table_are_stored_each_time() -> None:
    memory, many = Memory(20 << 20), {f"{i}": i for i in range(50_001)}
    assert memory.take(many) == memory.take(dict(many)) == many and memory.num_names == 2 * 50_001
    with pytest.raises(LimitError, match="take more than"):
        memory.take([many] * 4)


def test_a_report_reads_the_names_of_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=100)
    line = {"step": 100, "time": BEGAN + 1, "data_s": 0.5, **{f"rank_{rank}_s": 0.5 for rank in range(15_000)}}
    write_lines(run / "times.jsonl", [{**line, "step": step} for step in range(100, 600, 100)])
    assert "report.html" in command(capsys, "report", run)


def test_long_runs_and_sweeps_are_within_the_limits_of_memory() -> None:
    """Each limit allows a million log lines, 120,000 events or 52,000 rows, of which a thousandth is taken here."""
    event = {"time": 0.5, "event": "checkpoint_saved", "step": 1000, "checkpoint": "step-00001000"}
    row = {"trial": 1, "event": "row", "time": 0.5, "row": {"epoch": 10, **{f"metric_{i}": i + 0.5 for i in range(8)}}}
    logged = {"step": 1000, "epoch": 10, "time": 0.5, **{f"metric_{i}": i + 0.5 for i in range(12)}}
    times = {"step": 1000, "time": 0.5, **{f"part_{i}_s": i + 0.5 for i in range(6)}}
    for limit, lines in (
        (JOURNAL_MEMORY, [event] * 120),
        (JOURNAL_MEMORY, [row] * 52),
        (METRICS_MEMORY, [logged, times] * 1000),
    ):
        memory = Memory(limit // 1000 + 5000)  # names are stored once
        taken = [memory.take(json.loads(json.dumps(line))) for line in lines]
        assert taken == lines and next(iter(taken[0])) is next(iter(taken[-1]))
        with pytest.raises(LimitError, match="take more than"):
            memory.take(lines)


def test_a_result_that_could_not_be_read_is_written_shorter(tmp_path: Path) -> None:
    path, metrics = tmp_path / "result.json", {f"metric_{i}": 0.5 for i in range(50_000)}
    result = {"status": "failed", "error": "x" * 2_000_000, "warnings": ["y" * 200_000] * 20, "best_metrics": metrics}
    write_result(path, result)
    found = read_result(path)
    assert found is not None and found["status"] == "failed" and found["error"] == "x" * 10_000 + "..."
    assert len(found["best_metrics"]) == 1000 and len(found["warnings"]) == 10
    write_result(path, {"status": "failed", "error": "x" * 20_000})
    assert read_result(path) == {"status": "failed", "error": "x" * 20_000}


def test_a_result_of_many_metrics_is_refused_and_is_written_shorter(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    metrics = {f"{i}": None if i % 2 else 0.5 for i in range(MAX_METRICS + 1)}
    path.write_text(json.dumps({"status": "finished", "final_metrics": metrics}))
    with pytest.raises(ConfigError, match="which is not an object of up to 20000 numbers or null: remove it"):
        read_result(path)
    write_result(path, {"status": "finished", "final_metrics": metrics})
    assert len((read_result(path) or {})["final_metrics"]) == 1000
    del metrics["7"]
    write_result(path, {"status": "finished", "final_metrics": metrics})
    assert read_result(path) == {"status": "finished", "final_metrics": metrics}


def test_a_state_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match=r"has 1\d+ values and names, 1350000 are allowed"):
        write_state(tmp_path, TrainState(callbacks={"Mine": {"seen": [0] * 1_400_000}}), {})
    assert not list(tmp_path.iterdir())


def command(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """Run a command and return all that it printed, which must not have a control character."""
    with pytest.raises(SystemExit):
        main(list(map(str, arguments)))
    printed = "".join(capsys.readouterr())
    assert printed.replace("\n", "").isprintable(), repr(printed)
    return printed


def hostile_run(path: Path) -> Path:
    """A run whose every text has an escape sequence."""
    row = {"step": 1000, "epoch": 4, "time": BEGAN + 30, "split": "train", f"loss{ESCAPE}": 0.5}
    event = {"event": "worker_failed", "time": BEGAN + 31, "cause": ESCAPE, "checkpoint": ESCAPE}
    run = write_run(
        path, backend=ESCAPE, status=ESCAPE, settings={f"name{ESCAPE}": ESCAPE, "monitor": ESCAPE}, events=[event]
    )
    write_lines(run / "metrics.jsonl", [row, {**row, "step": 1001}])
    result = json.loads((run / "result.json").read_text())
    changed = {"best_metrics": {f"val{ESCAPE}": 0.5}, "error": f"{ESCAPE}\nline", "checkpoint": ESCAPE}
    (run / "result.json").write_text(json.dumps({**result, **changed}))
    return run


def test_no_command_obeys_the_escape_sequences_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [hostile_run(tmp_path / "runs" / f"a{ESCAPE.replace('/', '')}{number}") for number in range(2)]
    assert r"\x1b[2J" in command(capsys, "runs", tmp_path / "runs")
    assert r"\x1b[2J\x1b]0;owned\x07\nline" in command(capsys, "status", "--once", runs[0])
    assert r"\x1b[2J" in command(capsys, "why", runs[0]) and command(capsys, "why", "--json", runs[0])
    assert r"\x1b[2J" in command(capsys, "compare", *runs)
    assert r"\x1b[2J" in command(capsys, "report", runs[0])
    (runs[0] / "config.yaml").write_text("a: [")
    assert r"\x1b[2J" in command(capsys, "report", runs[0])


def test_no_command_obeys_the_escape_sequences_of_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quoted = json.dumps(ESCAPE)[1:-1]
    path = write_checkpoint(
        tmp_path / "checkpoints" / "step-00000004",
        manifest=lambda text: (
            text.replace("val_loss", quoted).replace('"single"', f'"{quoted}"').replace("2026", quoted)
        ),
    )
    assert r"\x1b[2J" in command(capsys, "checkpoint", "list", tmp_path)
    (path / f"a{ESCAPE}").touch()
    assert r"\x1b[2J" in command(capsys, "checkpoint", "list", tmp_path)
    assert r"\x1b[2J" in command(capsys, "checkpoint", "verify", path)


def test_no_error_in_a_plain_script_obeys_the_escape_sequences_of_a_checkpoint(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONPATH": str(root)}
    ended = subprocess.run(
        [sys.executable, root / "tests" / "unit" / "hostile_script.py"], cwd=tmp_path, env=environment, capture_output=True, timeout=120,
        check=False,
    )  # fmt: skip
    out, err = ended.stdout.decode(), ended.stderr.decode()
    assert ended.returncode == 1 and err.count("distributed.errors.CheckpointError: ") == 13, err
    assert (out + err).replace("\n", "").isprintable(), [
        repr(line) for line in (out + err).splitlines() if not line.isprintable()
    ]
    assert err.count(r"\x1b[2J") >= 14 and out.count(r"\x1b[2J") >= 2  # the cause of an error is shown too


def test_the_display_shows_names_of_metrics_and_messages_escaped(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(live=False)
    display.handle({"kind": "row", "row": {"epoch": 1, f"loss{ESCAPE}": 0.5}})
    display.handle({"kind": "log", "step": 1, "metrics": {f"loss{ESCAPE}": 0.5}})
    display.handle({"kind": "warning", "text": ESCAPE})
    display.print_output("of the script \x1b[1m\n", is_stderr=False)
    out, err = capsys.readouterr()
    assert out.count(r"loss\x1b[2J\x1b]0;owned\x07 0.5") == 2 and err == "warning: \\x1b[2J\\x1b]0;owned\\x07\n"
    assert out.count("\x1b") == 1  # the script's own output is not changed


def test_only_control_characters_are_escaped() -> None:
    assert shown("größe 1 µs → 東京") == "größe 1 µs → 東京"
    assert shown("a\r\n\t\x9b\u202e\ud800") == r"a\r\n\t\x9b\u202e\ud800"
    assert shown("a\n\tb\x00", keep="\n\t") == "a\n\tb\\x00"


def test_one_bad_run_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "good")
    (write_run(tmp_path / "bad") / "result.json").write_text('{"steps": -1}')
    printed = command(capsys, "runs", tmp_path)
    assert "unreadable" in printed and "finished" in printed and "result.json' has steps=-1, which is not" in printed
    (listed,) = [
        run for run in json.loads(command(capsys, "runs", tmp_path, "--json")) if run["status"] == "unreadable"
    ]
    assert "has steps=-1" in listed["error"]
    assert "has steps=-1" in command(capsys, "status", tmp_path / "bad")


def test_lines_of_a_journal_that_no_run_wrote_are_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", steps=100, every=10)
    lines = (
        {"event": "restarted", "time": 10**18}, {"event": "restarted", "time": "x"}, {"event": ["restarted"], "time": 1},
        {"event": "restarted", "time": 1, "node": [1]}, {"event": "restarted", "time": 1, "step": -1},
    )  # fmt: skip
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
        file.write('{"event": "restarted", "time": 1e999}\n{"event": "restarted", "time": %s}\n' % ("1" * 400))
        file.write('{"event": "restarted", "time": 1, "a": %s}\n' % ("[" * 300 + "]" * 300))
        file.write('{"event": "restarted", "time": 1, "a": "%s"}\n' % ("x" * 2_000_000))
    with (run / "times.jsonl").open("a") as file:
        file.write('{"step": 110, "time": 1, "rank_x_s": 1, "rank_0_s": null, "data_s": "x", "compute_s": 1e308}\n')
    assert "restarts" not in command(capsys, "status", "--once", run)
    assert "report.html" in command(capsys, "report", run)


def test_a_sweep_with_any_numbers_is_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = write_sweep(tmp_path / "sweep", trials=10)
    content = json.loads((sweep / "sweep.json").read_text())
    for number, (trial, value) in enumerate(
        zip(content["trials"], (10**299, -(10**299), 1.7e308, -1.7e308, "\ud800"), strict=False)
    ):
        trial["config"]["learning_rate"], trial["metrics"]["val_loss"] = value, number * 1e307
    (sweep / "sweep.json").write_text(json.dumps(content))
    assert "report.html" in command(capsys, "report", sweep)
