"""`distributed submit slurm`: the file that it writes, and runs on a real SLURM of two nodes."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from distributed.cli.__main__ import run
from distributed.errors import ConfigError, DistributedError, ResourceError
from distributed.launcher.submit import slurm as own_slurm
from tests.conftest import MARK, Finished, Started, patient, poll
from tests.machines import Machines
from tests.slurm import Slurm, needs_slurm

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(800)
SCRIPT = """
import os, time
import torch
from torch.utils.data import TensorDataset
from distributed import Trainer
from distributed.callbacks import Callback

class Wait(Callback):
    def on_step_end(self, state, result):
        time.sleep(0.5 if os.path.exists("slow") else 0.01)
        try:
            os.remove("kill")
        except FileNotFoundError:
            return
        os.kill(os.getpid(), 9)

torch.manual_seed(0)
data = TensorDataset(torch.randn(320, 4, dtype=torch.float64), torch.randn(320, 1, dtype=torch.float64))
trainer = Trainer(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)),
    optimizer=lambda parameters: torch.optim.Adam(parameters), loss_fn=torch.nn.functional.mse_loss, dtype="float64",
    epochs=4, global_batch_size=8, callbacks=[Wait()],
)
trainer.fit(data)
if trainer.is_main_process:
    print("weights", b"".join(p.detach().numpy().tobytes() for p in trainer.model.parameters()).hex())
"""
FLAGS = (
    *("--script", "train.py", "--num-nodes", "2", "--nproc-per-node", "2"),
    *("--device", "cpu", "--run-dir", "shared run"),
)


class Cluster:
    """A SLURM of two machines, and commands in the home of machine 0."""

    def __init__(self, machines: Machines, slurm: Slurm, start: Callable[..., Started]) -> None:
        self.slurm, self._machines, self._start = slurm, machines, start
        self.home = machines.homes[0]
        (self.home / "train.py").write_text(SCRIPT)
        self.run_dir = self.home / "shared run"

    def submit(self, *words: str) -> Finished:
        """Run `distributed submit`. A job gets its environment, without the mark by which processes are found that a command left."""
        argv = [*self._machines.on(0), "env", "-u", MARK, sys.executable, "-m", "distributed.cli", "submit", *words]
        return self._start(argv, env={**self.slurm.env, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}).finish(
            60
        )

    def job(self, *words: str) -> str:
        """Submit the script to two nodes and return the number of the job."""
        done = self.submit("slurm", *FLAGS, *words)
        assert done.returncode == 0, done.output
        return re.match(r"job (\d+) was submitted\n", done.stdout)[1]

    def output(self, number: str) -> str:
        """Return what the job has printed."""
        return "".join(file.read_text() for file in own_slurm.output_files(number, self.run_dir / "job"))

    def events(self) -> list[str]:
        """Return the names of the events of the run."""
        file = self.run_dir / "events.jsonl"
        return [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []

    def wait_for_attempt(self, count: int, number: str) -> None:
        """Wait until the run has started `count` times."""
        poll(lambda: self.events().count("started") == count, patient(60), lambda: self.output(number))

    def wait_for_checkpoint(self, number: str) -> None:
        """Wait until the run has saved once more."""
        before = self.events().count("checkpoint_saved")
        poll(lambda: self.events().count("checkpoint_saved") > before, patient(60), lambda: self.output(number))

    def lose_node(self, lost: int, number: str) -> None:
        """Kill a node, wait until the job is queued again, and start the node."""
        self.slurm.kill_node(lost)
        self.slurm.wait_for(number, "PENDING", seconds=60)
        others = {f"node{each} idle" for each in range(2) if each != lost}
        self.slurm.wait_for_nodes({*others, f"node{lost} down*"})  # the attempt has left both
        self.slurm.start_node(lost)
        self.slurm.wait_for_nodes({*others, f"node{lost} idle"})

    def wait_for_tasks(self, *tasks: str) -> None:
        """Wait until the runs of these tasks of an array have ended."""
        results = [self.run_dir / task / "result.json" for task in tasks]
        poll(
            lambda: all(path.exists() and '"running"' not in path.read_text() for path in results), 120,
            lambda: self.slurm.run("squeue", "--states=all"),
        )  # fmt: skip

    def start_now(self, number: str) -> None:
        """Start a requeued job, which else waits for two minutes. SLURM refuses one in the second in which it was queued again."""
        self.slurm.run("scontrol", "update", f"JobId={number}", "StartTime=now+3")

    def weights(self, number: str, seconds: float = 120) -> str:
        """Wait for the end of the job and return the weights that it printed."""
        self.slurm.wait_for(number, "COMPLETED", seconds=seconds)
        return self.output(number).split("weights ")[1].split()[0]


@pytest.fixture
def cluster(make_machines: Callable[..., Machines], tmp_path: Path, start: Callable[..., Started]) -> Iterator[Cluster]:
    needs_slurm()
    tmp_path.chmod(0o755)
    machines = make_machines(2, are_names_loopback=False)
    slurm = Slurm(machines, tmp_path / "slurm")
    try:
        slurm.start()
        yield Cluster(machines, slurm, start)
    finally:
        slurm.close()


@pytest.fixture(scope="module")
def expected(run_cli_once: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The weights of the script in four processes of one machine."""
    home = tmp_path_factory.mktemp("one")
    (home / "train.py").write_text(SCRIPT)
    done = run_cli_once(["train", "--script", "train.py", "--device", "cpu", "--nproc-per-node", "4"], cwd=home)
    return str(done.stdout.split("weights ")[1].split()[0])


