"""Watch, seed and restore the global generators of torch, numpy and `random` together, at low cost."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from distributed.backends import twisters
from distributed.backends.twisters import ALL, NUMPY, PYTHON, TORCH


class RandomState(NamedTuple):
    """Hold the state of all three generators at one moment."""

    torch: Tensor
    gauss: Any  # Python's spare normal variate (gauss_next)
    raw: tuple[bytes, ...]  # the states read from memory; empty if their addresses are unknown
    public: tuple[Any, Any] | None  # otherwise the states from `random` and numpy, which is slow


def save() -> RandomState:
    """Return the current state of the generators. This takes 3 us."""
    state = torch.default_generator.get_state()
    memory = twisters.memory()
    if memory is not None:
        return RandomState(state, twisters.python.gauss_next, tuple([location.read() for location in memory]), None)
    return RandomState(state, None, (), (random.getstate(), numpy.random.get_state(legacy=False)))


def restore(state: RandomState) -> None:
    """Restore the generators to the state that `save` returned."""
    torch.default_generator.set_state(state.torch)
    if state.public is not None:
        random.setstate(state.public[0])
        numpy.random.set_state(state.public[1])
        return
    twisters.python.gauss_next = state.gauss
    for location, raw in zip(twisters.memory() or (), state.raw, strict=True):
        location.write(raw)


def drawn(state: RandomState) -> int:
    """Return which generators moved since `state` was saved.

    The result is a sum of TORCH, PYTHON and NUMPY, or ALL if it cannot be determined.
    """
    memory = twisters.memory()
    if state.public is not None or memory is None:
        return ALL
    python, *of_numpy = [location.read() for location in memory]
    moved = 0 if torch.default_generator.get_state().numpy().tobytes() == state.torch.numpy().tobytes() else TORCH
    if python != state.raw[0] or twisters.python.gauss_next != state.gauss:
        moved |= PYTHON
    return moved if tuple(of_numpy) == state.raw[1:] else moved | NUMPY


def seed(value: int, which: int = ALL) -> None:
    """Seed the generators `which` from one 64-bit number.

    torch and numpy both seed a Mersenne Twister with 32 bits. Each gets a different half of `value`; otherwise they
    would draw the same numbers.
    """
    if which & TORCH:
        torch.default_generator.manual_seed(value & 0xFFFFFFFF)
    if which & PYTHON:
        random.seed(value)
    if which & NUMPY:
        twisters.seed_numpy(value)


def begin_sample(value: int, which: int, version: int) -> None:
    """Let the generators `which` draw the random numbers of one sample, which `value` of 64 bits decides.

    In version 1 of a run's data (`TrainState.data_version`), this is `seed`. Later versions seed Python's generator in another
    way, see `twisters.begin_sample`.
    """
    if version == 1:
        seed(value, which)
        return
    if which & TORCH:
        torch.default_generator.manual_seed(value & 0xFFFFFFFF)
    if which & (PYTHON | NUMPY):
        twisters.begin_sample(value, which)


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
