"""Run a job on a Ray cluster through its Jobs API: the working directory is uploaded, and the command runs on the cluster.

The command is `distributed train --backend ray --address auto`. It plans and places the workers on the cluster that it runs on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shlex
import socket
import textwrap
import urllib.parse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distributed.config.kinds import TEXT, check_kinds
from distributed.config.libraries import is_installed
from distributed.config.reading import MAX_RECORD_BYTES, parse_json, read_bytes
from distributed.config.registry import backend_entry
from distributed.errors import ConfigError, ResourceError
from distributed.launcher.submit.job import BatchJob, reading
from distributed.runs.directory import JOB

FILE = "ray.json"  # in RUN/job
_WRITTEN = ("address", "id", "run_dir")  # the fields of the file that are read
BACKEND = "ray"
ADDRESS_VARIABLE = "RAY_API_SERVER_ADDRESS"  # Ray's own
_REACH_S = 5.0  # time for the server to accept a connection
_STOP_MARGIN_S = 30  # beyond the time that workers may take to end after a signal
_EXCLUDED = ("runs", ".venv", "__pycache__")
_TOO_LARGE = "status code 413"  # in Ray's error
_ERROR = re.compile(r"[Ee]rror: ")
_WRAPPER = textwrap.TextWrapper(
    80, initial_indent="  ", subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
)


@dataclasses.dataclass(frozen=True)
class RayJobOptions:
    """Options for Ray's Jobs API.

    Attributes:
        address: the address of the API, http://HOST:8265.
        storage: a directory on the cluster for the directories of runs, which all nodes share. None if the run directory has the
            same path on the cluster as here.
        python: the interpreter on the cluster.
        exclude: patterns of files that are not uploaded, as in a .gitignore.
        stop_wait_s: seconds between SIGTERM and SIGKILL when the job is stopped. Ray's own default is 3.

    Raises:
        ConfigError: a value is wrong. The message names the flag of `submit ray`.
    """

    address: str
    storage: str | None = None
    python: str = "python"
    exclude: Sequence[str] = ()
    stop_wait_s: int = 300

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            host = parts.hostname or self.address.partition(":")[0] or "HOST"
            raise ConfigError(
                f"--address {self.address} is not the address of Ray's Jobs API: give that of the dashboard, such as http://{host}:8265"
            )
        if parts.username or parts.password or parts.query:
            raise ConfigError("--address has more than a host and a port: give a token in RAY_AUTH_TOKEN")
        if self.storage is not None and not self.storage.startswith("/"):
            raise ConfigError(f"--storage {self.storage} is not an absolute path: name a directory of the cluster")


def run_dir_of(job: BatchJob, options: RayJobOptions) -> str:
    """Return the run directory on the cluster."""
    return str(job.run_dir.absolute() if options.storage is None else Path(options.storage, job.run_dir.name))


def entrypoint(job: BatchJob, options: RayJobOptions) -> str:
    """Return the command of the job. It starts the run, or continues it.

    Args:
        job: the run.
        options: the options for Ray's Jobs API.

    Returns:
        The command, one line of shell.
    """
    run_dir = shlex.quote(run_dir_of(job, options))
    words = shlex.join([
        *shlex.split(options.python), "-m", "distributed.cli", "train", *job.words, "--backend", BACKEND, "--address", "auto",
    ])  # fmt: skip
    script_args = f" -- {shlex.join(job.script_args)}" if job.script_args else ""
    return f"mkdir -p {run_dir} && exec {words} --run-dir {run_dir} --resume{script_args}"


def check_script(script: str) -> None:
    """Raise ConfigError unless the script is a relative path inside the working directory, which is uploaded."""
    if Path(script).is_absolute() or os.path.normpath(script).startswith(".."):
        raise ConfigError(
            f"--script {script} is not a path below the working directory, which is what the cluster gets: change to a directory"
            " that holds the script, and name it relative to that"
        )


def runtime_env(options: RayJobOptions, working_dir: Path) -> dict[str, Any]:
    """Return the runtime environment that Ray prepares on each node before the job begins."""
    return {
        "working_dir": str(working_dir),
        "excludes": [*_EXCLUDED, *options.exclude],
        "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(options.stop_wait_s + _STOP_MARGIN_S)},
    }


def submit(job: BatchJob, options: RayJobOptions, working_dir: Path, *, resume: bool) -> str:
    """Upload the working directory, submit the job, write RUN/job/ray.json, and return the job's id.

    Raises:
        ConfigError: the run directory cannot be used, or an earlier job of the run has not ended.
        ResourceError: Ray is not installed, or the server refuses the job. The message has the server's words.
    """
    if not is_installed("ray"):
        raise ResourceError(f"Ray is not installed here: run {backend_entry(BACKEND).install}")
    command = entrypoint(job, options)
    with job.writing(FILE, resume=resume) as file:
        if file.exists():
            _check_ended(job.run_dir)
        with _asking(options.address) as client:
            number: str = client.submit_job(
                entrypoint=command,
                runtime_env=runtime_env(options, working_dir),
                metadata={"job_submission_name": job.name},
            )
        content = {"address": options.address, "id": number, "entrypoint": command, "run_dir": run_dir_of(job, options)}
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(content, indent=1) + "\n")
    return number


def _check_ended(run_dir: Path) -> None:
    """Raise ConfigError if the job that was submitted last is waiting or running. Its ID would be lost.

    A job that the server does not know has ended with its cluster. Raises ResourceError if the server does not answer.
    """
    try:
        job = written(run_dir)
    except ConfigError:  # the file has no ID that can be lost
        return
    try:
        with _asking(job["address"]) as client:
            found = [each for each in client.list_jobs() if each.submission_id == job["id"]]
    except ResourceError as error:
        file = run_dir / JOB / FILE
        raise ResourceError(
            f"whether the last job {job['id']} has ended is not known: {error}; if its cluster has ended, delete {str(file)!r}"
        ) from None
    if living := [each.status.value for each in found if not each.status.is_terminal()]:
        raise ConfigError(
            f"job {job['id']} of this run has not ended ({living[0]}): wait for its end, or end it with"
            f" 'distributed submit stop {shlex.quote(str(run_dir))}', then repeat the command"
        )


def written(run_dir: Path) -> dict[str, str]:
    """Return what `submit` wrote: the address of the API, the id of the job, and the run directory on the cluster.

    Raises ConfigError if the file cannot be read.
    """
    path = run_dir / JOB / FILE
    with reading(path):
        content = parse_json(read_bytes(path, MAX_RECORD_BYTES))
        check_kinds(content, dict.fromkeys(_WRITTEN, TEXT))
        if missing := [name for name in _WRITTEN if name not in content]:
            raise ValueError(f"lacks {missing[0]!r}")
    return {name: content[name] for name in _WRITTEN}


def status(run_dir: Path) -> str:
    """Return the state of the job at Ray in one line, and Ray's message below it, with the last error first."""
    job = written(run_dir)
    with _asking(job["address"]) as client:
        info = client.get_job_info(job["id"])
    code = "" if info.driver_exit_code is None else f"  exit code {info.driver_exit_code}"
    return "\n".join([f"{job['id']}  {info.status.value}{code}", *_message_lines(info.message or "")])