def test_a_job_goes_on_after_the_signal_before_its_time_limit_and_after_a_lost_node_and_its_run_is_shown(
    cluster: Cluster, expected: str
) -> None:
    """The test sends the signal itself. The next one waits until SLURM sends it."""
    (cluster.home / "slow").touch()
    number = cluster.job("--time", "10", "--checkpoint-every-n-steps", "5")
    cluster.wait_for_checkpoint(number)
    cluster.slurm.run("scancel", "--signal=USR1", number)

    cluster.slurm.wait_for(number, "PENDING", seconds=60)
    assert "preempted" in cluster.events() and "finished" not in cluster.events()
    cluster.start_now(number)
    cluster.wait_for_checkpoint(number)
    (cluster.home / "slow").unlink()
    cluster.lose_node(1, number)
    cluster.start_now(number)

    assert cluster.weights(number) == expected
    assert cluster.events().count("started") == 3 and "resumed from step-" in cluster.output(number)
    shown = cluster.submit("status", "shared run").stdout
    assert re.search(rf"^job {number}  COMPLETED  ", shown, re.M), shown
    assert re.search(r"^shared run +finished +pytorch-ddp +2x2 +160 ", shown, re.M), shown
    assert "finished at step 160" in cluster.submit("logs", "shared run").stdout


@pytest.mark.cluster
@pytest.mark.full
def test_before_the_time_limit_the_run_saves_is_queued_again_and_goes_on_bit_for_bit(
    cluster: Cluster, expected: str
) -> None:
    (cluster.home / "slow").touch()
    number = cluster.job("--time", "2", "--save-before", "60")  # SLURM sends the signal up to a minute earlier

    cluster.slurm.wait_for(number, "RUNNING", seconds=30)
    cluster.slurm.wait_for(number, "PENDING", seconds=110)
    assert "preempted" in cluster.events() and "finished" not in cluster.events()
    (cluster.home / "slow").unlink()
    cluster.start_now(number)

    assert cluster.weights(number) == expected
    assert "resumed from step-" in cluster.output(number)


