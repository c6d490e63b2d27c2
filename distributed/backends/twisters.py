"""Save, restore and set Python's and numpy's global Mersenne Twisters through their memory. No framework."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from typing import Any, NamedTuple

import numpy
from numpy.typing import NDArray

python: Any = random.seed.__self__  # type: ignore[attr-defined] # the instance behind random.random() and friends
_numpy: Any = numpy.random  # numpy's stubs lack get_bit_generator
TORCH, PYTHON, NUMPY, ALL = 1, 2, 4, 7
NUM_WORDS = 624  # words of a Mersenne Twister
_DROPPED = 12  # numbers that SFC64 draws before its states are mixed


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

    def words(self) -> NDArray[numpy.uint32]:
        """Return an array that shares the memory."""
        return numpy.ctypeslib.as_array((ctypes.c_uint32 * (self.size // 4)).from_address(self.address))


class Found(NamedTuple):
    """Hold the addresses of the generators' states."""

    python: Memory  # the position in the words, then the words
    numpy: Memory  # the words, then the position in them
    numpy_gauss: Memory  # numpy's spare normal variate: has_gauss and gauss


class _Arrays(NamedTuple):
    """Hold arrays that share the memory of the generators."""

    python_position: NDArray[numpy.uint32]
    python_words: NDArray[numpy.uint32]
    numpy_words: NDArray[numpy.uint32]
    numpy_rest: NDArray[numpy.uint32]  # the position
    numpy_gauss: NDArray[numpy.uint32]


def memory() -> Found | None:
    """Return the addresses of numpy's and Python's states, or None if they are not found."""
    return _find(_numpy.get_bit_generator())


def begin_sample(value: int, which: int = ALL) -> NDArray[numpy.uint32]:
    """Give each of the generators PYTHON and NUMPY in `which` an own stream that `value`, of 64 bits, decides.

    This takes a fraction of the time of seeding. The 624 words of a Mersenne Twister are numbers of SFC64 (Chris Doty-Humphrey,
    PractRand), which is seeded as PractRand does: a = b = c = value, counter = 1, and the first twelve numbers are dropped. A
    generator returns these words, tempered, before it computes further ones. The generators, and torch's, have words of their own:
    the first 624 are torch's, then come Python's and numpy's.

    Returns:
        The words `[at least 624]`, for torch's generator.
    """
    words = _expansion()(value, 3 if which & NUMPY else 2 if which & PYTHON else 1)
    arrays = _arrays(_numpy.get_bit_generator()) if which & (PYTHON | NUMPY) else None
    if which & PYTHON:
        _begin_python(words[NUM_WORDS : 2 * NUM_WORDS], arrays)
    if which & NUMPY:
        _begin_numpy(words[2 * NUM_WORDS :], arrays, value)
    return words


def seed_numpy(value: int) -> None:
    """Seed numpy's global generator from the upper half of a number of 64 bits."""
    bits = _numpy.get_bit_generator()
    if isinstance(bits, numpy.random.MT19937):
        numpy.random.seed(value >> 32)
    else:  # the user chose another generator with numpy.random.set_bit_generator
        numpy.random.set_state({**type(bits)(value >> 32).state, "has_gauss": 0, "gauss": 0.0})


def _begin_python(words: NDArray[numpy.uint32], arrays: _Arrays | None) -> None:
    if arrays is None:
        random.setstate((3, (*words.tolist(), 0), None))
        return
    arrays.python_words[:] = words
    arrays.python_position[:] = 0
    python.gauss_next = None


def _begin_numpy(words: NDArray[numpy.uint32], arrays: _Arrays | None, value: int) -> None:
    if arrays is not None:
        arrays.numpy_words[:] = words
        arrays.numpy_rest[:] = 0
        arrays.numpy_gauss[:] = 0
    elif isinstance(_numpy.get_bit_generator(), numpy.random.MT19937):
        numpy.random.set_state(("MT19937", words, 0, 0, 0.0))
    else:
        seed_numpy(value)


class _Expansion:
    """Expand numbers of 64 bits to the words of Mersenne Twisters."""

    def __init__(self) -> None:
        self._bits = numpy.random.SFC64(0)
        state: Any = self._bits.state
        found = Memory(self._bits.ctypes.state_address, 32)
        is_known = found.read() == state["state"]["state"].tobytes()
        self._memory = (ctypes.c_char * found.size).from_address(found.address) if is_known else None
        self._pack = struct.Struct("4Q").pack_into

    def __call__(self, value: int, num_generators: int) -> NDArray[numpy.uint32]:
        if self._memory is not None:
            self._pack(self._memory, 0, value, value, value, 1)
        else:
            words = numpy.array([value, value, value, 1], numpy.uint64)
            self._bits.state = {"bit_generator": "SFC64", "state": {"state": words}, "has_uint32": 0, "uinteger": 0}
        count = _DROPPED + num_generators * NUM_WORDS // 2
        words_of_all: NDArray[numpy.uint32] = self._bits.random_raw(count)[_DROPPED:].view(numpy.uint32)
        return words_of_all


@functools.cache
def _expansion() -> _Expansion:
    return _Expansion()


@functools.lru_cache(maxsize=4)
def _arrays(bits: Any) -> _Arrays | None:
    if (found := _find(bits)) is None:
        return None
    of_python, of_numpy = found.python.words(), found.numpy.words()
    return _Arrays(of_python[:1], of_python[1:], of_numpy[:-1], of_numpy[-1:], found.numpy_gauss.words())


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
    return _look_in(probe, struct.pack("iid", 1, 0, 1.2345678901))


def _look_in(instance: Any, known: bytes) -> int:
    return ctypes.string_at(id(instance), type(instance).__basicsize__).find(known)
