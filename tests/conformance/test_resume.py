"""A run that is killed at any moment ends in the same bits, although the script has no code for samplers, generators or steps."""

from __future__ import annotations

import itertools
import json
import random
import shutil
import signal
import sys

import numpy
import pytest
from safetensors.numpy import load_file

from distributed import Trainer
from distributed.errors import CheckpointError
from tests.conformance.runs import FULL, JOB, STEPS, arguments, assert_same, digests, events, newest, samples
from tests.conftest import needs_backend, poll

pytestmark = pytest.mark.timeout(600)
EPOCH = 7  # number of steps


@pytest.fixture(scope="module")
def clean(tmp_path_factory, run_cli_once):
    """Return the directory of an undisturbed run."""
    out = tmp_path_factory.mktemp("clean")
    done = run_cli_once(arguments(out))
    assert done.returncode == 0, done.output
    return out


@pytest.fixture(scope="module")
def one_epoch(tmp_path_factory, run_cli_once):
    """Return the directory of a run that ended after the first epoch. Tests work on copies of it."""
    out = tmp_path_factory.mktemp("one-epoch")
    done = run_cli_once(arguments(out, [], "--epochs", "1"))
    assert done.returncode == 0, done.output
    return out


def trials(seed: int) -> list[list[object]]:
    """Return faults of every kind at random places in one run, in an order in which each is reached."""
    draw = random.Random(seed)
    late = sorted(draw.sample(range(EPOCH + 2, STEPS + 1), 2))
    return [
        ["step", 1, draw.randrange(2)],
        ["save", draw.randrange(1, 12), 0],
        ["step", EPOCH, draw.randrange(2)],
        ["validation", draw.randrange(1, 9), draw.randrange(2)],
        ["data", draw.randrange(5, 15), draw.randrange(2)],
        *(["step", step, draw.randrange(2)] for step in late),
    ]


@pytest.mark.parametrize(("seed", "workers"), [pytest.param(1, 0, marks=FULL), (2, 2)])
def test_a_killed_worker_changes_no_bit(run_cli, tmp_path, clean, seed, workers):
    faults = trials(seed)

    done = run_cli(arguments(tmp_path, faults, workers=workers), timeout=100)

    assert done.returncode == 0, done.output
    assert events(tmp_path / "run").count("restarted") == len(faults)
    assert_same(tmp_path, clean)


def test_a_kill_in_a_validation_logs_nothing_twice(run_cli, tmp_path, clean):
    """The kill strikes in the validation of the second epoch. The step is saved afterwards, with the measured values."""
    done = run_cli(arguments(tmp_path, [["validation", 20, 1]], "--checkpoint-every-n-steps", str(EPOCH)))

    assert done.returncode == 0, done.output
    assert "resumed from step-00000007: step 7, epoch 1" in done.stdout
    assert_same(tmp_path, clean)


def hung(done, out):
    """Return the warnings about ranks that hang, and the text of each rank's stacks for each of them."""
    warnings = [line for line in done.stderr.splitlines() if " hang" in line]
    directories = sorted((out / "run" / "logs").glob("stacks-*"))
    assert len(warnings) == len(directories) and all(map(str.__contains__, warnings, map(str, directories)))
    return warnings, [[(each / f"rank-{rank}.txt").read_text() for rank in (0, 1)] for each in directories]


def test_a_rank_that_hangs_is_named_and_changes_no_bit(run_cli, tmp_path, clean):
    """Rank 1 is stopped in a callback, then rank 0 never returns from a training step, where both ranks are at the same place."""
    faults = [["STOP-step", 8, 1], ["loop-forward", 13, 0]]

    done = run_cli(arguments(tmp_path, faults, "--set", "hang_timeout=3"))

    assert done.returncode == 0, done.output
    (stopped, looping), stacks = hung(done, tmp_path)
    assert "rank 1 hangs in step 8 (callbacks)" in stopped and "it is stopped (SIGSTOP)" in stopped
    assert "rank 0 hangs in step 14 (training)" in looping and f"it is at {JOB}, line " in looping
    assert stopped.endswith(": restarting (1 of 20)") and looping.endswith(": restarting (2 of 20)")
    assert "did not answer: it is stopped" in stacks[0][1] and "resume.py" in stacks[0][0]
    assert " in pass_\n" in stacks[1][0] and " in pass_\n" not in stacks[1][1] and " in backward\n" in stacks[1][1]
    assert events(tmp_path / "run").count("restarted") == 2
    assert_same(tmp_path, clean)


