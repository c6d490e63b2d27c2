"""Run a job under SLURM: write the sbatch file, and call `sbatch`, `squeue` and `scancel`.

One task of `srun` on each node starts the processes of its node. SLURM gives the numbers of the nodes and the address of node 0
(`launching/environments/slurm.py`). SIGUSR1 before the time limit makes the run save and end with 143; the job is then requeued
and continues bit for bit.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.config.flags import SETTINGS, flag_of
from distributed.errors import ConfigError, ResourceError
from distributed.launcher.submit.job import PREEMPTED, BatchJob
from distributed.runs.directory import JOB

FILE, _STOP, _NUMBER = "job.sbatch", "stop", "number"  # files in RUN/job
_ANSWER_S = 90.0  # time limit for a command of SLURM, which itself tries for a minute to read its configuration
_GONE = "Invalid job id specified"  # SLURM's words for a job that ended some time ago
_SETTINGS, _END_OF_SETTINGS = "settings=(", ")"  # lines of the file, around the settings of the tasks of an array
_SHOWN_TASKS = 20
_TIME = re.compile(r"\d+|\d+:\d+(:\d+)?|\d+-\d+(:\d+){0,2}")
_EARLY_S = 60  # SLURM may send the signal this much earlier than asked (sbatch, --signal)


def _seconds(time: str) -> int:
    """Return a time limit of SLURM in seconds: minutes, minutes:seconds, hours:minutes:seconds, or with `days-` before hours."""
    days, dash, rest = time.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        parts += [0] * (3 - len(parts))
    elif len(parts) < 3:
        parts = [0, *parts, *[0] * (2 - len(parts))]
    hours, minutes, seconds = parts
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclasses.dataclass(frozen=True)
class SlurmOptions:
    """Options for SLURM besides nodes and processes. None and empty leave the cluster's default.

    Attributes:
        time: the time limit, as SLURM writes it: minutes, HH:MM:SS or D-HH:MM:SS.
        partition, account, qos, constraint: as in `sbatch`.
        cpus_per_task: CPUs of each node's task; by default one per process on CPUs, and the cluster's default on GPUs.
        mem: memory of each node, such as 64G.
        save_before: seconds before the time limit at which the run saves and ends. It must be longer than a save takes.
        array: the tasks of a job array, such as 0-7%2.
        grid: setting -> values. Each combination is a task of a job array.
        more: further lines for the head of the file, without #SBATCH, such as `--exclusive`.
        setup: lines of shell that run before the run, such as `module load cuda`.

    Raises:
        ConfigError: a value is wrong. The message names the flag of `submit slurm`.
    """

    time: str | None = None
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    cpus_per_task: int | None = None
    mem: str | None = None
    save_before: int = 120
    array: str | None = None
    grid: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    more: Sequence[str] = ()
    setup: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.time is not None and not _TIME.fullmatch(self.time):
            raise ConfigError(f"--time {self.time} is not a time limit of SLURM: write minutes, HH:MM:SS or D-HH:MM:SS")
        if self.save_before < 1:
            raise ConfigError(f"--save-before {self.save_before} is not a number of seconds above 0")
        if self.time is not None and _seconds(self.time) < self.save_before + _EARLY_S:
            raise ConfigError(
                f"--time {self.time} leaves no time to train: SLURM's signal to save may come {_EARLY_S} s earlier than"
                f" --save-before {self.save_before}, so the limit must be at least {self.save_before + _EARLY_S} s"
            )
        if self.array is not None and not re.fullmatch(r"[\d,:-]+(%\d+)?", self.array):
            raise ConfigError(f"--array {self.array} is not a list of tasks: write 0-7, 0-7%2 or 1,3,5")
        for name, values in self.grid.items():
            if wrong := [value for value in values if not re.fullmatch(r"[\w.,:/+-]+", value)]:
                raise ConfigError(
                    f"--grid {name}: {wrong[0]!r} cannot be a word of the shell: use letters, digits and .,:/+-_"
                )

    @property
    def has_tasks(self) -> bool:
        """Return whether the job is an array."""
        return self.array is not None or bool(self.grid)

    def combinations(self) -> list[dict[str, str]]:
        """Return the settings of each task of the array. Without a grid, there is one task without settings of its own."""
        return [dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())]


def batch_file(job: BatchJob, options: SlurmOptions, working_dir: Path) -> str:
    """Return the sbatch file of a job. It holds no secret.

    Args:
        job: the run.
        options: the options for SLURM.
        working_dir: the directory in which the commands of the job run.

    Returns:
        The content of the file.
    """
    run_dir = shlex.quote(str(job.run_dir.absolute()))
    own = f'{run_dir}/"$SLURM_ARRAY_TASK_ID"' if options.has_tasks else run_dir
    command = job.command(own, "${settings[$SLURM_ARRAY_TASK_ID]}" if options.grid else "")
    lines = [
        "#!/bin/bash",
        "# Written by `distributed submit slurm`. To submit it again, which continues the run: sbatch FILE",
        *(f"#SBATCH {each}" for each in _head(job, options, working_dir)),
        "",
        "number=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}",
        f'echo "$number" > {run_dir}/{JOB}/{_NUMBER}  # for `distributed submit status`',
        *options.setup,
        "",
        *_grid(options),
        "# One task on each node starts the processes of that node. The first attempt begins at step 0, any later one continues from",
        "# the newest checkpoint.",
        *([f"mkdir -p {own}"] if options.has_tasks else []),
        f"srun --kill-on-bad-exit=0 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {command}",
        "code=$?",
        "",
        f"# Before the time limit SLURM sends SIGUSR1. The run then saves and ends with {PREEMPTED}. `submit stop` leaves a file.",
        f'if [ $code -eq {PREEMPTED} ] && [ ! -e {run_dir}/{JOB}/{_STOP}-"$number" ]; then',
        '  scontrol requeue "$SLURM_JOB_ID"',
        "fi",
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _head(job: BatchJob, options: SlurmOptions, working_dir: Path) -> list[str]:
    plan = job.plan
    on_gpu = plan.device == "cuda"
    cpus = options.cpus_per_task or (None if on_gpu else plan.nproc_per_node)
    tasks = options.array or (f"0-{len(options.combinations()) - 1}" if options.grid else None)
    asked = {
        "job-name": job.name, "nodes": plan.num_nodes, "ntasks-per-node": 1, "gpus-per-node": plan.nproc_per_node if on_gpu else None,
        "cpus-per-task": cpus, "mem": options.mem, "time": options.time, "partition": options.partition, "account": options.account,
        "qos": options.qos, "constraint": options.constraint, "array": tasks, "signal": f"USR1@{options.save_before}" if options.time else None,
        "chdir": working_dir.absolute(), "output": job.directory.absolute() / ("output-%A_%a.txt" if options.has_tasks else "output-%j.txt"),
        "open-mode": "append",
    }  # fmt: skip
    given = {name: shlex.quote(str(value)) for name, value in asked.items() if value is not None}
    return [*(f"--{name}={value}" for name, value in given.items()), "--requeue", *options.more]


def _grid(options: SlurmOptions) -> list[str]:
    """Return the lines with the settings of each task of the array."""
    if not options.grid:
        return []
    rows = [
        " ".join(word for name, value in each.items() for word in _words(name, value))
        for each in options.combinations()
    ]
    return [
        "# the settings of each task of the array",
        _SETTINGS,
        *(f"  {shlex.quote(row)}" for row in rows),
        _END_OF_SETTINGS,
        "",
    ]


def _words(name: str, value: str) -> list[str]:
    return [flag_of(name), value] if name in SETTINGS else ["--set", f"{name}={value}"]


def submit(job: BatchJob, options: SlurmOptions, working_dir: Path, *, resume: bool) -> str:
    """Write RUN/job/job.sbatch, submit it, and return the number of the job.

    Raises:
        ConfigError: the run directory cannot be used.
        ResourceError: there is no `sbatch` here, or it refused the job. The file is written anyway.
    """
    job.prepare(resume=resume)
    file = job.directory / FILE
    file.write_text(batch_file(job, options, working_dir))
    if shutil.which("sbatch") is None:
        raise ResourceError(
            f"sbatch is not on this machine: the job is written, submit it where SLURM is, with 'sbatch {file}'"
        )
    number = _ask("sbatch", "--parsable", str(file)).partition(";")[0]
    (job.directory / _NUMBER).write_text(number + "\n")
    return number


def number_of(run_dir: Path) -> str:
    """Return the number of the newest job of a run. Raises ConfigError if the job was written but not submitted."""
    directory = run_dir / JOB
    if not (directory / _NUMBER).exists():
        raise ConfigError(
            f"the job of {str(run_dir)!r} was written, but not submitted: run 'sbatch {directory / FILE}'"
        )
    return (directory / _NUMBER).read_text().strip()


def task_lines(run_dir: Path) -> list[str]:
    """Return the settings of each task of the newest array, one line each, as the batch file has them. Of many, return the first."""
    file = run_dir / JOB / FILE
    rest = file.read_text().partition(f"\n{_SETTINGS}\n")[2]
    rows = rest.partition(f"\n{_END_OF_SETTINGS}\n")[0].splitlines()
    lines = [f"task {task}  " + row.strip(" '") for task, row in enumerate(rows[:_SHOWN_TASKS])]
    return lines + ([f"and {len(rows) - _SHOWN_TASKS} more tasks, see {file}"] if len(rows) > _SHOWN_TASKS else [])


def status(number: str) -> str:
    """Return the state of a job in SLURM, one line for each of its tasks, or a line that it has left the queue.

    Raises ResourceError if `squeue` fails.
    """
    shown = ("--noheader", "--states=all", "--sort=i", "--format", "%i  %T  %M of %l  %R")
    listed = _ask_about("squeue", *shown, "--jobs", number) or f"{number}  not in the queue any more"
    return "\n".join(f"job {line}" for line in listed.splitlines())


def stop(number: str, run_dir: Path) -> str:
    """End a job for good, and return what was done: a running job saves first, a waiting one leaves the queue.

    Raises ResourceError if SLURM refuses.
    """
    (run_dir / JOB / f"{_STOP}-{number}").touch()
    was_there = _ask_about("scancel", "--state=PENDING", number) is not None
    if _ask_about("scancel", "--signal=TERM", "--state=RUNNING", number) is not None:
        return "was told to save and end"
    return "was taken out of the queue" if was_there else "has ended already"


def output_files(number: str, directory: Path) -> list[Path]:
    """Return the files with the output of a job, one for each of its tasks."""
    return sorted([*directory.glob(f"output-{number}.txt"), *directory.glob(f"output-{number}_*.txt")])


def _ask_about(*command: str) -> str | None:
    """Run a command of SLURM about a job and return its output, or None if SLURM does not know the job any more."""
    try:
        return _ask(*command)
    except ResourceError as error:
        if _GONE not in str(error):
            raise
        return None


def _ask(*command: str) -> str:
    """Run a command of SLURM and return its output. Raises ResourceError with the command's own words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S)
    except FileNotFoundError:
        raise ResourceError(f"{command[0]} is not on this machine: run this where SLURM is") from None
    except subprocess.TimeoutExpired:
        raise ResourceError(f"{command[0]} did not answer within {_ANSWER_S:g} s: is SLURM's controller up?") from None
    if done.returncode != 0:
        words = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ResourceError(f"{command[0]} refused: {words}")
    return done.stdout.strip()
