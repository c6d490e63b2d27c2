"""Read and write the states of Python's and numpy's global generators in memory, at low cost. Both are Mersenne Twisters."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy

from distributed.data import sample_words

python: Any = random._inst  # the instance behind random.random() and friends
_numpy: Any = numpy.random  # numpy's stubs lack get_bit_generator
PYTHON, NUMPY = 2, 4
_WORDS = 624  # words of a Mersenne Twister
_WORD_BYTES = 4
_BYTES = _WORDS * _WORD_BYTES
_FIRST, _NO_SPARE = bytes(_WORD_BYTES), bytes(16)
_AT_ONCE = 32  # samples whose states are computed together, so that they stay in the cache


class GeneratorMemory(NamedTuple):
    """The memory of the generators. Reading a state takes less than 0.5 us. Asking numpy for it takes 40 us, and `random` 9 us."""

    python_position: memoryview  # in the words
    python_words: memoryview
    numpy_words: memoryview
    numpy_position: memoryview
    numpy_spare: memoryview  # a normal variate that is kept for the next call: has_gauss and gauss


def memory() -> GeneratorMemory | None:
    """Return the memory of the generators, or None if it is not found."""
    return _find(_numpy.get_bit_generator())


def seed_numpy(value: int) -> None:
    """Seed numpy's global generator with 32 bits."""
    bits = _numpy.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed(value)
    else:  # the user chose another generator with numpy.random.set_bit_generator
        numpy.random.set_state({**type(bits)(value).state, "has_gauss": 0, "gauss": 0.0})


class SampleStates:
    """The states with which the generators begin each sample of a batch, from version 3 of the order on.

    `random.seed` takes several microseconds, because each word of a state depends on the one before. Here all words come from
    SplitMix64, and those of many samples are computed together. The position in the words is 0. The first 624 numbers are therefore
    the words themselves, and the generator computes the next ones from them as usual.

    Args:
        seeds: the seed of each sample, of 64 bits.
        which: the generators, a sum of PYTHON and NUMPY.
    """

    def __init__(self, seeds: Sequence[int], which: int) -> None:
        self._seeds, self._which = seeds, which
        self._memory = memory()
        self._is_twister = isinstance(_numpy.get_bit_generator(), numpy.random.MT19937)
        self._block = -1

    def begin(self, number: int) -> None:
        """Set the generators to the states of the sample `number` of the batch."""
        block, row = divmod(number, _AT_ONCE)
        if block != self._block:
            self._compute(block)
        start, end = row * self._row_bytes, (row + 1) * self._row_bytes
        of_python, of_numpy = self._words[start : start + _BYTES], self._words[end - _BYTES : end]
        if self._memory is None:
            self._begin_slowly(of_python, of_numpy, self._seeds[number])
            return
        if self._which & PYTHON:
            self._memory.python_position[:] = _FIRST
            self._memory.python_words[:] = of_python
            python.gauss_next = None
        if self._which & NUMPY:
            self._memory.numpy_words[:] = of_numpy
            self._memory.numpy_position[:] = _FIRST
            self._memory.numpy_spare[:] = _NO_SPARE

    def _begin_slowly(self, of_python: memoryview, of_numpy: memoryview, seed: int) -> None:
        """Set the generators through `random` and numpy."""
        if self._which & PYTHON:
            random.setstate((random.Random.VERSION, (*of_python.cast("I"), 0), None))
        if self._which & NUMPY and not self._is_twister:
            seed_numpy(seed >> 32)
        elif self._which & NUMPY:
            numpy.random.set_state(("MT19937", numpy.frombuffer(of_numpy, numpy.uint32), 0, 0, 0.0))

    def _compute(self, block: int) -> None:
        """Compute the words of a block of samples: those of Python, then those of numpy."""
        self._block = block
        seeds = self._seeds[block * _AT_ONCE : (block + 1) * _AT_ONCE]
        half = _WORDS // 2  # a number of SplitMix64 gives two words
        words = sample_words(
            seeds, range(0 if self._which & PYTHON else half, 2 * half if self._which & NUMPY else half)
        )
        self._words, self._row_bytes = words.data.cast("B"), words.shape[1] * words.itemsize


@functools.lru_cache(maxsize=4)
def _find(bits: Any) -> GeneratorMemory | None:
    python_offset, gauss_offset = _python_offset(), _gauss_offset()
    if not isinstance(bits, numpy.random.MT19937) or python_offset < 0 or gauss_offset < 0:
        return None
    of_python, of_numpy = id(python) + python_offset, bits.ctypes.state_address
    return GeneratorMemory(
        _at(of_python, _WORD_BYTES),
        _at(of_python + _WORD_BYTES, _BYTES),
        _at(of_numpy, _BYTES),
        _at(of_numpy + _BYTES, _WORD_BYTES),
        _at(id(numpy.random.mtrand._rand) + gauss_offset, len(_NO_SPARE)),
    )


def _at(address: int, num_bytes: int) -> memoryview:
    return memoryview((ctypes.c_char * num_bytes).from_address(address)).cast("B")


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
