"""After a signal all ranks save at the same step and leave no process. Started again, the run ends in the same bits."""

from __future__ import annotations

import json
import re
import shlex
import signal
import sys
import textwrap
import time

import pytest

from distributed.launching.stopping import Stop
from tests.conformance.runs import FULL, STEPS, arguments, assert_same, digests, events, newest, samples

pytestmark = pytest.mark.timeout(600)
SLOWLY = {"SLOW": "0.03"}  # seconds of a micro-batch; ranks need some steps to agree on a signal
CLI = [sys.executable, "-m", "distributed.cli"]


@pytest.fixture(scope="module")
def clean(tmp_path_factory, run_cli_once):
    """Return the directory of an undisturbed run."""
    out = tmp_path_factory.mktemp("clean")
    done = run_cli_once(arguments(out))
    assert done.returncode == 0, done.output
    return out


def check_stopped(done, out, code):
    """Assert that the run ended with exit code `code` and saved at a step that all ranks had made. Return the step."""
    assert done.returncode == code, done.output
    assert "Traceback" not in done.output, done.output
    result = json.loads((out / "run" / "result.json").read_text())
    checkpoint = newest(out / "run")
    assert result["status"] == "interrupted"
    assert json.loads((checkpoint / "manifest.json").read_text())["step"] == result["steps"] < STEPS
    assert events(out / "run")[-1] == "preempted"
    assert "worker_failed" not in events(out / "run")
    used = samples(out)
    assert max(used, default=0) == result["steps"]
    assert all(len(ranks) == 2 for ranks in used.values())
    return result["steps"]


@pytest.mark.parametrize(
    ("fault", "code", "latest"),
    [
        (["TERM-launcher-step", 4, 1], 143, 12),
        pytest.param(["INT-launcher-validation", 3, 0], 130, 14, marks=FULL),
        (["USR1-launcher-data", 1, 1], 143, 7),  # the signal comes while the first batch is read
        (["TERM-step", 8, 1], 143, 16),  # the signal goes to one worker only
        (["INT-launcher-save", 5, 0], 130, 12),  # the signal comes in the middle of a checkpoint
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, list) else None,
)
def test_every_rank_stops_at_the_same_step_and_a_resume_changes_no_bit(run_cli, tmp_path, clean, fault, code, latest):
    workers = 1 if "data" in fault[0] else 0

    done = run_cli(arguments(tmp_path, [fault], workers=workers), env=SLOWLY)
    step = check_stopped(done, tmp_path, code)
    shown = re.search("^to continue it:\n  (.*)$", done.stdout, re.MULTILINE)
    command, _, own = " ".join(arguments(tmp_path, [fault], workers=workers)).partition(" -- ")
    again = run_cli(arguments(tmp_path, [], "--resume", workers=workers))

    assert step <= latest
    run_dir = f" --run-dir {tmp_path / 'run'}"
    words = f"-m distributed.cli {command.replace(run_dir, '')}{run_dir} --resume -- {own}"
    assert shown is not None, done.stdout
    python, *rest = shlex.split(shown[1])
    assert python in ("python", sys.executable) and " ".join(rest) == words
    assert again.returncode == 0, again.output
    assert f"resumed from step-{step:08d}" in again.stdout
    assert digests(newest(tmp_path / "run")) == digests(newest(clean / "run"))
    assert samples(tmp_path) == samples(clean)


def test_a_run_that_max_steps_cut_off_has_a_row_for_it_and_goes_on_bit_for_bit(run_cli, tmp_path, clean):
    done = run_cli(arguments(tmp_path, [], "--max-steps", "10"))
    assert done.returncode == 0, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    rows = json.loads((newest(tmp_path / "run") / "state.json").read_text())["train"]["rows"]
    assert (result["steps"], result["epochs"]) == (10, 1)
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 7), (2, 10)]
    assert result["final_metrics"]["val_loss"] == rows[1]["val_loss"] != rows[0]["val_loss"]
    assert re.search(r"^epoch 2/3 .*val_loss", done.stdout, re.MULTILINE)

    again = run_cli(arguments(tmp_path, [], "--resume"))

    assert again.returncode == 0, again.output
    assert "resumed from step-00000010: step 10, epoch 2" in again.stdout
    assert_same(tmp_path, clean)


def test_a_worker_that_dies_for_good_is_in_the_result_and_a_script_that_wants_quiet_has_it(run_cli, tmp_path):
    quiet = {"SETTINGS": '{"verbose": false}'}

    done = run_cli(arguments(tmp_path, [["step", 11, 1]], "--max-restarts", "0"), env=quiet)

    assert done.returncode == 1, done.output
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["status"], result["checkpoint"]) == ("failed", "checkpoints/step-00000009")
    assert result["error"] == "rank 1 was killed by signal 9 (SIGKILL)"
    assert result["steps"] in (9, 11)  # the step of the checkpoint, or that in which rank 0 lost rank 1
    assert "run directory" in done.stdout  # from the launcher, which did not know the setting of the script
    assert not re.search("^(step|epoch|backend) ", done.stdout, re.MULTILINE), done.stdout


