"""Training fails on one of two processes: check the message, the time until the end, and what is left behind."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.conformance.runs import FULL

JOB = Path(__file__).parent / "jobs" / "failures.py"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def fail(run_cli, tmp_path):
    """Return a function that runs a case of the job on two processes, in about 2 s."""

    def run(case, code, fresh=False):
        done = run_cli(
            ["train", "--script", str(JOB), "--nproc-per-node", "2", "--run-dir", str(tmp_path / "run"), "--max-restarts", "0",
             "--", case, str(tmp_path)],
            timeout=120, fresh=fresh,
        )  # fmt: skip
        ended = time.time()
        assert done.returncode == code, done.output[-3000:]
        raised = tmp_path / "raised-at"
        if raised.exists():
            raised_at = float(raised.read_text())
            assert ended - raised_at <= max(3, raised_at - (ended - done.seconds)), (
                done.output
            )  # or the time of the start, if that is longer
        return done

    return run


def updates(directory, case):
    """Return the [step, skipped, weights] of each rank after every update."""
    files = [directory / f"{case}-{rank}.jsonl" for rank in (0, 1)]
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def lines(done):
    return [line for line in done.stderr.splitlines() if line.strip()]


def test_a_nan_on_one_rank_stops_all_before_the_update(fail, tmp_path):
    done = fail("nan-stop", 1)
    assert lines(done)[-1].startswith(
        "error: step 5: the loss is nan on rank 1 for samples 33, 35, 37, 39 of the data set; not finite in the data: 33"
        " (samples at positions 32 to 39 of the epoch)"
    )
    assert done.output.count("the loss is nan") == 1 and "Traceback" not in done.output
    first, second = updates(tmp_path, "nan-stop")
    assert [entry["step"] for entry in first] == [entry["step"] for entry in second] == [1, 2, 3, 4]
    newest = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    assert newest.name == "step-00000004"
    assert all(
        math.isfinite(v) for array in load_file(newest / "model" / "model.safetensors").values() for v in array.flat
    )


def test_a_nan_may_leave_the_update_out(fail, tmp_path):
    done = fail("nan-skip", 0)
    assert done.output.count("warning: step 5: the loss is nan on rank 1") == 1
    first, second = updates(tmp_path, "nan-skip")
    assert first == second and len(first) == 8
    assert first[4]["skipped"] and first[4]["weights"] == first[3]["weights"] != first[5]["weights"]
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert math.isfinite(result["best_metrics"]["loss"])  # the mean of the epoch leaves skipped updates out


def test_a_nan_may_be_a_warning_said_once_while_it_lasts(fail, tmp_path):
    done = fail("nan-warn", 0)
    assert done.output.count("warning: step ") == 1 and "update made anyway" in done.output
    first, _ = updates(tmp_path, "nan-warn")
    assert [all(map(math.isfinite, entry["weights"])) for entry in first] == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("case", "last", "where"),
    [
        ("bad-sample", "ValueError: sample 33 cannot be read", "in __getitem__"),
        ("bad-sample-in-a-worker", "ValueError: sample 33 cannot be read", "in __getitem__"),
        ("bad-forward", "RuntimeError: the third forward fails", "in forward"),
    ],
)
def test_the_users_own_traceback_is_the_last_thing_on_the_screen(fail, case, last, where):
    done = fail(case, 1)
    shown = lines(done)
    assert shown[-1] == last
    assert any(str(JOB) in line and where in line for line in shown[-8:])
    assert "error: rank 1 failed with" in done.stderr and done.stderr.count(last) <= 2


def test_a_rank_that_stays_away_is_waited_for_no_longer_than_timeout_s(fail):
    """Takes 5 s, of which the job waits 2 s."""
    done = fail("timeout", 1)
    (line,) = lines(done)
    assert (
        line.startswith("error: rank 1 hangs in step 2 (callbacks): no progress for 2 s (timeout_s=2), it is at ")
        and "in on_step_end" in line
    )


MISTAKES = {
    "bad-setting": "gradient_clipping=-1 must be greater than 0: give one, such as gradient_clipping=1",
    "bad-directory": "checkpoint_dir '/dev/null' is not a directory: name another with --checkpoint-dir",
    "loader-disagrees": "batch_size=4 in code is not the loader's batch_size=8: drop one of them",
    "no-length": "train_data: Endless has __getitem__ but no length: add __len__",
    "shuffled-stream": "shuffle=True cannot order a stream: shuffle inside the data set, or drop shuffle",
    "no-parameters": "the model has no parameter that requires a gradient",
    "no-data": "fit() got no training data: pass a DataLoader or a dataset",
    "other-model": "is of another model: missing keys 0.weight, 0.bias and 2 more; unexpected keys bias, weight: build",
    "other-shape": "other shapes: weight is [3, 6] in the checkpoint, [4, 6] here, bias is [3] in the checkpoint, [4] here: build the model as it",
}


@pytest.fixture(scope="module")
def mistaken(run_cli_once, tmp_path_factory):
    """Return, for each rank, mistake -> the error that it got.

    One start makes all mistakes that need no checkpoint, one after another.
    """
    out = tmp_path_factory.mktemp("mistakes")
    command = ["train", "--script", JOB, "--nproc-per-node", "2", "--run-dir", out / "run", "--", "mistakes", out]
    done = run_cli_once(command, timeout=120)
    assert done.returncode == 0, done.output[-3000:]
    return [json.loads((out / f"mistakes-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", [case for case in MISTAKES if not case.startswith("other-")])
def test_a_mistake_in_the_script_is_refused_on_every_rank(mistaken, case):
    for found in mistaken:
        assert "Error: " in found[case] and MISTAKES[case] in found[case] and "\n" not in found[case]


@pytest.fixture(scope="module")
def import_of_torch_s():
    """Return the seconds of CPU time to which those of a command are compared, because machines differ by a factor of two."""
    before = os.times()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


# These are found before the fit, on the main process alone, and when the checkpoint is read.
ALONE = ("bad-setting", "bad-directory", "other-model", "other-shape")


@pytest.mark.parametrize("case", [pytest.param(case, marks=() if case in ALONE else FULL) for case in MISTAKES])
def test_a_mistake_in_the_script_is_one_line_and_exit_2(fail, import_of_torch_s, case):
    done = fail(case, 2, fresh=True)
    errors = [line for line in lines(done) if line.startswith("error: ")]
    assert len(errors) == 1 and errors[0] == lines(done)[-1] and MISTAKES[case] in errors[0]
    assert "Traceback" not in done.output
    # The start of two processes, of which the first imports torch, and a training of another model
    assert done.within(4 * import_of_torch_s), (import_of_torch_s, done.output)


def test_a_full_disk_costs_one_checkpoint_and_not_the_run(fail, tmp_path):
    done = fail("full-disk", 0)
    assert done.output.count("step-00000004 could not be saved: No space left on device") == 1
    assert "training continues after failed save 1 of 3 in a row" in done.output
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["step-00000002", "step-00000006", "step-00000008"]


def test_a_save_may_take_longer_than_timeout_s_but_a_rank_that_hangs_in_it_is_noticed(fail, tmp_path):
    """Takes 12 s: two slow writes of 3 s each, and 3 s until the other rank stops waiting for the hanging one."""
    done = fail("slow-disk", 1)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000004"]
    assert lines(done)[-1].startswith("error: rank 0 did not respond for 2 s (timeout_s)"), done.output


@pytest.mark.parametrize(("flag", "name"), [("--run-dir", "run directory"), ("--checkpoint-dir", "checkpoint_dir")])
def test_a_directory_that_cannot_be_used_is_refused_before_any_worker(run_cli, tmp_path, monkeypatch, flag, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    for where in ("/dev/null", "file", "file/below", "/proc/nowhere"):
        done = run_cli(
            ["train", "--script", JOB, "--nproc-per-node", "2", flag, where, "--", "no-data", str(tmp_path)], fresh=True
        )
        assert done.returncode == 2 and done.within(3), done.output
        assert len(lines(done)) == 1 and lines(done)[0].startswith(f"error: {name} '{where}' "), done.output
        assert "not a directory" in done.stderr or "cannot be written" in done.stderr
