"""`distributed submit slurm`: its flags, and what a user sees of a job of SLURM."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from distributed.cli.scheduler import Scheduler
from distributed.errors import ConfigError
from distributed.launcher.submit import slurm
from distributed.launcher.submit.job import BatchJob
from distributed.launcher.submit.slurm import SlurmOptions
from distributed.runs.directory import JOB

_ABOUT = """\
Write the batch file of a run for SLURM and submit it.

The flags of train are accepted, except --token-file, --node-rank, --master-addr
and --master-port. The nodes must share the run directory. The run saves before
the time limit, is queued again, and continues."""


def _add_flags(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--time", metavar="LIMIT", help="time limit: minutes, HH:MM:SS or D-HH:MM:SS; the run saves before it"
    )
    for name in ("partition", "account", "qos", "constraint", "mem"):
        section.add_argument(f"--{name}", metavar="VALUE", help=f"as --{name} of sbatch")
    section.add_argument(
        "--cpus-per-task", type=int, metavar="N", help="CPUs of each node (default: one per process on CPUs)"
    )
    section.add_argument("--job-name", metavar="NAME", help="name of the job (default: that of the script)")
    section.add_argument(
        "--save-before", type=int, metavar="S", help="seconds before the limit at which the run saves (default: 120)"
    )
    section.add_argument(
        "--array", metavar="TASKS", help="a job array, such as 0-7%%2; each task has a run directory RUN/TASK"
    )
    section.add_argument(
        "--grid",
        metavar="NAME=V,V",
        action="append",
        help="values of a setting; each combination is a task of a job array",
    )
    section.add_argument(
        "--sbatch", metavar="OPTION", action="append", help="another option of sbatch, such as --sbatch=--exclusive"
    )
    section.add_argument(
        "--setup", metavar="LINE", action="append", help="a line of shell before the run, such as 'module load cuda'"
    )


def _options(values: dict[str, Any]) -> SlurmOptions:
    grid = {}
    for text in values.pop("grid") or ():
        name, equals, choices = text.partition("=")
        if not equals or not choices:
            raise ConfigError(f"--grid {text} has no values: write NAME=VALUE,VALUE")
        grid[name.replace("-", "_")] = choices.split(",")
    more, setup = values.pop("sbatch") or (), values.pop("setup") or ()
    given = {name: value for name, value in values.items() if value is not None}
    return SlurmOptions(grid=grid, more=more, setup=setup, **given)


def _text(job: BatchJob, options: SlurmOptions) -> str:
    return slurm.batch_file(job, options, Path.cwd())


def _submit(job: BatchJob, options: SlurmOptions, resume: bool) -> str:
    number = slurm.submit(job, options, Path.cwd(), resume=resume)
    return "\n".join([f"job {number} was submitted", *slurm.task_lines(job.run_dir)])


def _status(run_dir: Path) -> str:
    return "\n".join([slurm.status(slurm.number_of(run_dir)), *slurm.task_lines(run_dir)])


def _logs(run_dir: Path) -> Iterator[str]:
    number = slurm.number_of(run_dir)
    files = slurm.output_files(number, run_dir / JOB)
    for file in files:
        if len(files) > 1:
            yield f"==> {file.name} <==\n"
        yield file.read_text(errors="replace")
    if not files:
        yield f"job {number} has written nothing yet\n"


def _stop(run_dir: Path) -> str:
    number = slurm.number_of(run_dir)
    done, file = slurm.stop(number, run_dir), shlex.quote(str(run_dir / JOB / slurm.FILE))
    return f"job {number} {done}; to continue the run: sbatch {file}"


SLURM = Scheduler(
    "SLURM", slurm.FILE, _ABOUT, _add_flags, _options, _text, _submit, _status, _logs, _stop,
    settings=SlurmOptions.combinations,
)  # fmt: skip