def test_a_save_that_hangs_has_a_limit_of_its_own(run_cli, tmp_path, clean):
    """`hang_timeout` itself is 60 s."""
    done = run_cli(arguments(tmp_path, [["loop-save", 8, 1]], "--set", "hang_timeout_slow=4"), timeout=60)
    assert done.returncode == 0, done.output
    (warning,), _ = hung(done, tmp_path)
    assert "rank 1 hangs in step " in warning and "no progress for 4 s (hang_timeout_slow=4)" in warning
    assert_same(tmp_path, clean)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["loop-step", "loop-data", "STOP-forward", "loop-validation", "loop-save"])
def test_a_rank_may_hang_anywhere(run_cli, tmp_path, clean, kind):
    """In a validation and in a save it takes ten times as long until it is noticed."""
    number = {"loop-step": 10, "STOP-forward": 17}.get(kind, 8)
    done = run_cli(arguments(tmp_path, [[kind, number, 0]], "--set", "hang_timeout=3"))
    assert done.returncode == 0, done.output
    warnings, _ = hung(done, tmp_path)
    assert len(warnings) == 1 and "warning: rank 0 hangs in step " in warnings[0], done.output
    assert_same(tmp_path, clean)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["single", "fsdp", "deepspeed", "horovod", "ray"])
def test_a_rank_that_hangs_is_named_on_every_backend(run_cli, tmp_path, backend):
    needs_backend(backend)
    world = 1 if backend == "single" else 2
    flags = ["--backend", backend, "--set", "hang_timeout=3"]
    done = run_cli(arguments(tmp_path, [["loop-forward", 16, 0], ["STOP-step", 15, world - 1]], *flags, world=world))
    assert done.returncode == 0, done.output
    warnings = [line for line in done.stderr.splitlines() if " hangs in step " in line]
    assert [line.split(" hangs")[0] for line in warnings] == ["warning: rank 0", f"warning: rank {world - 1}"], (
        done.output
    )


SLOW_PARTS = """
import os, time
import torch
from torch.utils.data import TensorDataset
from distributed import Callback, Trainer

fsync, slept, rank = os.fsync, [], int(os.environ["RANK"])

def once(what, seconds=3.0):
    if what not in slept:
        slept.append(what)
        time.sleep(seconds)

class Slow(Callback):
    def on_train_start(self, state):
        once("start")
    def on_step_end(self, state, result):
        time.sleep(0.25 if state.step > 6 else 0.1)  # slower than the median
    def on_epoch_end(self, state, row):
        once(("epoch", state.epoch))
    def on_checkpoint(self, state, path):
        once(("checkpoint", state.step))

def step(model, batch):
    once(("first update" if model.training else "validation", rank))
    return model(batch[0]).square().mean()

def slow_fsync(fd):
    if rank == 0:
        once("save")
    fsync(fd)

os.fsync = slow_fsync
data = TensorDataset(torch.randn(32, 4))
trainer = Trainer(torch.nn.Linear(4, 1), training_step=step, callbacks=[Slow()], epochs=2, batch_size=2)
trainer.fit(data, data)
once("between fits", 9.0)
trainer.fit(data, data, epochs=1)
"""


@pytest.mark.full
def test_what_takes_long_is_no_hang(run_cli, tmp_path):
    """Takes 35 s. `hang_timeout` is 1 s, and 10 s for what is slow by its nature."""
    (tmp_path / "job.py").write_text(SLOW_PARTS)
    done = run_cli(
        ["train", "--script", "job.py", "--nproc-per-node", "2", "--run-dir", "run", "--set", "hang_timeout=1"], cwd=tmp_path
    )  # fmt: skip
    assert done.returncode == 0, done.output
    assert "worker_failed" not in events(tmp_path / "run")


