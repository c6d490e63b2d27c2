"""Watch, seed and restore the global generators of torch, numpy and `random` together, at low cost."""

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
_numpy: Any = numpy.random  # numpy's stubs lack get_bit_generator
TORCH, PYTHON, NUMPY, ALL = 1, 2, 4, 7
_WORDS = 624  # words of a Mersenne Twister


class _Memory(NamedTuple):
    """Hold the address of a generator's state.

    Reading the memory takes 0.5 us. Asking numpy for the state takes 40 us, and `random` 9 us.
    """

    address: int
    size: int

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def write(self, state: bytes) -> None:
        ctypes.memmove(self.address, state, self.size)


class RandomState(NamedTuple):
    """Hold the state of all three generators at one moment."""

    torch: Tensor
    gauss: Any  # Python's spare normal variate (gauss_next)
    raw: tuple[bytes, ...]  # the states read from memory; empty if their addresses are unknown
    public: tuple[Any, Any] | None  # otherwise the states from `random` and numpy, which is slow


def save() -> RandomState:
    """Return the current state of the generators. This takes 3 us."""
    state = torch.default_generator.get_state()
    memory = _memory()
    if memory:
        return RandomState(state, _python.gauss_next, tuple([location.read() for location in memory]), None)
    return RandomState(state, None, (), (random.getstate(), numpy.random.get_state(legacy=False)))


def restore(state: RandomState) -> None:
    """Restore the generators to the state that `save` returned."""
    torch.default_generator.set_state(state.torch)
    if state.public is not None:
        random.setstate(state.public[0])
        numpy.random.set_state(state.public[1])
        return
    _python.gauss_next = state.gauss
    for location, raw in zip(_memory(), state.raw, strict=True):
        location.write(raw)


def drawn(state: RandomState) -> int:
    """Return which generators moved since `state` was saved.

    The result is a sum of TORCH, PYTHON and NUMPY, or ALL if it cannot be determined.
    """
    if state.public is not None:
        return ALL
    python, *of_numpy = [location.read() for location in _memory()]
    moved = 0 if torch.default_generator.get_state().numpy().tobytes() == state.torch.numpy().tobytes() else TORCH
    if python != state.raw[0] or _python.gauss_next != state.gauss:
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
    if not which & NUMPY:
        return
    bits = _numpy.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed(value >> 32)
    else:  # the user chose another generator with numpy.random.set_bit_generator
        numpy.random.set_state({**type(bits)(value >> 32).state, "has_gauss": 0, "gauss": 0.0})


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


def _memory() -> tuple[_Memory, ...]:
    """Return the addresses of numpy's and Python's state, or () if they are not found."""
    return _find(_numpy.get_bit_generator())


@functools.lru_cache(maxsize=4)
def _find(bits: Any) -> tuple[_Memory, ...]:
    python_offset, gauss_offset = _python_offset(), _gauss_offset()
    if not isinstance(bits, numpy.random.MT19937) or python_offset < 0 or gauss_offset < 0:
        return ()
    size = 4 * (_WORDS + 1)  # the 624 words and the position in them
    return (
        _Memory(id(_python) + python_offset, size),
        _Memory(bits.ctypes.state_address, size),
        _Memory(id(numpy.random.mtrand._rand) + gauss_offset, 16),  # numpy's spare normal variate: has_gauss and gauss
    )


def _python_offset() -> int:
    """Return the offset of (index, 624 words) in `random.Random`, or -1. It is found by searching for a known state."""
    probe = random.Random(5)
    probe.random()
    *words, index = probe.getstate()[1]
    return _look_in(probe, struct.pack(f"{_WORDS + 1}I", index, *words))


def _gauss_offset() -> int:
    """Return the offset of (has_gauss, gauss) in numpy's RandomState, or -1.

    It is found by searching for a known state.
    """
    probe = numpy.random.RandomState(5)
    state: Any = probe.get_state(legacy=False)
    probe.set_state({**state, "has_gauss": 1, "gauss": 1.2345678901})
    return _look_in(probe, struct.pack("iid", 1, 0, 1.2345678901))


def _look_in(instance: Any, known: bytes) -> int:
    return ctypes.string_at(id(instance), type(instance).__basicsize__).find(known)