def test_a_second_signal_does_no_harm(start, tmp_path):
    command = start([*CLI, *arguments(tmp_path, [])], env=SLOWLY)
    command.wait_for(lambda: len(samples(tmp_path)) >= 2)

    command.signal(signal.SIGTERM)
    command.signal(signal.SIGTERM)
    command.wait_for(lambda: "stopping after this step" in command.output)
    command.signal(signal.SIGINT)
    done = command.finish(120)

    check_stopped(done, tmp_path, 143)


def test_only_ctrl_c_and_only_the_third_one_kills():
    stop = Stop(60.0)
    assert [stop.add(number) for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT)] == [True, False, False]
    stop.add(signal.SIGINT)
    assert not stop.is_due() and stop.exit_code == 143
    stop.add(signal.SIGINT)
    assert stop.is_due()


def test_a_third_interrupt_kills_at_once(start, tmp_path):
    command = start([*CLI, *arguments(tmp_path, [])], env={"SLOW": "30"})
    command.wait_for(lambda: "resumed" in command.output or "results depend" in command.output)

    for seen in ("stopping after this step", "a third Ctrl-C kills", "unsaved progress is lost"):
        command.signal(signal.SIGINT)
        command.wait_for(lambda: seen in command.output)  # noqa: B023
    done = command.finish(120)

    assert done.returncode == 130, done.output


def test_two_ranks_save_by_the_clock_at_the_same_steps(run_cli, tmp_path, clean):
    flags = ["--checkpoint-every-s", "0.3", "--set", "checkpoint_frequency=null", "--checkpoint-every-n-steps", "1000"]

    done = run_cli(arguments(tmp_path, [["step", 16, 1]], *flags), env=SLOWLY)

    assert done.returncode == 0, done.output
    assert events(tmp_path / "run").count("checkpoint_saved") >= 3
    assert events(tmp_path / "run").count("resumed") == 1
    assert_same(tmp_path, clean)


REPEAT = """
import os, sys
import torch, torch._dynamo, torch.nn.parallel.distributed
from distributed.launching.forkserver import launch
from distributed.launching.request import LaunchRequest
from distributed.config.registry import backend_entry

codes = []
for number in range(int(sys.argv[2])):
    if (child := os.fork()) == 0:
        request = LaunchRequest(f"run-{number}", script=sys.argv[1], nproc_per_node=2, verbose=False,
                                preload=backend_entry("pytorch-ddp").preload, live=False)
        os._exit(launch(request))
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("codes", codes)
sys.exit(any(codes))
"""
SHORT = """
import torch
from distributed import Trainer
data = torch.utils.data.TensorDataset(torch.randn(24, 4), torch.randint(0, 2, (24,)))
Trainer(torch.nn.Linear(4, 2), batch_size=4, epochs=1).fit(data, data)
"""


@pytest.mark.parametrize("count", ["5", pytest.param("20", marks=pytest.mark.full)])
def test_a_finished_run_never_exits_non_zero(run_python, tmp_path, count):
    """Many short runs follow each other. Threads of torch that outlived the process group used to abort one process in eight."""
    (tmp_path / "repeat.py").write_text(textwrap.dedent(REPEAT))
    (tmp_path / "short.py").write_text(textwrap.dedent(SHORT))
    done = run_python(["repeat.py", "short.py", count], cwd=tmp_path, timeout=100)

    assert done.returncode == 0, done.output
    assert done.stdout.count("0, ") + 1 == int(count)
    assert "terminate called" not in done.output


STUBBORN = """
import os, pathlib, signal, sys
pathlib.Path(sys.argv[1], os.environ["RANK"]).touch()
signal.signal(signal.SIGINT, signal.SIG_IGN)
while True:  # as an import that takes long
    pass
"""
ON_ONE_CORE = (
    "import os, sys; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); os.execv(sys.executable, sys.argv[1:])"
)


def test_ctrl_c_while_many_workers_are_starting_ends_them_all_in_seconds(start, tmp_path):
    """The first workers keep the processor busy, so that the others have not started. No worker would leave by itself."""
    (tmp_path / "stubborn.py").write_text(STUBBORN)
    begun = tmp_path / "begun"
    begun.mkdir()
    train = [*CLI, "train", "--script", "stubborn.py", "--nproc-per-node", "48", "--device", "cpu", "--", str(begun)]
    command = start([sys.executable, "-c", ON_ONE_CORE, *train], cwd=tmp_path)
    command.wait_for(lambda: len(list(begun.iterdir())) >= 4)
    assert "starting 48 workers (cpu)" in command.output
    assert "warning: 48 processes share 1 core, more than 4 on each" in command.output

    asked = time.monotonic()
    command.signal(signal.SIGINT)
    done = command.finish(30)

    assert done.returncode == 130 and "Traceback" not in done.output, done.output
    assert len(list(begun.iterdir())) < 48, "all had begun: this test shows nothing"
    assert time.monotonic() - asked < 4.5  # 3 s on an idle machine; 5 s or more without the kill