def test_a_failure_that_repeats_at_the_same_step_is_not_restarted_for_ever(run_cli, tmp_path):
    done = run_cli(arguments(tmp_path, [["step", 8, 1]] * 9))
    assert done.returncode == 1, done.output
    note = "stopped, because the same failure came 3 times at step 8 (max_restarts=20)"
    assert done.stderr.splitlines()[-1] == f"error: rank 1 was killed by signal 9 (SIGKILL); {note}"
    assert [events(tmp_path / "run").count(name) for name in ("worker_failed", "restarted")] == [3, 2]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["error"].endswith(note)


def test_each_sample_is_used_once_an_epoch(clean):
    used = samples(clean)
    for epoch in range(3):
        steps = range(epoch * EPOCH + 1, (epoch + 1) * EPOCH + 1)
        assert flat(rank for step in steps for rank in used[step].values()) == list(range(103))
    assert used[1] != used[EPOCH + 1]  # each epoch has a new order


def test_a_killed_launcher_leaves_nobody_and_a_resume_changes_no_bit(start, tmp_path, clean):
    faults = [["launcher-step", 5, 1], ["launcher-save", 8, 0], ["launcher-data", 9, 1], ["launcher-validation", 2, 1]]
    (tmp_path / "run").mkdir()  # so that the first command can have --resume too
    for fault in faults:  # the same command each time, as a scheduler repeats it
        workers = 1 if "data" in fault[0] else 0  # the read hangs in a loader process
        command = start(
            [sys.executable, "-m", "distributed.cli", *arguments(tmp_path, [fault], "--resume", workers=workers)]
        )
        assert command.process.wait(30) == -signal.SIGKILL, command.output
        poll(lambda: command.alive() == [], 4, lambda: f"still there: {command.alive()}")  # noqa: B023

    done = start([sys.executable, "-m", "distributed.cli", *arguments(tmp_path, [], "--resume")]).finish(120)

    assert done.returncode == 0, done.output
    assert_same(tmp_path, clean)


@pytest.mark.parametrize("world", [pytest.param(1, marks=FULL), 3])
def test_another_number_of_processes_goes_on_with_the_same_updates(
    run_cli, run_cli_once, start, tmp_path, world, elastic
):
    flags = ["--global-batch-size", "16", "--dtype", "float64"]
    command = [*arguments(tmp_path, [["launcher-step", 10, 0]], *flags), "--float64"]
    started = start([sys.executable, "-m", "distributed.cli", *command])
    assert started.process.wait(30) == -signal.SIGKILL, started.output
    poll(lambda: started.alive() == [], 5, lambda: f"still there: {started.alive()}")

    done = run_cli([*arguments(tmp_path, [], *flags, "--resume", world=world), "--float64"])

    assert done.returncode == 0, done.output
    assert "resumed from step-0000000" in done.stdout
    here, there = (load_file(newest(out / "run") / "model" / "model.safetensors") for out in (tmp_path, elastic))
    assert max(numpy.abs(here[name] - there[name]).max() for name in there) < 1e-9
    mine, theirs = samples(tmp_path), samples(elastic)
    for step in range(1, STEPS + 1):
        ranks = range(world if step > 9 else 2)
        seen = flat(mine[step][rank] for rank in ranks if rank in mine[step])
        if world > 2 and step == 10:  # DDP learns its bucket order in a pass without weight, before the first update
            seen = sorted(set(seen))
        assert seen == flat(theirs[step].values()), step


def flat(parts):
    """Return all parts in order."""
    return sorted(itertools.chain.from_iterable(parts))


@pytest.fixture(scope="module")
def elastic(tmp_path_factory, run_cli_once):
    """Return the undisturbed float64 run."""
    out = tmp_path_factory.mktemp("elastic")
    done = run_cli_once([*arguments(out, [], "--global-batch-size", "16", "--dtype", "float64"), "--float64"])
    assert done.returncode == 0, done.output
    return out


def test_a_finished_run_copied_elsewhere_goes_on_for_more_epochs(run_cli, tmp_path, clean, one_epoch):
    moved = tmp_path / "moved"
    shutil.copytree(one_epoch, moved)

    done = run_cli(arguments(moved, [], "--resume"))

    assert done.returncode == 0, done.output
    assert_same(moved, clean)


