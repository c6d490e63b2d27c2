"""The generators that a script draws from start alike on every rank and in every trial."""

from __future__ import annotations

import random

import numpy
import torch

from distributed.launching.engines import seed_generators


def drawn() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(1))


def test_one_seed_gives_one_stream_in_python_numpy_and_torch() -> None:
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    try:
        seed_generators(7)
        first = drawn()
        drawn()
        seed_generators(7)
        assert drawn() == first
        seed_generators(8)
        assert all(a != b for a, b in zip(drawn(), first, strict=True))
        random.seed(7), numpy.random.seed(7), torch.manual_seed(7)
        assert drawn() == first  # what a script gets that seeds them itself
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])
