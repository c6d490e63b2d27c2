"""Scheduler: what `distributed submit` needs to know of a scheduler. A new one is one file and one entry in `submit.py`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.launcher.submit.job import BatchJob


def _one_run(options: Any) -> Sequence[Mapping[str, str]]:
    return [{}]


@dataclasses.dataclass(frozen=True)
class Scheduler:
    """A scheduler that runs can be handed to.

    `status`, `logs` and `stop` get a run directory in whose `job` directory `file` exists. All functions raise DistributedError.

    Attributes:
        title: the name in messages and in the help.
        file: the file in RUN/job that `submit` writes. A run belongs to the scheduler whose file is newest.
        about: the description for `--help`.
        add_flags: adds the scheduler's own flags to a parser.
        options: makes and checks the scheduler's options from the values of these flags, given by name.
        text: returns what `--dry-run` prints. It writes nothing and holds no secret.
        submit: writes the file and submits it, or continues the run if `resume` is true. Returns a line that names the job.
        status: returns what the scheduler says of the job.
        logs: returns the output of the job in pieces.
        stop: ends the job and returns a line that says how to continue the run.
        shares_run_dir: whether the files of the run are in the run directory here, so that `status` shows what they say too.
        name: returns the default name of a job, from the script and the run directory.
        settings: returns, for each run, the settings that the options add to those of the command line.
        files: returns the directory with the files of the run, which may be on the cluster only.
        takes: flags of `train` that concern the scheduler here. `options` gets them, and the job does not.
        secret: where the secret of the nodes comes from, for the refusal of `--token-file`.
        counts_there: whether `train` on the cluster chooses the number of processes if none was given. Otherwise the command names it.
    """

    title: str
    file: str
    about: str
    add_flags: Callable[[argparse._ArgumentGroup], None]
    options: Callable[[dict[str, Any]], Any]
    text: Callable[[BatchJob, Any], str]
    submit: Callable[[BatchJob, Any, bool], str]
    status: Callable[[Path], str]
    logs: Callable[[Path], Iterable[str]]
    stop: Callable[[Path], str]
    shares_run_dir: bool = True
    name: Callable[[Path, Path], str] = lambda script, run_dir: script.stem
    settings: Callable[[Any], Sequence[Mapping[str, str]]] = _one_run
    files: Callable[[Path], Path] = lambda run_dir: run_dir
    takes: Sequence[str] = ()
    secret: str = "the command makes the secret of the nodes, or takes it from DISTRIBUTED_TOKEN"
    counts_there: bool = False