def _message_lines(message: str) -> list[str]:
    """Return the lines of a message, which may end with the last lines of the log. The last error comes first."""
    lines = [line for line in message.splitlines() if line.strip()]
    first = max((number for number, line in enumerate(lines) if _ERROR.search(line)), default=0)
    return [part for line in lines[first:] + lines[:first] for part in _WRAPPER.wrap(line)]


def logs(run_dir: Path) -> str:
    """Return the output of the job so far."""
    job = written(run_dir)
    with _asking(job["address"]) as client:
        text: str = client.get_job_logs(job["id"])
    return text


def stop(run_dir: Path) -> bool:
    """Tell the job to save and end. Return False if it has ended already."""
    job = written(run_dir)
    with _asking(job["address"]) as client:
        is_stopping: bool = client.stop_job(job["id"])
    return is_stopping


@contextlib.contextmanager
def _asking(address: str) -> Iterator[Any]:
    """Yield a client of the Jobs API. Its errors become ResourceError with the server's own words in one line."""
    _reach(address)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import requests
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    for name in ("ray.dashboard.modules.dashboard_sdk", "ray._private.runtime_env.packaging"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        yield JobSubmissionClient(address)
    except AuthenticationError as error:
        words, fix = str(error).partition("\n")[0], "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN as on the cluster"
        raise ResourceError(f"the Ray Jobs API at {address} refused: {words}: {fix}") from None
    # Ray raises RuntimeError with the server's answer, and ValueError for a directory that is too large.
    except (RuntimeError, ValueError, OSError, requests.exceptions.RequestException) as error:
        if _TOO_LARGE in str(error):
            raise ResourceError(
                f"the working directory is too large for the Ray Jobs API at {address} (limit 100 MiB): leave files out with --exclude"
                " or .gitignore"
            ) from None
        no_api = isinstance(error, ConnectionError)
        fix = "give the port of its dashboard (8265)" if no_api else "see the logs of the head's dashboard"
        words = _one_line(str(error))
        raise ResourceError(f"the Ray Jobs API at {address} refused: {words}: {fix}") from None


def _reach(address: str) -> None:
    """Raise ResourceError if nothing listens at the address. Ray's client would wait without a limit."""
    parts = urllib.parse.urlsplit(address)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        socket.create_connection((parts.hostname or "", port), timeout=_REACH_S).close()
    except OSError as error:
        raise ResourceError(
            f"no Ray Jobs API answers at {address} ({error.strerror or error}): start the head with 'ray start --head"
            " --include-dashboard=true --dashboard-host=0.0.0.0', which needs pip install 'ray[default]' there, or correct --address"
        ) from None


def _one_line(text: str) -> str:
    """Return the last line of a traceback in an answer, or the whole text, in one line."""
    lines = [line.strip() for line in text.replace("\\n", "\n").splitlines() if line.strip(" .'\"")]
    if any(line.startswith("Traceback") for line in lines):
        lines = lines[-1:]
    return " ".join(lines).rstrip(".'\" ")
