"""A short `make soak`: random faults, the weights of a run without faults, and nothing left."""

from __future__ import annotations

import os
import random
import shutil

import pytest

from tests.faults.soak import KINDS, Kind, faults_of, soak

pytestmark = pytest.mark.timeout(900)
SHORT = "pytorch-ddp"


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, id=name, marks=[pytest.mark.full] * (name != SHORT)) for name, kind in KINDS.items()]
)
def test_nothing_is_lost_and_nothing_is_left(kind: Kind) -> None:
    """The seed is new in each run, and the message of a failure has it."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        (pytest.fail if os.environ.get("REQUIRE_MACHINES") else pytest.skip)("only root can make network namespaces")
    seed = random.SystemRandom().randrange(10**6)
    outcome = soak(kind, minutes=1.2, every_s=4.0, seed=seed)
    assert outcome.is_same and outcome.left == [] and outcome.growth <= 0, (seed, outcome)
    assert outcome.num_faults >= 3, (seed, outcome)
    assert outcome.recovered_s.keys() <= faults_of(kind).keys()
