"""Find the largest batch that fits into memory: workers are started for each size and run a few updates.

A rank that runs out of memory in the middle of an update leaves the others waiting in a collective. In workers of its
own an attempt ends like any failed fit, whatever the engine: the launcher stops the other workers, and the next attempt
finds the memory as a training run does. A size fits if every rank completed its updates, so all ranks agree.
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

# The first update creates the optimizer's state, and the second holds it beside the activations. The third is there because one
# of them may be the short last update of an epoch.
_UPDATES = 3
_PREEMPTED = 128 + signal.SIGTERM
_KILLED = f"({signal.SIGKILL.name})"  # as in the launcher's message


class OutOfMemory(DistributedError):
    """A rank ran out of memory. The exit code is that of the processes of an attempt."""

    exit_code = 4


class NotThatSize(DistributedError):
    """The data gives no update of the size to try. The exit code is that of the processes of an attempt."""

    exit_code = 5


_KINDS: dict[int, type[DistributedError]] = {kind.exit_code: kind for kind in (OutOfMemory, NotThatSize)}


def find_batch_size(fits: Fits, train_data: Any, *, start: int, max_size: int | None) -> int:
    """Return the batch size, see `Trainer.find_batch_size`."""
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
            "find_batch_size() starts workers of its own, because one that is out of memory would block those of this run: call it in a"
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
    """Return why `size` does not fit, or None if it does. Raises any other error of the attempt."""
    setup = fits.setup
    own = setup.merged.config
    is_accumulated = own.global_batch_size is not None or own.gradient_accumulation_steps > 1
    num_micro_batches = 2 if is_accumulated else 1  # a third micro-batch needs no more memory
    settings = {
        "gradient_accumulation_steps": num_micro_batches, "global_batch_size": None, "epochs": _UPDATES,
        "max_steps": _UPDATES, "max_restarts": 0, "restart_on_exception": False, "verbose": False,
    }  # fmt: skip
    search = setup.for_search(settings, job=dataclasses.replace(setup.job, scheduler=None), batch_size=size)
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
    except (KeyboardInterrupt, TrainingInterrupted, ConfigError, ResourceError):  # messages without a path to a log
        _remove(directory)
        raise
    _remove(directory)
    return reason


def _remove(directory: Path) -> None:
    shutil.rmtree(directory)
    with contextlib.suppress(OSError):  # the parent is not empty
        directory.parent.rmdir()


def _reason(code: int, run: RunDirectory) -> DistributedError:
    """Return why the size does not fit.

    Raises an error that has nothing to do with memory. The directory of the attempt is then kept.
    """
    error = failure(code, run, kinds=_KINDS)
    if isinstance(error, tuple(_KINDS.values())):
        return error
    if isinstance(error, TrainingError) and _KILLED in str(error):  # the kernel's OOM killer gives no other reason
        return OutOfMemory(str(error).partition(" (whole log")[0])
    raise error


@dataclasses.dataclass
class Attempt(RemoteFit):
    """A fit of a few updates, in each worker."""

    num_samples: int = 0  # samples of an update, over all ranks

    def fit(self, trainer: FittedTrainer) -> None:
        setup = trainer.setup
        setup.callbacks, setup.keeps_checkpoints = [_SizeCheck(self.num_samples)], False
        try:
            trainer.fit(self.train_data)
        except Exception as error:  # each engine raises its own class when memory runs out
            if is_out_of_memory(error):
                rank = setup.worker.rank if setup.worker is not None else 0
                raise OutOfMemory(f"rank {rank} is out of memory: {memory_line(error)}") from error
            raise


class _SizeCheck(Callback):
    """Raise NotThatSize, on all ranks alike, if the first update has another number of samples."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def on_step_end(self, state: TrainState, result: StepResult) -> None:
        if state.step == 1 and result.num_samples != self._num_samples:
            raise NotThatSize(
                f"the data gives the first update {result.num_samples} samples, not {self._num_samples}"
                " (it has no more, or a batch sampler of its own)"
            )
