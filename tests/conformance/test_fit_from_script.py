"""`fit` in a plain script without a guard starts workers, runs the body of the script once, and brings all results back."""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from distributed.runs.temporary import remove_leftovers
from tests.conftest import Started, clean_environment, poll

JOBS = Path(__file__).parent / "jobs"
pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Return a directory where the script ran in mode `all` (fits of 2, 1 and 1 epochs with other calls between) and in mode `three`."""
    directory = tmp_path_factory.mktemp("script")
    for mode in ("all", "three"):
        script = [sys.executable, str(JOBS / "plain/script.py"), mode]
        # The end of a forked command would not show what goes wrong when Python clears its modules.
        is_fresh = mode == "three"
        command = Started(script, tmp_path_factory.mktemp("commands"), directory, clean_environment(), is_fresh)
        try:
            done = command.finish(250)
        finally:
            command.kill()
        assert done.returncode == 0, done.output
        (directory / f"out-{mode}.txt").write_text(done.stdout)
        (directory / f"err-{mode}.txt").write_text(done.stderr)
    return directory


@pytest.fixture(scope="module")
def facts(home):
    return json.loads((home / "facts-all.json").read_text())


def test_the_body_runs_once(home):
    assert (home / "runs-of-the-body.txt").read_text() == "xx"  # two modes


def test_workers_have_the_callers_directory_and_arguments(home, facts):
    assert facts["seen"] == {"cwd": str(home), "argv": [str(JOBS / "plain/script.py"), "all"], "file": "__main__"}


def test_the_history_comes_back(home, facts):
    assert [row["epoch"] for row in facts["rows"]] == [1, 2, 3]
    assert facts["best"] == facts["trainer_best"] == max(row["val_accuracy"] for row in facts["rows"][:2])
    assert facts["frame"] == 2 and facts["total_time"] > 0
    assert (home / "curves.png").stat().st_size > 1000


def test_the_model_has_the_weights_of_the_last_checkpoint_bit_for_bit(home, facts):
    stored = load_file(home / facts["checkpoint"] / "model" / "model.safetensors")
    mine = load_file(home / "first-all.safetensors")
    assert stored.keys() == mine.keys() and len(mine) == 4
    assert all((stored[name] == mine[name]).all() for name in mine)


def test_a_second_fit_goes_on_as_one_longer_fit_would(home, facts):
    """The script calls evaluate, predict and save between the two fits."""
    one = json.loads((home / "facts-three.json").read_text())
    assert facts["steps"] == one["steps"] == 9
    assert facts["callback"] == one["callback"] == 9
    assert facts["second_run_dir"] == facts["run_dir"]
    assert (home / "second.safetensors").read_bytes() == (home / "first-three.safetensors").read_bytes()
    drop = {"samples_per_second"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in facts["rows"]] == [
        {k: v for k, v in row.items() if k not in drop} for row in one["rows"]
    ]


def test_evaluate_and_predict_run_here_after_a_fit(facts):
    first, again = facts["evaluated"]
    assert first == again
    assert first["accuracy"] == first["right"] == facts["rows"][1]["val_accuracy"]
    assert first["loss"] == pytest.approx(facts["rows"][1]["val_loss"], abs=1e-6)
    assert facts["predicted"] == [31, 3]


def test_another_trainer_uses_fit_2_and_checkpoints_of_its_own(facts):
    assert facts["other"] == str(Path("..", facts["run_dir"], "fit-2"))
    assert facts["other_is_module"]
    assert facts["other_checkpoints"] == ["checkpoints/fit-2/step-00000003/manifest.json"]


def test_a_fit_after_an_evaluation_trains_the_model_that_was_evaluated(home, facts):
    """The evaluation ran in one process, the fit has the batches of two."""
    (checkpoint,) = (home / "elsewhere/checkpoints/fit-2").glob("step-*")
    stored, mine = (
        load_file(path) for path in (checkpoint / "model/model.safetensors", home / "elsewhere/other.safetensors")
    )
    assert stored.keys() == mine.keys() and all((stored[name] == mine[name]).all() for name in mine)


def test_a_fit_after_another_trainers_goes_on_too(facts):
    assert facts["third"] == [12, facts["run_dir"]]


def test_a_profiler_that_cannot_see_the_workers_is_told_of(home):
    """One of the four fits runs within a profiler."""
    said = [line for line in (home / "err-all.txt").read_text().splitlines() if line.startswith("warning: ")]
    assert len(said) == 1 and "profiler sees this process only" in said[0] and "nproc_per_node=1" in said[0]


def test_hyperparameters_of_a_sweep_are_recorded(home, facts):
    assert "hyperparameters:\n  hidden: 16\n" in (home / facts["run_dir"] / "config.yaml").read_text()


def test_a_sweeps_batch_size_is_stronger_than_the_loaders(home, facts):
    written = (home / facts["run_dir"] / "config.yaml").read_text()
    assert "\nbatch_size: 8  # sweep\n" in written and "\nglobal_batch_size: 32  # derived\n" in written
    assert facts["steps"] == 9  # 3 epochs of 90 samples, 32 in an update; the loader's batch size would make 24 steps


def test_the_screen_shows_rank_0_once(home):
    text = (home / "out-three.txt").read_text()
    assert len(re.findall(r"^epoch \d", text, re.MULTILINE)) == 3
    assert text.count("backend pytorch-ddp, 2 processes on cpu") == 1
    assert (home / "err-three.txt").read_text() == ""


# ------------------------------------------------------------------ what goes wrong

SCRIPT = """
import os, sys, time
import torch
from distributed import Callback, Trainer
from distributed.errors import ConfigError, DistributedError, ResourceError, TrainingError

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return SIZE
    def __getitem__(self, index):
        AT_SAMPLE
        return torch.full((3,), index / 10), torch.tensor(index % 2)

