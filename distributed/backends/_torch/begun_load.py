"""A load of a model or of an optimizer that has begun: what it has to read, and what it does then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distributed.checkpoints.reading import run_in_threads


def _nothing() -> None: ...


class BegunLoad(NamedTuple):
    """The rest of a load whose checkpoint fits.

    Attributes:
        finish: does what is left after `reads`.
        reads: fill tensors from the files. They may run in any order and in any threads.
        give_up: called in place of `finish` if `reads` have failed or were interrupted.
    """

    finish: Callable[[], None]
    reads: Sequence[Callable[[], None]] = ()
    give_up: Callable[[], None] = _nothing


def complete(load: BegunLoad) -> None:
    """Do all that is left of a load. Raises the CheckpointError of a file that cannot be read."""
    read(load)
    load.finish()


def read(*loads: BegunLoad) -> None:
    """Read the tensors of several loads. Raises the CheckpointError of a file that cannot be read."""
    try:
        run_in_threads([task for load in loads for task in load.reads])
    except BaseException:
        for load in loads:
            load.give_up()
        raise
