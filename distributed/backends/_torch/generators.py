"""Save, restore and seed a rank's random generators: torch, its CUDA device, numpy's global generator and Python's."""

from __future__ import annotations

import contextlib
import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch

from distributed.backends._keras.randomness import common_state
from distributed.backends._torch import sample_rng, seeding
from distributed.backends._torch.tensor_io import read_file, write_file
from distributed.errors import CheckpointError, TrainingError
from distributed.launching.engines import seed_python_and_numpy


def forked(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context that restores torch's generators of the CPU and of `device` at its end."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class OwnGenerators:
    """Hold the generator states that training (dropout and the like) draws from.

    They are separate from the process's own streams, which continue as if training had drawn nothing. A further fit
    continues where the last one stopped.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._own: _State | None = None
        self._is_inside = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Give the global generators the states of training in this block, and restore the caller's states
        afterwards."""
        if self._is_inside:  # a callback evaluates during a fit
            yield
            return
        callers = self._state()
        if self._own is not None:
            self._restore(self._own)
        self._is_inside = True
        with _at_end(lambda: self._leave(callers)):
            yield

    def _leave(self, callers: _State) -> None:
        self._is_inside = False
        self._own = self._state()
        self._restore(callers)

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Restore all generators at the end of this block."""
        before = self._state()
        with _at_end(lambda: self._restore(before)):
            yield

    def seed(self, value: int) -> None:
        """Seed all generators from one 64-bit number."""
        seeding.seed(value, self._device)
        seed_python_and_numpy(value, value >> 32)

    def _state(self) -> _State:
        return sample_rng.save(), torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None

    def _restore(self, state: _State) -> None:
        sample_rng.restore(state[0])
        if state[1] is not None:
            torch.cuda.set_rng_state(state[1], self._device)


@contextlib.contextmanager
def _at_end(restore: Callable[[], None]) -> Iterator[None]:
    """Call `restore` at the end of this block.

    After an error of the GPU every further call of the GPU raises. The block's own error is then raised, which says why.
    """
    try:
        yield
    except BaseException:
        with contextlib.suppress(torch.AcceleratorError):
            restore()
        raise
    restore()


_State = tuple[sample_rng.RandomState, torch.Tensor | None]  # states of torch's generators: of the CPU and of the GPU


def save_rng(directory: Path, rank: int, device: torch.device) -> None:
    """Write this rank's generator states as arrays: torch, `device` if it is a GPU, numpy's global one and Python's."""
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python.words": torch.tensor(words, dtype=torch.int64),
        "python.gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
    }
    if device.type == "cuda":  # a run on CPUs does not touch the machine's GPUs
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        states |= _numpy_state(sys.modules["numpy"])
    if (state := common_state()) is not None:
        states["keras"] = torch.from_numpy(state.numpy().astype("int64"))
    write_file(rng_file(directory, rank), states, {"python.version": str(version)})


def load_rng(directory: Path, rank: int, device: torch.device) -> bool:
    """Restore this rank's generator states, bit for bit.

    Returns False if they do not fit: an engine without torch saved them, or they were saved on a CPU and the run now uses a GPU.
    Raises CheckpointError if the file is missing or damaged.
    """
    path = rng_file(directory, rank)
    if not path.exists():
        raise CheckpointError(f"{path} is missing, which has the random generators of rank {rank}")
    states, metadata = read_file(path)
    needed = {"torch", "cuda"} if device.type == "cuda" else {"torch"}
    if not needed <= states.keys():  # saved by an engine without torch, or on a CPU
        return False
    try:
        torch.set_rng_state(states["torch"])
        gauss = states["python.gauss"].tolist()
        words = tuple(states["python.words"].tolist())
        random.setstate((int(metadata["python.version"]), words, gauss[0] if gauss else None))
        if device.type == "cuda":
            torch.cuda.set_rng_state(states["cuda"], device)
        if "numpy.key" in states:
            _set_numpy_state(states)
        if "keras" in states and (state := common_state(create=True)) is not None:
            state.assign(states["keras"].numpy())
    except (KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"{path} does not hold generator states: {error}") from None
    return True


def rng_file(directory: Path, rank: int) -> Path:
    return directory / "rng" / f"rank-{rank}.safetensors"


def _numpy_state(numpy: types.ModuleType) -> dict[str, torch.Tensor]:
    kind, key, position, has_gauss, gauss = numpy.random.get_state()
    if kind != "MT19937":
        raise TrainingError(f"numpy's global generator is {kind}, only the default MT19937 can be stored")
    return {
        "numpy.key": torch.from_numpy(key.copy()),
        "numpy.position": torch.tensor([position, has_gauss], dtype=torch.int64),
        "numpy.gauss": torch.tensor([gauss], dtype=torch.float64),
    }


def _set_numpy_state(states: Mapping[str, torch.Tensor]) -> None:
    import numpy

    position, has_gauss = states["numpy.position"].tolist()
    key, gauss = states["numpy.key"].numpy(), states["numpy.gauss"].item()
    numpy.random.set_state(("MT19937", key, position, has_gauss, gauss))
