"""The global generators of torch, numpy and `random` as one thing that is cheap to watch, seed and put back."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

_python: Any = random.seed.__self__  # type: ignore[attr-defined] # the instance behind random.random() and friends
_numpy: Any = numpy.random  # its stubs leave get_bit_generator out
TORCH, PYTHON, NUMPY, ALL = 1, 2, 4, 7
_WORDS = 624  # of a Mersenne Twister


class _Memory(NamedTuple):
    """Where a generator keeps its state. Reading it takes 0.5 us, asking numpy or `random` for it 40 and 9."""

    address: int
    size: int

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def write(self, state: bytes) -> None:
        ctypes.memmove(self.address, state, self.size)


class RandomState(NamedTuple):
    """The state of all three generators at one moment."""

    torch: Tensor
    gauss: Any  # Python's spare normal number
    raw: tuple[bytes, ...]  # what lies in memory; empty where it was not found
    public: tuple[Any, Any] | None  # else what `random` and numpy say, which is slow


def save() -> RandomState:
    """The state of the generators now, 3 us."""
    state = torch.default_generator.get_state()
    memory = _memory()
    if memory:
        return RandomState(state, _python.gauss_next, tuple([place.read() for place in memory]), None)
    return RandomState(state, None, (), (random.getstate(), numpy.random.get_state(legacy=False)))


def restore(state: RandomState) -> None:
    """Put the generators back to what `save` saw."""
    torch.default_generator.set_state(state.torch)
    if state.public is not None:
        random.setstate(state.public[0])
        numpy.random.set_state(state.public[1])
        return
    _python.gauss_next = state.gauss
    for place, raw in zip(_memory(), state.raw, strict=True):
        place.write(raw)


def drawn(state: RandomState) -> int:
    """Which generators moved since `state` was saved, a sum of TORCH, PYTHON and NUMPY; ALL where nobody can tell."""
    if state.public is not None:
        return ALL
    python, *of_numpy = [place.read() for place in _memory()]
    moved = 0 if torch.default_generator.get_state().numpy().tobytes() == state.torch.numpy().tobytes() else TORCH
    if python != state.raw[0] or _python.gauss_next != state.gauss:
        moved |= PYTHON
    return moved if tuple(of_numpy) == state.raw[1:] else moved | NUMPY


def seed(value: int, which: int = ALL) -> None:
    """Seed the generators `which` from one 64-bit number.

    torch and numpy both seed a Mersenne Twister with 32 bits: each gets another half, else they would draw alike.
    """
    if which & TORCH:
        torch.default_generator.manual_seed(value & 0xFFFFFFFF)
    if which & PYTHON:
        random.seed(value)
    if not which & NUMPY:
        return
    bits = _numpy.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed(value >> 32)
    else:  # the user chose another with numpy.random.set_bit_generator
        numpy.random.set_state({**type(bits)(value >> 32).state, "has_gauss": 0, "gauss": 0.0})


@contextmanager
def preserved() -> Iterator[RandomState]:
    """Whatever happens inside, the generators end as they were."""
    state = save()
    try:
        yield state
    finally:
        restore(state)


class OwnStream:
    """A state of its own for code that runs in pieces, such as a generator that shuffles: `with own: next(it)`."""

    def __init__(self, value: int) -> None:
        with preserved():
            seed(value)
            self._own = save()

    def __enter__(self) -> None:
        self._outer = save()
        restore(self._own)

    def __exit__(self, *_: object) -> None:
        self._own = save()
        restore(self._outer)


def _memory() -> tuple[_Memory, ...]:
    """The places of numpy's and Python's state; empty where they are not where we look."""
    return _find(_numpy.get_bit_generator())


@functools.lru_cache(maxsize=4)
def _find(bits: Any) -> tuple[_Memory, ...]:
    python_offset, gauss_offset = _python_offset(), _gauss_offset()
    if not isinstance(bits, numpy.random.MT19937) or python_offset < 0 or gauss_offset < 0:
        return ()
    size = 4 * (_WORDS + 1)  # the words and the place among them
    return (
        _Memory(id(_python) + python_offset, size),
        _Memory(bits.ctypes.state_address, size),
        _Memory(id(numpy.random.mtrand._rand) + gauss_offset, 16),  # has_gauss and gauss
    )


def _python_offset() -> int:
    """Where `random.Random` keeps (index, 624 words), found by looking for a known state; -1 where it is elsewhere."""
    probe = random.Random(5)
    probe.random()
    *words, index = probe.getstate()[1]
    return _look_in(probe, struct.pack(f"{_WORDS + 1}I", index, *words))


def _gauss_offset() -> int:
    """Where numpy's RandomState keeps (has_gauss, gauss), found the same way."""
    probe = numpy.random.RandomState(5)
    state: Any = probe.get_state(legacy=False)
    probe.set_state({**state, "has_gauss": 1, "gauss": 1.2345678901})
    return _look_in(probe, struct.pack("iid", 1, 0, 1.2345678901))


def _look_in(instance: Any, known: bytes) -> int:
    return ctypes.string_at(id(instance), type(instance).__basicsize__).find(known)
