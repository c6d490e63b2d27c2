"""Searches the largest batch that fits: each size is tried by a few updates in workers that are started for it.

A rank that is out of memory in the middle of an update leaves the others waiting for its part of a sum. In workers of its own an
attempt ends like any failed fit, whatever the engine: the launcher ends the others, and the next attempt finds memory as a
training run does. That all ranks agree follows: a size fits when every rank has made its updates.
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends.out_of_memory import is_out_of_memory, memory_line
from distributed.callbacks import Callback
from distributed.errors import ConfigError, DistributedError, ResourceError, TrainingError, TrainingInterrupted
from distributed.finders.learning_rate import check_unused
from distributed.launching.reporter import Reporter
from distributed.runs.directory import RunDirectory, choose_run_dir, script_name
from distributed.training.fits import Fits
from distributed.training.remote import FittedTrainer, RemoteFit, check_here, failure, remote_fit, run_in_workers

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState

# One makes the optimizer's state, the next has it beside the activations; a third, as one of them may be the short end of an epoch.
_UPDATES = 3
_PREEMPTED = 128 + signal.SIGTERM
_KILLED = f"({signal.SIGKILL.name})"  # in the words of the launcher


class OutOfMemory(DistributedError):
    """A rank has too little memory. Its exit code is for the process that tries."""

    exit_code = 4


class NotThatSize(DistributedError):
    """The data gives no update of the size that is tried. Its exit code is for the process that tries."""

    exit_code = 5


_KINDS: dict[int, type[DistributedError]] = {kind.exit_code: kind for kind in (OutOfMemory, NotThatSize)}


def find_batch_size(fits: Fits, train_data: Any, *, start: int, max_size: int | None) -> int:
    """What `Trainer.find_batch_size` says."""
    _check(fits, start, max_size)
    found = None
    report = Reporter(True, fits.setup.merged.config.verbose)
    for size in _sizes(start, max_size):
        reason = _try(fits, train_data, size)
        report({"kind": "notice", "text": f"batch_size={size}: {reason or 'fits'}"})
        if reason is not None:
            break
        found = size
    report.close()
    if found is None:
        kind = ConfigError if isinstance(reason, NotThatSize) else ResourceError
        raise kind(f"start={start} is too large ({reason}): lower it")
    return found


def _check(fits: Fits, start: int, max_size: int | None) -> None:
    check_unused(fits, "find_batch_size()")
    if fits.setup.worker is not None:
        raise ConfigError(
            "find_batch_size() starts workers of its own, as one that is out of memory would keep these waiting: call it in a"
            " plain script, 'python SCRIPT' with nproc_per_node set in it, and give this run the batch_size that it finds"
        )
    for name, value in (("start", start), ("max_size", start if max_size is None else max_size)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} is no batch size: give a whole number, at least 1")
    if max_size is not None and max_size < start:
        raise ConfigError(f"max_size={max_size} is below start={start}: lower start, or raise max_size")
    if max_size is None and fits.setup.plan.device == "cpu":
        raise ConfigError(
            "find_batch_size() needs max_size on CPUs: their memory is that of the whole machine, and when it is used up any"
            " process may be killed"
        )


def _sizes(start: int, max_size: int | None) -> Iterator[int]:
    size = start
    while max_size is None or size <= max_size:
        yield size
        size *= 2


def _try(fits: Fits, train_data: Any, size: int) -> DistributedError | None:
    """Why `size` does not fit; None where it does. Raises what else an attempt failed with."""
    setup = fits.setup
    own = setup.merged.config
    is_accumulated = own.global_batch_size is not None or own.gradient_accumulation_steps > 1
    num_micro_batches = 2 if is_accumulated else 1  # a third needs no more memory
    given = {
        "gradient_accumulation_steps": num_micro_batches, "global_batch_size": None, "epochs": _UPDATES,
        "max_steps": _UPDATES, "max_restarts": 0, "restart_on_exception": False, "verbose": False,
    }  # fmt: skip
    search = setup.for_search(given, job=dataclasses.replace(setup.job, scheduler=None), batch_size=size)
    check_here(search, search.merged, train_data, None)
    directory = choose_run_dir(script_name()).absolute()
    attempt = remote_fit(Attempt, Fits(search, fits.trainer_class), search.merged, directory, train_data)
    attempt.num_samples = size * num_micro_batches * setup.backend.data_parallel_size
    run = RunDirectory(directory)
    run.check(resume=False)
    try:
        code = run_in_workers(attempt, search, search.merged, run)
        if code == _PREEMPTED:
            raise TrainingInterrupted(signal.SIGTERM)
        reason = None if code == 0 else _reason(code, run)
    except (KeyboardInterrupt, TrainingInterrupted, ConfigError, ResourceError):  # which point to no log
        _remove(directory)
        raise
    _remove(directory)
    return reason


def _remove(directory: Path) -> None:
    shutil.rmtree(directory)
    with contextlib.suppress(OSError):  # it is not empty
        directory.parent.rmdir()


def _reason(code: int, run: RunDirectory) -> DistributedError:
    """Why the size does not fit. Raises what has nothing to do with memory; the directory of the attempt stays for that."""
    error = failure(code, run, kinds=_KINDS)
    if isinstance(error, tuple(_KINDS.values())):
        return error
    if isinstance(error, TrainingError) and _KILLED in str(error):  # by the kernel: it says no more
        return OutOfMemory(str(error).partition(" (whole log")[0])
    raise error


@dataclasses.dataclass
class Attempt(RemoteFit):
    """A fit of a few updates, in each worker."""

    num_samples: int = 0  # of an update, over all ranks

    def fit(self, trainer: FittedTrainer) -> None:
        setup = trainer.setup
        setup.callbacks, setup.keeps_checkpoints = [_Watch(self.num_samples)], False
        try:
            trainer.fit(self.train_data)
        except Exception as error:  # each engine has a class of its own for it
            if is_out_of_memory(error):
                rank = setup.worker.rank if setup.worker is not None else 0
                raise OutOfMemory(f"rank {rank} is out of memory: {memory_line(error)}") from error
            raise


class _Watch(Callback):
    """Tells where the data gives no such update. All ranks alike."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if state.step == 1 and result.num_samples != self._num_samples:
            raise NotThatSize(
                f"the data gives the first update {result.num_samples} samples, not {self._num_samples}"
                " (it has no more, or a batch sampler of its own)"
            )