@pytest.mark.cluster
def test_a_killed_process_starts_again_within_the_job_and_stop_saves_and_the_file_continues(
    cluster: Cluster, expected: str
) -> None:
    """A job that was stopped is not queued again."""
    (cluster.home / "slow").touch()
    number = cluster.job()

    cluster.wait_for_attempt(1, number)
    (cluster.home / "kill").touch()
    cluster.wait_for_attempt(2, number)
    assert "was killed by signal 9 (SIGKILL): restarting (1 of 3)" in cluster.output(number)
    assert cluster.slurm.run("squeue", "--noheader", "--format=%i %T") == f"{number} RUNNING"

    assert cluster.submit("stop", "shared run").returncode == 0
    cluster.slurm.wait_for(number, "FAILED", seconds=60)
    assert [path.name for path in (cluster.run_dir / "checkpoints").glob("step-*")]
    (cluster.home / "slow").unlink()
    again = cluster.slurm.run("sbatch", "--parsable", str(cluster.run_dir / "job/job.sbatch"))

    assert cluster.weights(again) == expected


@pytest.mark.cluster
def test_a_grid_is_an_array_of_runs(cluster: Cluster) -> None:
    flags = ["--script", "train.py", "--device", "cpu", "--run-dir", "shared run", "--max-steps", "8"]
    done = cluster.submit("slurm", *flags, "--grid", "learning-rate=0.1,0.01")
    assert re.match(r"job \d+ was submitted\n", done.stdout), done.output

    assert "\ntask 0  --learning-rate 0.1\ntask 1  --learning-rate 0.01\nrun directory: " in done.stdout
    cluster.wait_for_tasks("0", "1")
    configs = [(cluster.run_dir / task / "config.yaml").read_text() for task in ("0", "1")]
    assert [re.search(r"^learning_rate: (\S+)", text, re.M)[1] for text in configs] == ["0.1", "0.01"]
    for number in re.findall(r"JobId=(\d+)", cluster.slurm.run("scontrol", "show", "job")):
        cluster.slurm.wait_for(number, "COMPLETED", seconds=30)
    listed = cluster.submit("status", "shared run").stdout
    assert re.match(
        r"job \d+_0  COMPLETED .*\njob \d+_1  COMPLETED .*\ntask 0  --learning-rate 0.1\ntask 1 ", listed
    ), listed
    assert len(re.findall(r"^\d +finished +single +1x1 +8 ", listed, re.M)) == 2, listed
    assert "has ended already" in cluster.submit("stop", "shared run").stdout


@pytest.mark.cluster
def test_a_waiting_job_is_taken_out_of_the_queue_and_a_lost_controller_is_shown(cluster: Cluster) -> None:
    number = cluster.job("--sbatch=--begin=now+600")
    assert f"job {number}  PENDING" in cluster.submit("status", "shared run").stdout

    for done in ("was taken out of the queue", "has ended already"):
        stopped = cluster.submit("stop", "shared run")
        assert stopped.returncode == 0 and stopped.stdout.startswith(f"job {number} {done}; "), stopped.output
    assert f"job {number}  CANCELLED" in cluster.submit("status", "shared run").stdout
    (cluster.run_dir / "job/number").write_text("4000\n")
    assert cluster.submit("status", "shared run").stdout.startswith("job 4000  not in the queue any more\n")

    os.kill(int((cluster.slurm.directory / "slurmctld.pid").read_text()), signal.SIGKILL)
    shown = cluster.submit("status", "shared run")
    assert shown.returncode == 3 and "squeue refused: slurm_load_jobs error: Unable to contact" in shown.stderr, (
        shown.output
    )


@pytest.mark.cluster
def test_each_task_of_an_array_has_a_run_of_its_own(cluster: Cluster) -> None:
    flags = ["--script", "train.py", "--device", "cpu", "--run-dir", "shared run", "--max-steps", "8"]
    done = cluster.submit("slurm", *flags, "--array", "0-1")
    assert re.match(r"job \d+ was submitted\n", done.stdout), done.output
    cluster.wait_for_tasks("0", "1")

    shown = cluster.submit("status", "shared run").stdout
    assert len(re.findall(r"^\d +finished +single +1x1 +8 ", shown, re.M)) == 2, shown


