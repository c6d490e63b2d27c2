"""`distributed submit ray`: its flags, and what a user sees of a job on a Ray cluster."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.cli.scheduler import Scheduler
from distributed.errors import ConfigError
from distributed.launcher.submit import ray_jobs
from distributed.launcher.submit.job import BatchJob
from distributed.launcher.submit.ray_jobs import RayJobOptions

RAY_JOBS = ray_jobs.BACKEND  # the word after `submit`
_ABOUT = """\
Upload the working directory to a Ray cluster and run the script there,
through Ray's Jobs API.

The flags of train are accepted, except --token-file, --node-rank, --master-addr
and --master-port. --address is that of the dashboard of the cluster, such as
http://head:8265. The processes are placed on the nodes of the cluster."""


def _add_flags(section: argparse._ArgumentGroup) -> None:
    section.add_argument(
        "--storage", metavar="DIR",
        help="a directory of the cluster that all nodes share; the run directory there is DIR/RUN (default: the path of RUN here)",
    )  # fmt: skip
    section.add_argument("--python", metavar="COMMAND", help="the interpreter on the cluster (default: python)")
    section.add_argument(
        "--exclude", metavar="PATTERN", action="append",
        help="pattern of files not to upload, as in a .gitignore; files that .gitignore names are never uploaded; may be repeated",
    )  # fmt: skip
    section.add_argument("--job-name", metavar="NAME", help="name of the job (default: that of the script)")


def _options(values: dict[str, Any]) -> RayJobOptions:
    address = values.pop("address") or os.environ.get(ray_jobs.ADDRESS_VARIABLE)
    if address is None:
        raise ConfigError(
            f"submit ray needs the address of the cluster's dashboard: add --address http://HOST:8265, or set {ray_jobs.ADDRESS_VARIABLE}"
        )
    backend = values.pop("backend")
    if backend not in (None, ray_jobs.BACKEND):
        raise ConfigError(f"--backend {backend} cannot be submitted to Ray, which starts backend 'ray': drop it")
    return RayJobOptions(
        address, exclude=values.pop("exclude") or (), **{name: value for name, value in values.items() if value}
    )


def _settings(_: RayJobOptions) -> Sequence[Mapping[str, str]]:
    return [{"backend": ray_jobs.BACKEND, "address": "auto"}]


def _text(job: BatchJob, options: RayJobOptions) -> str:
    ray_jobs.check_script(job.value_of("--script"))
    env = json.dumps(ray_jobs.runtime_env(options, Path.cwd()), indent=1)
    return f"address: {options.address}\nentrypoint: {ray_jobs.entrypoint(job, options)}\nruntime_env: {env}\n"


def _submit(job: BatchJob, options: RayJobOptions, resume: bool) -> str:
    ray_jobs.check_script(job.value_of("--script"))
    number = ray_jobs.submit(job, options, Path.cwd(), resume=resume)
    return f"job {number} was submitted to {options.address}\nrun directory on the cluster: {ray_jobs.run_dir_of(job, options)}"


def _status(run_dir: Path) -> str:
    return f"job {ray_jobs.status(run_dir)}"


def _logs(run_dir: Path) -> Iterator[str]:
    yield ray_jobs.logs(run_dir)


def _stop(run_dir: Path) -> str:
    number = ray_jobs.written(run_dir)["id"]
    if not ray_jobs.stop(run_dir):
        return f"job {number} has ended already"
    return f"job {number} was told to save and end; to continue the run, submit it again with --run-dir {shlex.quote(str(run_dir))} --resume"


RAY = Scheduler(
    "Ray", ray_jobs.FILE, _ABOUT, _add_flags, _options, _text, _submit, _status, _logs, _stop, settings=_settings,
    files=lambda run_dir: Path(ray_jobs.written(run_dir)["run_dir"]), takes=("address", "backend"),
    secret="the cluster makes the secret of the processes",
    counts_there=True,
)  # fmt: skip
