"""BatchJob: a run for a scheduler, and its files in RUN/job."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from distributed.config.merging import MergedConfig
from distributed.config.plan import ProcessPlan
from distributed.errors import ConfigError
from distributed.launching.secret import shared_secret
from distributed.runs.directory import JOB, RunDirectory

PREEMPTED = 143  # exit code of a run that has saved its state because of a signal


@dataclasses.dataclass(frozen=True)
class BatchJob:
    """A run for a scheduler.

    Attributes:
        name: the name of the job.
        words: the flags of `distributed train`, without those of the run directory.
        script_args: the arguments of the script.
        run_dir: the run directory, on a file system that all nodes share.
        plan: the processes.
        python: the interpreter on the nodes, by default the one that runs now.
        settings: the settings given outside the script, if they are known.
    """

    name: str
    words: Sequence[str]
    script_args: Sequence[str]
    run_dir: Path
    plan: ProcessPlan
    python: str = dataclasses.field(default_factory=lambda: sys.executable)
    settings: MergedConfig | None = None

    @property
    def directory(self) -> Path:
        """The directory of the files for the scheduler."""
        return self.run_dir / JOB

    @property
    def token_file(self) -> Path | None:
        """The file with the secret of the nodes, or None if there is one node."""
        return None if self.plan.num_nodes == 1 else self.directory / "token"

    def is_given(self, name: str) -> bool:
        """Return whether the setting `name` is known to have been given."""
        return self.settings is not None and self.settings.is_given(name)

    def value_of(self, flag: str) -> str:
        """Return the value of a flag of `words`, or "" if the flag is not there. The last one counts."""
        found = ""
        for index, word in enumerate(self.words):
            name, equals, value = word.partition("=")
            if name == flag:
                found = value if equals else self.words[index + 1]
        return found

    def command(self, run_dir: str, more: str = "") -> str:
        """Return the command of a node. It starts the run in `run_dir`, or continues it.

        `run_dir` and the flags `more` are words of the shell.
        """
        own = [] if self.token_file is None else ["--token-file", str(self.token_file.absolute())]
        words = shlex.join([self.python, "-m", "distributed.cli", "train", *self.words, *own])
        script_args = f" -- {shlex.join(self.script_args)}" if self.script_args else ""
        return f"{words}{more and ' '}{more} --run-dir {run_dir} --resume{script_args}"

    @contextlib.contextmanager
    def writing(self, name: str, *, resume: bool) -> Iterator[Path]:
        """Yield the path of the file `name` for the scheduler. The block submits the job and writes the file.

        A run directory that did not exist before the block and is empty after it is removed.

        Raises ConfigError if the run directory cannot be used, or if the file exists and `resume` is false.
        """
        is_new = not self.run_dir.exists()
        RunDirectory(self.run_dir).check(resume=resume)
        file = self.directory / name
        if file.exists() and not resume:
            raise ConfigError(
                f"{str(self.run_dir)!r} has a job already ({file}): add --resume to submit it again, or name another with --run-dir"
            )
        try:
            yield file
        finally:
            if is_new:
                with contextlib.suppress(OSError):  # it is not empty
                    self.run_dir.rmdir()

    def prepare(self, *, resume: bool) -> None:
        """Create the directory for the scheduler, and the file with the secret of the nodes, readable by its owner only.

        The secret is that of DISTRIBUTED_TOKEN, or a new one.

        Raises ConfigError if the run directory cannot be used.
        """
        RunDirectory(self.run_dir).check(resume=resume)
        self.directory.mkdir(exist_ok=True)
        if self.token_file is not None and not self.token_file.exists():
            fd = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(fd, "w") as file:
                file.write((shared_secret() or secrets.token_hex(32).encode()).decode() + "\n")


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Raise ConfigError if the block, which reads the file `path` of RUN/job, raises OSError or ValueError."""
    try:
        yield
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else f"it {error}"
        if isinstance(error, (json.JSONDecodeError, UnicodeDecodeError)):
            why = "it is not JSON"
        raise ConfigError(f"{str(path)!r} cannot be read ({why}): submit the run again with --resume") from None
