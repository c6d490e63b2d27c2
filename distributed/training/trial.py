"""The trial that this process is in, if any: a Trainer in it reports by itself, and works in the trial's directory."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True)
class Trial:
    """What a Trainer may know of the trial that it is made in."""

    directory: Path  # the run directory of its first fit
    is_again: bool  # it has run before, and goes on from its newest checkpoint
    report: Callable[[Mapping[str, Any]], None]  # the row of each finished epoch; may raise to end the trial
    on_fit: Callable[[Any], None] = lambda trainer: None  # called before each fit with its Trainer; may raise
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of its Trainers, weaker than what they say
    at_end: list[Callable[[], None]] = dataclasses.field(default_factory=list)  # what is to be let go of in its process


@dataclasses.dataclass
class _Here:
    trial: Trial | None = None


_here = _Here()


def current() -> Trial | None:
    """The trial, or None in a process that is in none: a trial's own workers are not, their launcher's caller is."""
    return _here.trial


@contextlib.contextmanager
def inside(trial: Trial) -> Iterator[None]:
    """What runs below is in `trial`."""
    before, _here.trial = _here.trial, trial
    try:
        yield
    finally:
        _here.trial = before
        for let_go in trial.at_end:
            let_go()
