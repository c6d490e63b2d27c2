"""Save, restore and set Python's and numpy's global Mersenne Twisters through their memory. No framework."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from typing import Any, NamedTuple

import numpy

python: Any = random.seed.__self__  # type: ignore[attr-defined] # the instance behind random.random() and friends
_numpy: Any = numpy.random  # numpy's stubs lack get_bit_generator
TORCH, PYTHON, NUMPY, ALL = 1, 2, 4, 7
NUM_WORDS = 624  # words of a Mersenne Twister
_GOLDEN = 0x9E3779B97F4A7C15
_POSITION, _GAUSS = struct.Struct("I"), struct.Struct("iid")


class Memory(NamedTuple):
    """Hold the address of a generator's state.

    Reading the memory takes 0.5 us. Asking numpy for the state takes 40 us, and `random` 9 us.
    """

    address: int
    size: int

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def write(self, state: bytes) -> None:
        ctypes.memmove(self.address, state, self.size)

    def view(self) -> memoryview:
        """Return the memory, to write to it."""
        return memoryview((ctypes.c_char * self.size).from_address(self.address)).cast("B")


class Found(NamedTuple):
    """Hold the addresses of the generators' states."""

    python: Memory  # the position in the words, then the words
    numpy: Memory  # the words, then the position in them
    numpy_gauss: Memory  # numpy's spare normal variate: has_gauss and gauss


class _Streams(NamedTuple):
    """Hold what `begin_sample` writes to."""

    seed_numpy: Any  # seeds numpy's global generator, except its spare number
    numpy_gauss: memoryview
    seed_own: Any  # seeds a generator whose words become Python's
    own_words: memoryview
    python: memoryview  # the words
    python_position: memoryview
    own: Any  # keeps that generator alive


def memory() -> Found | None:
    """Return the addresses of numpy's and Python's states, or None if they are not found."""
    return _find(_numpy.get_bit_generator())


def begin_sample(value: int, which: int = ALL) -> None:
    """Let the generators PYTHON and NUMPY in `which` draw the random numbers that `value`, of 64 bits, decides.

    numpy's generator is seeded as by `seed_numpy`. Python's gets the words that numpy computes from one seed of 32 bits
    (`init_genrand` of Matsumoto and Nishimura), in half of the time of `random.seed`, which computes them three times.
    """
    streams = _streams(_numpy.get_bit_generator())
    if which & NUMPY:
        if streams is None:
            seed_numpy(value)
        else:
            streams.seed_numpy(value >> 32)
            _GAUSS.pack_into(streams.numpy_gauss, 0, 0, 0, 0.0)
    if which & PYTHON:
        # A third word beside the two halves of `value`, with which torch's and numpy's generators are seeded.
        _begin_python((value * _GOLDEN >> 32) & 0xFFFFFFFF, streams)


def _begin_python(word: int, streams: _Streams | None) -> None:
    if streams is None:
        state: Any = numpy.random.RandomState(word).get_state()
        random.setstate((3, (*state[1].tolist(), NUM_WORDS), None))
        return
    streams.seed_own(word)
    streams.python[:] = streams.own_words
    _POSITION.pack_into(streams.python_position, 0, NUM_WORDS)
    python.gauss_next = None


def seed_numpy(value: int) -> None:
    """Seed numpy's global generator from the upper half of a number of 64 bits."""
    bits = _numpy.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed(value >> 32)
    else:  # the user chose another generator with numpy.random.set_bit_generator
        numpy.random.set_state({**type(bits)(value >> 32).state, "has_gauss": 0, "gauss": 0.0})


@functools.lru_cache(maxsize=4)
def _streams(bits: Any) -> _Streams | None:
    if (found := _find(bits)) is None:
        return None
    own: Any = numpy.random.MT19937(0)
    words = Memory(own.ctypes.state_address, 4 * NUM_WORDS)
    position, of_python = found.python.view()[:4], found.python.view()[4:]
    return _Streams(
        bits._legacy_seeding, found.numpy_gauss.view(), own._legacy_seeding, words.view(), of_python, position, own
    )


@functools.lru_cache(maxsize=4)
def _find(bits: Any) -> Found | None:
    python_offset, gauss_offset = _python_offset(), _gauss_offset()
    if not isinstance(bits, numpy.random.MT19937) or python_offset < 0 or gauss_offset < 0:
        return None
    size = 4 * (NUM_WORDS + 1)  # the words and the position in them
    return Found(
        Memory(id(python) + python_offset, size),
        Memory(bits.ctypes.state_address, size),
        Memory(id(numpy.random.mtrand._rand) + gauss_offset, 16),
    )


def _python_offset() -> int:
    """Return the offset of (index, 624 words) in `random.Random`, or -1. It is found by searching for a known state."""
    probe = random.Random(5)
    probe.random()
    *words, index = probe.getstate()[1]
    return _look_in(probe, struct.pack(f"{NUM_WORDS + 1}I", index, *words))


def _gauss_offset() -> int:
    """Return the offset of (has_gauss, gauss) in numpy's RandomState, or -1.

    It is found by searching for a known state.
    """
    probe = numpy.random.RandomState(5)
    state: Any = probe.get_state(legacy=False)
    probe.set_state({**state, "has_gauss": 1, "gauss": 1.2345678901})
    return _look_in(probe, _GAUSS.pack(1, 0, 1.2345678901))


def _look_in(instance: Any, known: bytes) -> int:
    return ctypes.string_at(id(instance), type(instance).__basicsize__).find(known)