def test_a_flipped_bit_is_noticed_and_the_checkpoint_before_is_used(run_cli, tmp_path, clean, one_epoch):
    shutil.copytree(one_epoch, tmp_path, dirs_exist_ok=True)
    damaged = newest(tmp_path / "run") / "optimizer" / "optimizer.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 8
    damaged.write_bytes(content)

    done = run_cli(arguments(tmp_path, [], "--resume"))

    assert done.returncode == 0, done.output
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning")]
    assert len(warnings) == 1
    assert "optimizer.safetensors" in warnings[0] and "step 7" in warnings[0]
    assert "resumed from step-00000006" in done.stdout
    assert (tmp_path / "run" / "checkpoints" / "damaged-step-00000007").is_dir()
    assert_same(tmp_path, clean)


def test_the_script_may_ask_for_the_resume(run_cli, tmp_path, clean):
    """The script sets `resume_from_checkpoint=True` and its own checkpoint_dir."""
    settings = {"checkpoint_dir": str(tmp_path / "mine"), "resume_from_checkpoint": True}
    for run, limit in (("first", ["--max-steps", "10"]), ("second", [])):
        done = run_cli(arguments(tmp_path, [], *limit, run=run), env={"SETTINGS": json.dumps(settings)})
        assert done.returncode == 0, done.output

    assert "resumed from step-00000010: step 10, epoch 2" in done.stdout
    (tmp_path / "checkpoints").symlink_to(tmp_path / "mine")
    assert digests(newest(tmp_path)) == digests(newest(clean / "run"))
    assert samples(tmp_path) == samples(clean)


def test_a_path_to_resume_from_may_be_a_run_or_a_checkpoint(run_cli, tmp_path, clean, one_epoch):
    for path in (one_epoch / "run", one_epoch / "run" / "checkpoints" / "step-00000006"):
        out = tmp_path / path.name
        out.mkdir()
        before = sorted(path.rglob("*"))

        done = run_cli(arguments(out, [], "--resume-from-checkpoint", str(path)))

        assert done.returncode == 0, done.output
        assert digests(newest(out / "run")) == digests(newest(clean / "run"))
        assert sorted(path.rglob("*")) == before


def test_a_run_whose_checkpoints_are_not_there_does_not_start_over(run_cli, tmp_path, one_epoch):
    shutil.copytree(one_epoch, tmp_path, dirs_exist_ok=True)
    (tmp_path / "run" / "checkpoints").rename(tmp_path / "elsewhere")

    done = run_cli(arguments(tmp_path, [], "--resume", world=1))

    assert done.returncode == 2, done.output
    assert "saved step-00000007, but there is no checkpoint in" in done.stderr.splitlines()[-1]
    assert "add the --checkpoint-dir of that run" in done.stderr.splitlines()[-1]


def test_what_cannot_be_resumed_is_refused_before_any_worker(run_cli, tmp_path, one_epoch):
    damaged = tmp_path / "damaged"
    shutil.copytree(newest(one_epoch / "run"), damaged)
    (damaged / "state.json").unlink()
    from_parent = f"run directory '{one_epoch}' holds no run to resume: did you mean '{one_epoch / 'run'}'"
    cases = [
        ({"run": "new"}, ["--resume-from-checkpoint", str(tmp_path / "none")], f"no checkpoint at {tmp_path / 'none'}"),
        ({"run": "new"}, ["--resume-from-checkpoint", str(damaged)], "state.json is missing"),
        ({"run": "."}, ["--resume"], from_parent),
    ]
    for where, flags, message in cases:
        done = run_cli(arguments(one_epoch, [], *flags, **where), fresh=True)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.output
        assert message in done.stderr and done.within(3)
    with pytest.raises(CheckpointError, match="resume_from_checkpoint='nowhere': no checkpoint at nowhere"):
        Trainer(lambda: None, resume_from_checkpoint="nowhere")


def test_the_config_of_a_run_starts_it_again(run_cli, tmp_path, clean):
    config = clean / "run" / "config.yaml"

    done = run_cli(["train", "--config", config, "--run-dir", tmp_path / "run", "--", tmp_path, "0", "[]"])

    assert done.returncode == 0, done.output
    assert_same(tmp_path, clean)
