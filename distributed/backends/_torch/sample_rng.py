"""Watch, seed and restore the global generators of torch, numpy and `random` together, at low cost."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from distributed.backends.twisters import NUMPY, PYTHON, GeneratorMemory, SampleStates, memory, python, seed_numpy

__all__ = ["ALL", "NUMPY", "PYTHON", "TORCH"]
TORCH = 1
ALL = TORCH | PYTHON | NUMPY
_LOW = 0xFFFFFFFF  # the half of a seed for torch
_PARTS_OF_PYTHON = 2  # of `GeneratorMemory`, which begins with them


class RandomState(NamedTuple):
    """Hold the state of all three generators at one moment."""

    torch: Tensor
    gauss: Any  # Python's spare normal variate (gauss_next)
    raw: list[bytes]  # the states read from memory; empty if their addresses are unknown
    public: tuple[Any, Any] | None  # otherwise the states from `random` and numpy, which is slow


def save() -> RandomState:
    """Return the current state of the generators. This takes 3 us."""
    state = torch.default_generator.get_state()
    if locations := memory():
        return RandomState(state, python.gauss_next, [bytes(part) for part in locations], None)
    return RandomState(state, None, [], (random.getstate(), numpy.random.get_state(legacy=False)))


def restore(state: RandomState) -> None:
    """Restore the generators to the state that `save` returned."""
    torch.default_generator.set_state(state.torch)
    if state.public is not None:
        random.setstate(state.public[0])
        numpy.random.set_state(state.public[1])
        return
    python.gauss_next = state.gauss
    for part, raw in zip(_known_memory(), state.raw, strict=True):
        part[:] = raw


def drawn(state: RandomState) -> int:
    """Return which generators moved since `state` was saved.

    The result is a sum of TORCH, PYTHON and NUMPY, or ALL if it cannot be determined.
    """
    if state.public is not None:
        return ALL
    raw = [bytes(part) for part in _known_memory()]
    moved = 0 if torch.default_generator.get_state().numpy().tobytes() == state.torch.numpy().tobytes() else TORCH
    if raw[:_PARTS_OF_PYTHON] != state.raw[:_PARTS_OF_PYTHON] or python.gauss_next != state.gauss:
        moved |= PYTHON
    return moved if raw[_PARTS_OF_PYTHON:] == state.raw[_PARTS_OF_PYTHON:] else moved | NUMPY


def seed(value: int, which: int = ALL) -> None:
    """Seed the generators `which` from one 64-bit number.

    torch and numpy both seed a Mersenne Twister with 32 bits. Each gets a different half of `value`; otherwise they
    would draw the same numbers.
    """
    if which & TORCH:
        torch.default_generator.manual_seed(value & _LOW)
    if which & PYTHON:
        random.seed(value)
    if which & NUMPY:
        seed_numpy(value >> 32)


def seeder(seeds: Sequence[int], which: int, version: int) -> Callable[[int], Any]:
    """Return a function that seeds the generators `which` for the i-th of the samples, from the i-th of `seeds`.

    Before version 3 of the order, `seed` seeds all generators. Later, it seeds torch's only, and `SampleStates` the others.
    """
    of_torch = torch.default_generator.manual_seed
    if which == TORCH:
        return lambda number: of_torch(seeds[number] & _LOW)
    if version < 3:
        return lambda number: seed(seeds[number], which)
    begin = SampleStates(seeds, which).begin

    def begin_all(number: int) -> None:
        of_torch(seeds[number] & _LOW)
        begin(number)

    return begin_all if which & TORCH else begin


@contextmanager
def preserved() -> Iterator[RandomState]:
    """Restore the generators at the end of this block."""
    state = save()
    try:
        yield state
    finally:
        restore(state)


class OwnStream:
    """Hold a separate generator state for code that runs in pieces.

    An example is a generator that shuffles: `with own: next(it)`.
    """

    def __init__(self, value: int) -> None:
        with preserved():
            seed(value)
            self._own = self._first = save()

    @property
    def has_drawn(self) -> bool:
        """Whether the code has drawn random numbers, or may have."""
        with preserved():
            restore(self._own)
            return bool(drawn(self._first))

    def __enter__(self) -> None:
        self._outer = save()
        restore(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = save()
        restore(self._outer)


def _known_memory() -> GeneratorMemory:
    """Return the memory of the generators, which was found when their states were saved."""
    found = memory()
    assert found is not None
    return found
