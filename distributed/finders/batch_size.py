"""Find the largest batch that fits into memory: workers are started for each size and run a few updates.

A rank that runs out of memory in the middle of an update leaves the others waiting in a collective. So each size is tried
by a fit in workers of its own. It ends like any failed fit, whatever the engine: the launcher stops the other workers. The
next size then starts with the free memory that a training run would have. A size fits if every rank completed its updates,
so all ranks agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends.out_of_memory import is_out_of_memory, memory_line
from distributed.callbacks import Callback
from distributed.errors import ConfigError, DistributedError, ResourceError, TrainingError, TrainingInterrupted
from distributed.finders.setups import check_unused, finder_setup
from distributed.launching.reporter import Reporter
from distributed.runs.directory import RunDirectory, choose_run_dir, script_name
from distributed.runs.processes import interrupts_kept
from distributed.training.fit_request import FitRequest
from distributed.training.fits import Fits
from distributed.training.remote import FittedTrainer, RemoteFit, check_here, failure, remote_fit, run_in_workers

if TYPE_CHECKING:
    from distributed.state import StepResult, TrainState

# The first update creates the optimizer's state. The second one holds this state and the activations in memory at once. The
# third one is there because one of the first two may be the short last update of an epoch.
_UPDATES = 3
# What the fit that tries a size does besides training: in the process that starts the workers, and in each worker.
_REQUEST = FitRequest(reports_epochs=False)
_REQUEST_OF_WORKERS = FitRequest(keeps_checkpoints=False, explains_out_of_memory=False)
_PREEMPTED = 128 + signal.SIGTERM
_KILLED = f"({signal.SIGKILL.name})"  # part of the launcher's message about a killed worker


class OutOfMemory(DistributedError):
    """A rank ran out of memory. The exit code is that of the workers that try a size."""

    exit_code = 4


class NotThatSize(DistributedError):
    """The data has no update of the size to try. The exit code is that of the workers that try a size."""

    exit_code = 5


_KINDS: dict[int, type[DistributedError]] = {kind.exit_code: kind for kind in (OutOfMemory, NotThatSize)}


def find_batch_size(fits: Fits, train_data: Any, *, start: int, max_size: int | None) -> int:
    """Return the batch size, see `Trainer.find_batch_size`."""
    _check(fits, start, max_size)
    found = None
    reporter = Reporter(True, fits.setup.merged.config.verbose)
    for size in _sizes(start, max_size):
        reason = _try(fits, train_data, size)
        reporter({"kind": "notice", "text": f"batch_size={size}: {reason or 'fits'}"})
        if reason is not None:
            break
        found = size
    reporter.close()
    if found is None:
        kind = ConfigError if isinstance(reason, NotThatSize) else ResourceError
        raise kind(f"start={start} is too large ({reason}): lower it")
    return found


def _check(fits: Fits, start: int, max_size: int | None) -> None:
    """Raise ConfigError if the finder cannot run in this process, or if the sizes are wrong."""
    check_unused(fits, "find_batch_size()")
    if fits.setup.worker is not None:
        raise ConfigError(
            "find_batch_size() cannot run in a worker, because a worker that is out of memory would block those of this run: call it in a"
            " script that is started with 'python SCRIPT' and sets nproc_per_node, then set the batch_size that it finds in this run"
        )
    for name, value in (("start", start), ("max_size", start if max_size is None else max_size)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name}={value!r} is not a batch size: give a whole number, at least 1")
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
    """Return why `size` does not fit, or None if it does. Raises any other error of the fit that tries it."""
    setup = fits.setup
    own = setup.merged.config
    num_micro_batches = own.gradient_accumulation_steps
    if own.global_batch_size is not None:
        num_micro_batches = max(2, math.ceil(own.global_batch_size / (size * setup.backend.data_parallel_size)))
    if not setup.job.names:  # with one model, a third micro-batch needs no more memory
        num_micro_batches = min(num_micro_batches, 2)
    settings = {
        "gradient_accumulation_steps": num_micro_batches, "global_batch_size": None, "epochs": _UPDATES,
        "max_steps": _UPDATES, "max_restarts": 0, "restart_on_exception": False, "verbose": False,
    }  # fmt: skip
    check = _SizeCheck(size * num_micro_batches * setup.backend.data_parallel_size)
    job = dataclasses.replace(setup.job, scheduler=None)
    tried = finder_setup(setup, _REQUEST, settings, job=job, callbacks=[check], sweep={"batch_size": size})
    check_here(tried, tried.merged, train_data, None)
    directory = choose_run_dir(script_name()).absolute()
    fit = remote_fit(SizeFit, Fits(tried, fits.trainer_class), tried.merged, directory, train_data)
    run = RunDirectory(directory)
    run.check(resume=False)
    try:
        code = run_in_workers(fit, tried, tried.merged, run)
        if code == _PREEMPTED:
            raise TrainingInterrupted(signal.SIGTERM)
        reason = None if code == 0 else _reason(code, run)
    # The messages of these errors name no log in `directory`.
    except (KeyboardInterrupt, TrainingInterrupted, ConfigError, ResourceError):
        _remove(directory)
        raise
    _remove(directory)
    return reason


def _remove(directory: Path) -> None:
    shutil.rmtree(directory)
    with contextlib.suppress(OSError):  # the parent has other entries
        directory.parent.rmdir()


def _reason(code: int, run: RunDirectory) -> DistributedError:
    """Return the error that says why the size does not fit.

    Raises an error that has nothing to do with memory. The directory of the fit is then kept.
    """
    error = failure(code, run, kinds=_KINDS)
    if isinstance(error, tuple(_KINDS.values())):
        return error
    # A worker that was killed counts as out of memory, because the kernel's OOM killer reports nothing else.
    if isinstance(error, TrainingError) and _KILLED in str(error):
        return OutOfMemory(str(error).partition(" (whole log")[0])
    raise error


class SizeFit(RemoteFit):
    """A fit of a few updates that tries a size, in each worker."""

    def fit(self, trainer: FittedTrainer) -> None:
        setup = trainer.setup.for_request(_REQUEST_OF_WORKERS)
        try:
            with interrupts_kept():
                Fits(setup, type(trainer)).fit({}, self.train_data)
        except Exception as error:  # each engine raises its own class when memory runs out
            if is_out_of_memory(error):
                rank = setup.worker.rank if setup.worker is not None else 0
                raise OutOfMemory(f"rank {rank} is out of memory: {memory_line(error)}") from error
            raise


class _SizeCheck(Callback):
    """Raise NotThatSize, on all ranks alike, if the first update has another number of samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples  # of an update, over all ranks

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if state.step == 1 and result.num_samples != self._num_samples:
            raise NotThatSize(
                f"the data gives the first update {result.num_samples} samples, not {self._num_samples}"
                " (it has no more, or a batch sampler of its own)"
            )
