"""Hold the trial that this process is in, if any. A Trainer in a trial reports to it and uses the trial's directory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.state import EpochMetrics


@dataclasses.dataclass(frozen=True)
class Trial:
    """Describe a trial to the Trainers that are created in it."""

    directory: Path  # run directory of the first fit of the trial
    is_again: bool  # whether the trial has run before and continues from its newest checkpoint
    # Called with the metrics of each finished epoch. It may raise to end the trial.
    on_epoch: Callable[[EpochMetrics], None]
    # Called before each fit with its Trainer and the Fits of that. It may raise.
    on_fit: Callable[[Any, Any], None] = lambda trainer, fits: None
    # Settings for all Trainers in the trial. A Trainer's own settings override these.
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    # Functions that are called when the trial leaves this process, to release locks.
    at_end: list[Callable[[], None]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class _Here:
    trial: Trial | None = None


_here = _Here()


def current() -> Trial | None:
    """Return the trial that this process is in, or None.

    The process that calls `fit` is in the trial. Workers that this `fit` starts are not.
    """
    return _here.trial


@contextlib.contextmanager
def inside(trial: Trial) -> Iterator[None]:
    """Make `trial` the current trial within the block."""
    before, _here.trial = _here.trial, trial
    try:
        yield
    finally:
        _here.trial = before
        for let_go in trial.at_end:
            let_go()