@pytest.mark.cluster
@pytest.mark.parametrize("name", [pytest.param("one-task-per-process", marks=pytest.mark.full), "one-task-per-node"])
def test_the_examples_run_with_other_sizes(cluster: Cluster, name: str) -> None:
    text = (ROOT / "examples/slurm" / f"{name}.sbatch").read_text()
    for asked, here in (
        ("--nodes=4", "--nodes=2"),
        ("--ntasks-per-node=8", "--ntasks-per-node=2"),
        ("#SBATCH --gpus-per-node=8\n", ""),
    ):
        text = text.replace(asked, here)
    text = text.replace("--gpus-per-node 8", "--nproc-per-node 2 --device cpu")
    (cluster.home / "job.sbatch").write_text(text)
    (cluster.home / "examples").symlink_to(ROOT / "examples")

    number = cluster.slurm.run("sbatch", "--parsable", f"--chdir={cluster.home}", "job.sbatch")
    cluster.slurm.wait_for(number, "COMPLETED", seconds=120)

    output = (cluster.home / f"slurm-{number}.out").read_text()
    assert re.search(r"^held-out accuracy 0\.9", output, re.M), output
    assert re.search(r"4 processes on cpu", output), output


# Without SLURM


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DISTRIBUTED_TOKEN", raising=False)
    (tmp_path / "train.py").touch()
    return tmp_path


def batch_file(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["submit", "slurm", "--script", "train.py", "--dry-run", "--run-dir", "runs/a", *words]) == 0
    return capsys.readouterr().out


