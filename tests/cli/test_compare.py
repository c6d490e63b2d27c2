"""`distributed compare` shows results, settings that differ and the curve of a metric within eighty columns."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from distributed.cli.__main__ import run as run_command
from distributed.cli.compare import _letter
from distributed.errors import ConfigError
from distributed.report.sparkline import ASCII, BLOCKS, range_of, sparkline
from tests.unit.report_files import write_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs that differ in the number of processes, the learning rate and an object of the script."""
    monkeypatch.chdir(tmp_path)
    write_run(Path("one"), steps=200, world_size=1, rate=500.0, backend="single", settings={"learning_rate": 0.001})
    write_run(Path("two"), steps=100, world_size=2, seed=1, settings={"learning_rate": 0.01})
    result = json.loads(Path("two/result.json").read_text())
    Path("two/result.json").write_text(json.dumps(result | {"best_metrics": {"val_loss": 0.1, "val_accuracy": None}}))
    result = json.loads(Path("one/result.json").read_text())
    Path("one/result.json").write_text(
        json.dumps(result | {"best_metrics": {"val_loss": 0.3}, "final_metrics": {"loss": 1.5}})
    )
    return ["one", "two"]


def shown(capsys, *words: str) -> list[str]:
    capsys.readouterr()
    assert run_command(["compare", *words]) == 0
    return capsys.readouterr().out.splitlines()


def row(lines: list[str], name: str) -> list[str]:
    (line,) = [line for line in lines if line.startswith(name + "  ")]
    return line[len(name) :].split()


def test_a_table_has_results_and_only_settings_that_differ(runs, capsys):
    lines = shown(capsys, *runs)

    assert lines[:2] == ["A  one", "B  two"]
    assert row(lines, "backend") == ["single", "pytorch-ddp"] and row(lines, "processes") == ["1", "2"]
    assert row(lines, "best val_loss") == ["0.3", "0.1*"]  # the smaller one is better
    assert row(lines, "final loss")[0] == "1.5"
    assert row(lines, "learning_rate") == ["0.001", "0.01"]
    assert not any(line.startswith(("seed", "checkpoint_dir")) for line in lines)
    assert max(map(len, lines)) <= 80


def test_the_time_per_step_is_the_mean_of_the_run(runs, capsys):
    Path("one/times.jsonl").write_text(
        '{"step": 10, "time": 1, "data_s": 0.01, "compute_s": 0.03}\n{"step": 40, "time": 2, "data_s": 0.01, "compute_s": 0.07}\n'
    )
    lines = shown(capsys, *runs)
    assert row(lines, "time per step")[0] == "70"  # (10 * 40 ms + 30 * 80 ms) / 40
    assert row(lines, "waiting for data")[0] == "14%"


def test_the_curve_is_that_of_the_monitor_or_of_the_asked_metric(runs, capsys):
    lines = shown(capsys, *runs)
    assert lines[-3].startswith("val_loss, between ") and lines[-3].endswith("to 200")
    assert lines[-2].split()[1][0] == BLOCKS[-1] and lines[-2].split()[1][-1] == BLOCKS[0]  # the loss falls
    assert len(lines[-1].split()[1]) < len(lines[-2].split()[1])  # the second run has half of the steps
    assert shown(capsys, *runs, "--metric", "learning_rate")[-3].startswith("learning_rate, between ")
    with pytest.raises(ConfigError, match=r"--metric val_los: no run has it \(did you mean 'val_loss'\?\)"):
        run_command(["compare", *runs, "--metric", "val_los"])


def test_many_runs_and_long_names_fit_into_eighty_columns(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    names = [f"{'deep/' * 15}run-{number}" for number in range(7)]
    for number, name in enumerate(names):
        write_run(
            Path(name), steps=50, seed=number, settings={"a_very_long_name_of_a_hyperparameter_of_the_script": number}
        )
    lines = shown(capsys, *names)
    assert max(map(len, lines)) <= 80
    values = [line.split()[1:] for line in lines if line.startswith("a_very_lon")]
    assert values == [["0", "1", "2", "3"], ["4", "5", "6"]]
    assert [line.split()[0] for line in lines[-7:]] == list("ABCDEFG")
    assert [_letter(position) for position in (0, 25, 26, 53)] == ["A", "Z", "A1", "B2"]


def test_equal_settings_are_said(runs, capsys):
    write_run(Path("three"), steps=100, world_size=2, seed=1, settings={"learning_rate": 0.01})
    assert "no setting differs" in shown(capsys, "two", "three")


def test_json_has_the_numbers(runs, capsys):
    run_command(["compare", *runs, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["learning_rate"] == [0.001, 0.01] and found["metric"] == "val_loss"
    assert [each["run"] for each in found["runs"]] == runs
    assert found["runs"][1]["best_metrics"] == {"val_loss": 0.1, "val_accuracy": None}
    assert found["runs"][0]["curve"][0][0] == 40 and found["runs"][0]["step_s"] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["one"], "two or more runs"),
        (["one", "one"], "named twice"),
        (["one", "three"], "does not exist"),
        (["one", "s3://bucket/run"], "compare"),
    ],
)
def test_what_cannot_be_compared_is_an_error(runs, words, message):
    with pytest.raises(ConfigError, match=message):
        run_command(["compare", *words])


def test_a_terminal_without_blocks_gets_other_characters(runs, run_cli):
    done = run_cli(["compare", *runs], cwd=Path.cwd(), env={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and ASCII[-1] in done.stdout.splitlines()[-2], done.output
    assert sys.getdefaultencoding() == "utf-8" and done.stdout.isascii()


def test_a_sparkline_scales_steps_and_values():
    curve = [(0, 0.0), (5, 4.0), (10, 8.0)]
    assert sparkline(curve, (0, 10), (0.0, 8.0), 4, "_=#") == "__=#"
    assert sparkline([(5, None)], (0, 10), (0.0, 8.0), 4, "_=#") == "  x"
    assert sparkline([], (0, 10), (0.0, 8.0), 4) == ""
    assert sparkline([(0, 2.0), (10, 2.0)], (0, 10), (2.0, 2.0), 3, "_=#") == "___"
    assert range_of([[(1, 3.0)], [(4, None), (5, -1.0)]]) == ((1, 5), (-1.0, 3.0))