class Watch(Callback):
    def on_step_end(self, state, result):
        open(f"step-{state.step}", "w").close()
        AT_STEP

torch.manual_seed(1)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
trainer = Trainer(model, nproc_per_node=2, batch_size=4, callbacks=[Watch()], checkpoint_every_n_steps=3, SETTINGS)
FIT
"""


def write(
    directory: Path, at_step="pass", at_sample="pass", fit="trainer.fit(Data())", size=64, settings="epochs=2"
) -> Path:
    """Write the script above with its placeholders filled in."""
    holes = {"SIZE": str(size), "SETTINGS": settings, "AT_STEP": at_step, "AT_SAMPLE": at_sample, "FIT": fit}
    text = SCRIPT
    for hole, value in holes.items():
        indent = re.search(rf"^( *).*{hole}", SCRIPT, re.MULTILINE)[1]
        text = text.replace(hole, textwrap.dedent(value).strip().replace("\n", "\n" + indent))
    path = directory / "script.py"
    path.write_text(text)
    return path


def weights(run: Path) -> bytes:
    """Return the bytes of the weights in the last checkpoint."""
    return (sorted(run.glob("checkpoints/step-*"))[-1] / "model" / "model.safetensors").read_bytes()


def test_the_cause_in_a_worker_is_the_exception_here_and_the_last_thing_on_the_screen(run_python, tmp_path):
    script = write(tmp_path, at_sample="if index == 9: raise KeyError('no such picture')")

    done = run_python([script], cwd=tmp_path)

    assert done.returncode == 1, done.output
    last = done.stderr.splitlines()[-12:]
    assert any(f'File "{script}", line 11, in __getitem__' in line for line in last), done.output
    assert last[-1] == "KeyError: 'no such picture'"
    assert "\ndistributed.errors.TrainingError: rank " in done.stderr
    assert done.stderr.count("KeyError: 'no such picture'") == 2  # once in the headline and once in the traceback


def test_the_exception_has_the_class_and_message_of_the_workers_and_the_trainer_can_fit_again(run_python, tmp_path):
    fit = """
        for kind in ("ConfigError", "ResourceError", "ValueError", ""):
            os.environ["KIND"] = kind
            try:
                print("again", trainer.fit(Data()).steps)
            except DistributedError as error:
                print("caught", type(error).__name__, error)
    """
    at_step = """
        if state.step == 2 and os.environ["RANK"] == "1" and os.environ["KIND"]:
            kinds = {"ConfigError": ConfigError, "ResourceError": ResourceError, "ValueError": ValueError}
            raise kinds[os.environ["KIND"]]("not here: go there")
    """

    done = run_python([write(tmp_path, at_step=at_step, fit=fit)], cwd=tmp_path)

    assert done.returncode == 0, done.output
    lines = [line for line in done.stdout.splitlines() if line.startswith(("caught", "again"))]
    lines = [line.partition(" (whole log: ")[0] for line in lines]
    assert lines == [
        "caught ConfigError not here: go there",
        "caught ResourceError not here: go there",
        "caught TrainingError rank 1 failed with ValueError: not here: go there",
        "again 16",
    ], done.output
    assert done.stderr == ""


def test_a_refusal_is_raised_before_anything_starts(run_python, tmp_path):
    (tmp_path / "runs").write_text("in the way")

    done = run_python([write(tmp_path)], fresh=True, cwd=tmp_path)

    assert done.returncode == 1 and done.within(10)
    assert done.stderr.splitlines()[-1].startswith("distributed.errors.ConfigError: run directory 'runs")


def test_what_cannot_be_sent_is_said(run_python, tmp_path):
    done = run_python(
        [write(tmp_path, fit="data = Data()\ndata.rows = (row for row in [])\ntrainer.fit(data)")], cwd=tmp_path
    )

    assert done.returncode == 1
    assert "ConfigError: the trainer cannot be sent to its workers" in done.stderr.splitlines()[-1]


SLOWLY = "time.sleep(0.05)"  # in each step, so that signals arrive in the middle of the fit


def test_killing_the_caller_leaves_nobody_and_no_data(start, tmp_path):
    (tmp_path / "tmp").mkdir()
    script = write(tmp_path, at_step=SLOWLY, size=4000)
    command = start([sys.executable, script], cwd=tmp_path, env={"TMPDIR": str(tmp_path / "tmp")})
    command.wait_for(lambda: (tmp_path / "step-3").exists())
    assert len(command.alive()) == 5  # caller, launcher, agent, two workers

    command.signal(signal.SIGKILL)

    command.process.wait()
    poll(lambda: command.alive() == [], 5, lambda: f"still there: {command.alive()}")
    files = [path for path in (tmp_path / "tmp").glob("distributed*/**/*") if path.is_file()]
    # The files hold the addresses of workers, and no data.
    assert all(path.stat().st_size < 10_000 for path in files), files

    def swept():  # the next start does the same; a process without memory may still be ending
        remove_leftovers(tmp_path / "tmp")
        return list((tmp_path / "tmp").glob("distributed*")) == []

    poll(swept, 5, lambda: f"left: {list((tmp_path / 'tmp').iterdir())}")


def test_a_killed_worker_is_replaced_the_result_is_the_same_and_no_temporary_file_is_left(run_python, tmp_path):
    first_of_rank_1 = "os.environ['RANK'] == '1' and os.environ['TORCHELASTIC_RESTART_COUNT'] == '0'"
    kill = f"if state.step == 5 and {first_of_rank_1}: os.kill(os.getpid(), 9)"
    found = []
    for name, at_step in (("clean", "pass"), ("hurt", kill)):
        (tmp_path / name / "tmp").mkdir(parents=True)
        environ = {"TMPDIR": str(tmp_path / name / "tmp")}
        done = run_python([write(tmp_path / name, at_step=at_step)], cwd=tmp_path / name, env=environ)
        assert done.returncode == 0, done.output
        assert list((tmp_path / name / "tmp").glob("distributed*")) == []
        assert ("was killed by signal 9 (SIGKILL): restarting (1 of 3)" in done.stderr) == (name == "hurt")
        found.append(weights(next((tmp_path / name / "runs").iterdir())))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, -2),
        *(pytest.param(each, 143, marks=pytest.mark.full) for each in (signal.SIGTERM, signal.SIGHUP)),
    ],
)
def test_a_signal_saves_and_what_was_trained_comes_back(start, tmp_path, number, code):
    fit = """
        try:
            trainer.fit(Data())
        except (KeyboardInterrupt, SystemExit):
            trainer.save("stopped.safetensors")
            raise
    """
    script = write(tmp_path, at_step=SLOWLY, size=4000, fit=fit)
    command = start([sys.executable, script], cwd=tmp_path)
    command.wait_for(lambda: (tmp_path / "step-4").exists())

    command.signal(number)
    command.signal(number)
    done = command.finish(120)

    assert done.returncode == code, done.output
    (run,) = (tmp_path / "runs").iterdir()
    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "interrupted" and result["steps"] >= 4
    assert (run / result["checkpoint"] / "manifest.json").exists()
    path = Path(run.relative_to(tmp_path), result["checkpoint"])
    assert f"to continue it:\n  Trainer(..., resume_from_checkpoint='{path}')\n" in done.stdout
    saved, stored = (
        load_file(tmp_path / "stopped.safetensors"),
        load_file(run / result["checkpoint"] / "model" / "model.safetensors"),
    )
    assert all((saved[name] == stored[name]).all() for name in stored)
    assert ("KeyboardInterrupt" in done.stderr) == (number == signal.SIGINT)
    assert "TrainingInterrupted" not in done.stderr


def test_after_an_interrupt_the_trainer_goes_on_where_it_was(start, tmp_path):
    fit = """
        for _ in range(2):
            try:
                history = trainer.fit(Data())
            except KeyboardInterrupt:
                print("interrupted", flush=True)
        print("steps", history.steps, len(history.rows))
    """
    at_step = "time.sleep(0.05 if state.step < 6 else 0)"
    command = start([sys.executable, write(tmp_path, at_step=at_step, fit=fit)], cwd=tmp_path)
    command.wait_for(lambda: (tmp_path / "step-2").exists())
    command.signal(signal.SIGINT)

    done = command.finish(120)

    assert done.returncode == 0, done.output
    assert "interrupted" in done.stdout
    assert "steps 16 2" in done.stdout, done.output  # 2 epochs more, counted from epoch 0


def test_an_interrupt_before_the_workers_run_is_clean(start, tmp_path):
    script = write(tmp_path, fit="open('calling', 'w').close()\ntrainer.fit(Data())", size=4000)
    command = start([sys.executable, script], cwd=tmp_path)
    command.wait_for(lambda: (tmp_path / "calling").exists())

    command.signal(signal.SIGINT)
    done = command.finish(120)

    assert done.returncode in (-2, 1), done.output
    assert done.stderr.count("Traceback") <= 1, done.output
    assert done.stderr.splitlines()[-1] == "KeyboardInterrupt"


def test_a_module_that_trains_when_it_is_imported_for_its_class_is_refused(run_python, tmp_path):
    (tmp_path / "model.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\nfrom distributed import Trainer\n"
        "class Net(torch.nn.Linear): pass\n"
        "data = TensorDataset(torch.randn(8, 4), torch.randn(8, 1))\n"
        "Trainer(Net(4, 1), nproc_per_node=2, device='cpu').fit(data)\n"
    )
    (tmp_path / "use.py").write_text("from model import Net\n")
    alone, imported = (run_python([name], cwd=tmp_path) for name in ("model.py", "use.py"))
    assert alone.returncode == 0, alone.output
    assert imported.returncode == 1 and "Error: " in imported.stderr, imported.output
    said = imported.stderr.splitlines()[-1]
    assert "model.py, line 6, in <module>, calls fit() while a worker imports this module to load its classes" in said
    assert len(list((tmp_path / "runs").glob("*/metrics.jsonl"))) == 1