def test_the_file_asks_for_what_was_given_and_nothing_else(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = batch_file(
        capsys, "--num-nodes", "4", "--gpus-per-node", "8", "--time", "12:00:00", "--partition", "gpu", "--account=me", "--setup", "module load cuda",
        "--sbatch=--exclusive", "--qos", "high", "--constraint", "a100&nvlink", "--mem", "0", "--cpus-per-task", "96", "--job-name", "digits",
        "--save-before", "300", "--epochs", "3", "--", "--hidden size", "64",
    )  # fmt: skip

    head = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert head == [
        "--job-name=digits", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--cpus-per-task=96", "--mem=0", "--time=12:00:00",
        "--partition=gpu", "--account=me", "--qos=high", "--constraint='a100&nvlink'",
        "--signal=USR1@300", f"--chdir={home}", f"--output={home}/runs/a/job/output-%j.txt", "--open-mode=append", "--requeue", "--exclusive",
    ]  # fmt: skip
    assert "\nmodule load cuda\n" in text
    (command,) = re.findall(r"^srun .*", text, re.M)
    assert command == (
        "srun --kill-on-bad-exit=0 ${SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}"
        f" {sys.executable} -m distributed.cli train --script train.py --num-nodes 4 --gpus-per-node 8 --epochs 3"
        f" --token-file {home}/runs/a/job/token --run-dir {home}/runs/a --resume -- '--hidden size' 64"
    )
    assert list(home.iterdir()) == [home / "train.py"]  # a dry run writes nothing


def test_without_a_number_of_processes_there_is_one_on_each_node(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = batch_file(capsys, "--device", "cpu")
    assert "--nproc-per-node 1 --run-dir" in text and "--cpus-per-task=1" in text and "token" not in text


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2", 120), ("2:30", 150), ("1:02:30", 3750), ("1-0", 86400), ("1-2:30", 95400), ("2-01:00:05", 176405)],
)
def test_time_limits_are_read_as_slurm_reads_them(text: str, seconds: int) -> None:
    assert own_slurm._seconds(text) == seconds


def test_a_grid_may_name_settings_without_a_flag(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = batch_file(capsys, "--device", "cpu", "--grid", "warmup-steps=0,10", "--grid", "batch-size=8")
    assert "'--set warmup_steps=10 --batch-size 8'" in text and "#SBATCH --array=0-1" in text


def test_the_tasks_of_an_array_are_passed_on_and_each_has_a_run_of_its_own(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = batch_file(capsys, "--device", "cpu", "--array", "0-7%2")
    assert "\n#SBATCH --array=0-7%2\n" in text and f"\n#SBATCH --output={home}/runs/a/job/output-%A_%a.txt\n" in text
    assert re.search(r"^srun .* --run-dir \S*/runs/a/\S*SLURM_ARRAY_TASK_ID", text, re.M), text


def test_gpus_are_not_looked_for_here(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "#SBATCH --gpus-per-node=4" in batch_file(capsys, "--device", "cuda", "--nproc-per-node", "4")


def test_the_secret_of_the_nodes_is_in_a_file_of_its_owner_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(
        ResourceError,
        match=r"^sbatch is not .* the job is written, .* with 'sbatch runs/a/job/job.sbatch'",
    ):
        run(["submit", "slurm", "--script", "train.py", "--run-dir", "runs/a", "--num-nodes", "2", "--device", "cpu"])

    token = home / "runs/a/job/token"
    secret = token.read_text().strip()
    assert token.stat().st_mode & 0o777 == 0o600 and len(secret) == 64
    others = [path for path in home.rglob("*") if path.is_file() and path != token]
    assert others and not any(secret in path.read_text() for path in others)


def test_what_sbatch_says_is_passed_on(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "sbatch").write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: gpux' >&2\nexit 1\n")
    (home / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(home), prepend=":")
    with pytest.raises(ResourceError, match=r"^sbatch refused: sbatch: error: invalid partition specified: gpux$"):
        run(["submit", "slurm", "--script", "train.py", "--run-dir", "runs/a", "--device", "cpu"])
    with pytest.raises(ConfigError, match="was written, but not submitted"):
        run(["submit", "status", "runs/a"])


@pytest.fixture
def fake(home: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Return a function that replaces a command of SLURM by lines of shell."""
    monkeypatch.setenv("PATH", str(home), prepend=":")

    def write(command: str, shell: str) -> None:
        (home / command).write_text(f"#!/bin/sh\n{shell}\n")
        (home / command).chmod(0o755)

    write("sbatch", "echo 7")
    return write


SUBMIT = ("submit", "slurm", "--script", "train.py", "--run-dir", "runs/a", "--device", "cpu")
UNKNOWN = "{ echo 'scancel: error: Kill job error on job id 7: Invalid job id specified' >&2; exit 1; }"


@pytest.mark.parametrize(
    ("scancel", "done"),
    [
        ("", "was told to save and end"),
        (f"[ $1 = --state=PENDING ] || {UNKNOWN}", "was taken out of the queue"),
        (UNKNOWN, "has ended already"),
    ],
)
def test_stop_says_what_became_of_the_job(
    fake: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], scancel: str, done: str
) -> None:
    assert run([*SUBMIT]) == 0
    capsys.readouterr()
    fake("scancel", scancel)

    assert run(["submit", "stop", "runs/a"]) == 0
    assert capsys.readouterr().out == f"job 7 {done}; to continue the run: sbatch runs/a/job/job.sbatch\n"


def test_stop_passes_on_what_else_scancel_says(fake: Callable[[str, str], None]) -> None:
    assert run([*SUBMIT]) == 0
    fake("scancel", "echo 'scancel: error: Access denied' >&2; exit 1")

    with pytest.raises(ResourceError, match=r"^scancel refused: scancel: error: Access denied$"):
        run(["submit", "stop", "runs/a"])


def test_only_a_job_that_slurm_does_not_know_is_not_in_the_queue_any_more(
    fake: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT]) == 0
    capsys.readouterr()
    fake("squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert run(["submit", "status", "runs/a"]) == 0
    assert capsys.readouterr().out.startswith("job 7  not in the queue any more\n")

    fake(
        "squeue", "printf 'squeue: error: no file\\nsqueue: fatal: Unable to process configuration file\\n' >&2; exit 1"
    )
    with pytest.raises(ResourceError) as caught:
        run(["submit", "status", "runs/a"])
    assert str(caught.value) == (
        "squeue refused: squeue: error: no file squeue: fatal: Unable to process configuration file"
    )


def test_the_settings_of_the_first_tasks_are_shown(
    fake: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*SUBMIT, "--grid", "warmup-steps=0,1", "--grid", "seed=0,1,2,3,4,5,6,7,8,9,10"]) == 0
    submitted = capsys.readouterr().out.splitlines()
    assert submitted[:3] == ["job 7 was submitted", *(f"task {n}  --set warmup_steps=0 --seed {n}" for n in (0, 1))]
    assert submitted[20:22] == ["task 19  --set warmup_steps=1 --seed 8", "and 2 more tasks, see runs/a/job/job.sbatch"]

    fake("squeue", "printf '7_0  RUNNING\\n7_[1-21]  PENDING\\n'")
    assert run(["submit", "status", "runs/a"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:2] == ["job 7_0  RUNNING", "job 7_[1-21]  PENDING"] and shown[2:23] == submitted[1:22]


@pytest.mark.parametrize(
    "scheduler", [("slurm",), ("kubernetes", "--image", "i"), ("ray", "--address", "http://head:8265")], ids="".join
)
def test_what_the_scheduler_gives_to_each_node_is_refused(home: Path, scheduler: tuple[str, ...]) -> None:
    verb, *flags = scheduler
    (home / "train.yaml").write_text("master_port: 29501\n")
    for words, message in (
        (["--node-rank", "1"], "node_rank=1 does not work with "),
        (["--master-addr", "foo"], "master_addr='foo' does not work with "),
        (["--master-port", "29501"], f"master_port=29501 does not work with 'submit {verb}': "),
        (["--config", "train.yaml"], f"master_port=29501 does not work with 'submit {verb}': "),
        (["--token-file=t"], f"--token-file is not a flag of {verb}: "),
    ):
        with pytest.raises(ConfigError) as caught:
            run(["submit", verb, *flags, "--script", "train.py", "--num-nodes", "2", "--device", "cpu", *words])
        assert str(caught.value).startswith(message) and str(caught.value).endswith(": drop it")
    assert sorted(home.iterdir()) == [home / "train.py", home / "train.yaml"]


def test_a_token_file_of_the_script_is_passed_on(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "-- --token-file mine" in batch_file(capsys, "--device", "cpu", "--", "--token-file", "mine")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slurm", "--script", "gone.py"], "gone.py"),
        (["slurm", "--script", "train.py", "--time", "soon"], "--time soon is not a time limit of SLURM"),
        (["slurm", "--script", "train.py", "--time", "2"], "must be at least 180 s"),
        (["slurm", "--script", "train.py", "--array", "a-b"], "--array a-b is not a list of tasks"),
        (["slurm", "--script", "train.py", "--grid", "learning-rate"], "--grid learning-rate has no values"),
        (["slurm", "--script", "train.py", "--grid", "epochs=1,$(rm)"], "cannot be a word of the shell"),
        (["slurm", "--script", "train.py", "--grid", "epoch=1,2"], "epoch is not a setting"),
        (["slurm", "--script", "train.py", "--epochs", "0"], "epochs"),
        (["slurm", "--script", "train.py", "--backend", "horovod", "--dtype", "bfloat16"], "dtype"),
        (["slurm", "--script", "train.py", "--resume"], "--resume needs the directory of the run"),
        (["slrum"], "did you mean 'slurm'"),
        (["status"], "takes one run directory"),
        (["logs", "nowhere"], "is not a submitted run"),
    ],
)
def test_a_mistake_is_one_line(home: Path, words: list[str], message: str) -> None:
    with pytest.raises(DistributedError) as caught:
        run(["submit", *words])
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(home.iterdir()) == [home / "train.py"]
