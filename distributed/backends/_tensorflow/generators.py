"""Seed, save and restore a rank's random generators: the generators of Keras's layers, and the global generators of
Keras, TensorFlow, numpy and Python."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
from keras.src.backend.common import global_state

from distributed.backends._keras.names import model_variables, seed_names
from distributed.backends._tensorflow.replicas import Replicas
from distributed.checkpoints.tensor_file import WORDS, RawTensor, read_raw, write_tensors
from distributed.data import sample_seed
from distributed.errors import CheckpointError
from distributed.launching.engines import seed_python_and_numpy


class Generators:
    """Random generators of training. Training has its own states of the generators; the caller's states of numpy's and
    Python's generators are restored after training."""

    def __init__(self, replicas: Replicas, rank: int) -> None:
        """Give each replica of this process a random stream of its own.

        Replicas are numbered over all processes. `rank` is the number of the first replica of this process.
        """
        self._replicas, self._streams = replicas, range(rank, rank + replicas.number)
        self._own: tuple[Any, Any] | None = None
        self._is_inside = False
        self.model: Any = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Give numpy's and Python's global generators the states of training within the block, and restore the caller's
        states afterwards."""
        if self._is_inside:  # nested, because a callback evaluates during a fit
            yield
            return
        callers = random.getstate(), numpy.random.get_state()
        if self._own is not None:
            _set(self._own)
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
            self._own = random.getstate(), numpy.random.get_state()
            _set(callers)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore every generator after the block, because random draws of a metric must not change training."""
        before = random.getstate(), numpy.random.get_state()
        copies = [copy for replica in range(self._replicas.number) for copy in self._copies(replica).values()]
        states = [copy.numpy() for copy in copies]
        try:
            yield
        finally:
            _set(before)
            for copy, state in zip(copies, states, strict=True):
                copy.assign(state)

    def seed(self, seed: int, step: int) -> None:
        """Seed all generators for the updates from `step` on."""
        values = [sample_seed(seed, step, stream) for stream in self._streams]
        seed_python_and_numpy(values[0], values[0] >> 32)
        for replica, value in enumerate(values):
            for number, (name, variable) in enumerate(self._variables().items()):
                if (own := self._own_copy(name, variable, replica)) is None:
                    continue
                word = sample_seed(value, 0, number)
                size = int(numpy.prod(own.shape))
                words = numpy.array([word & 0x7FFFFFFF, 0, word >> 33] + [0] * size, numpy.int64)[:size]
                own.assign(words.reshape(tuple(own.shape)).astype(_dtype(own)))

    def _own_copy(self, name: str, variable: Any, replica: int) -> Any:
        """Return the copy of a state that `replica` uses, or None if it uses the one of the first replica."""
        copies = self._replicas.copies(variable) if name.startswith("keras.") else ()
        return copies[replica] if copies else variable if replica == 0 else None

    def _variables(self) -> dict[str, Any]:
        """Return by name the states of Keras's seed generators, and of TensorFlow's global generator if the process has
        created one."""
        found: dict[str, Any] = {}
        if self.model is not None and self.model.built:
            seeds = seed_names(self.model)
            states = [variable for name, variable in model_variables(self.model).items() if name in seeds]
            # Use numbers as names. Keras's own names count the layers of the process, so another process has others.
            found = {f"keras.{number}": variable for number, variable in enumerate(states)}
        own = global_state.get_global_attribute("global_seed_generator")
        if own is not None:
            found["keras.global"] = own.state
        generator = getattr(sys.modules.get("tensorflow.python.ops.stateful_random_ops"), "global_generator", None)
        if generator is not None:
            found["tensorflow.global"] = generator.state
        return found

    def save(self, directory: Path) -> None:
        """Write this rank's states as arrays, one file for each replica."""
        for replica in range(self._replicas.number):
            self._save(directory, replica)

    def _copies(self, replica: int) -> dict[str, Any]:
        found = {name: self._own_copy(name, variable, replica) for name, variable in self._variables().items()}
        return {name: copy for name, copy in found.items() if copy is not None}

    def _save(self, directory: Path, replica: int) -> None:
        version, words, gauss = random.getstate()
        _, key, position, has_gauss, cached = numpy.random.get_state()
        states: dict[str, Any] = {
            "python.words": numpy.array(words, numpy.int64),
            "python.gauss": numpy.array([] if gauss is None else [gauss], numpy.float64),
            "numpy.key": numpy.array(key, numpy.uint32),
            "numpy.position": numpy.array([position, has_gauss], numpy.int64),
            "numpy.gauss": numpy.array([cached], numpy.float64),
            **{name: numpy.asarray(variable.numpy()) for name, variable in self._copies(replica).items()},
        }
        path = directory / "rng" / f"rank-{self._streams[replica]}.safetensors"
        raw = [RawTensor(name, WORDS[str(a.dtype)], a.shape, a.tobytes) for name, a in states.items()]
        write_tensors(path, raw, {"python.version": str(version)})

    def load(self, directory: Path) -> bool:
        """Restore this rank's states bit for bit. Return False if TensorFlow saved no states for this rank."""
        return all(self._load(directory, replica) for replica in range(self._replicas.number))

    def _load(self, directory: Path, replica: int) -> bool:
        path = directory / "rng" / f"rank-{self._streams[replica]}.safetensors"
        if not path.exists():
            raise CheckpointError(f"{path} is missing, which has the random generators of this rank")
        raw, metadata = read_raw(path)
        states = {tensor.name: _array(tensor) for tensor in raw}
        if "torch" in states:
            return False
        try:
            _restore(states, metadata)
            for name, variable in self._copies(replica).items():
                if name in states:
                    variable.assign(states[name].astype(_dtype(variable)))
        except (KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"{path} does not hold generator states: {error}") from None
        return True


def _array(tensor: RawTensor) -> Any:
    dtype = {word: name for name, word in WORDS.items()}.get(tensor.dtype, "uint8")
    return numpy.frombuffer(tensor.read(), dtype).reshape(tensor.shape if dtype != "uint8" else -1)


def _restore(states: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    gauss = states["python.gauss"].tolist()
    words = tuple(states["python.words"].tolist())
    random.setstate((int(metadata["python.version"]), words, gauss[0] if gauss else None))
    position, has_gauss = states["numpy.position"].tolist()
    key = numpy.array(states["numpy.key"])
    numpy.random.set_state(("MT19937", key, position, has_gauss, float(states["numpy.gauss"][0])))


def _set(states: tuple[Any, Any]) -> None:
    random.setstate(states[0])
    numpy.random.set_state(states[1])


def _dtype(variable: Any) -> Any:
    return numpy.asarray(variable.numpy()).dtype
