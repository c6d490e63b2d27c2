"""Run the suite of `distributed.testing` on every backend, with one of ADAPTERS each, as `python -m distributed.testing` does."""

from __future__ import annotations

import functools
import os
import sys

import pytest

from distributed.config.registry import REGISTRY
from distributed.testing import Adapter
from distributed.testing.conformance import checks_for
from distributed.testing.faults import (
    check_exception,
    check_kill,
    check_refusals,
    check_refused_in_a_second,
    check_starts,
)
from distributed.testing.running import AllReferences, Finished, train_cases
from distributed.testing.travel import table, travel
from tests.conformance.runs import FULL
from tests.conftest import Started, clean_environment, needs_backend

# `make test` runs the engines that torch has itself, in pairs of adapter and number of processes. `make conformance` adds one of
# Horovod and one of ZeRO, which other tests compare by default (test_horovod.py with pytorch-ddp, test_deepspeed.py with one process).
# `make test-full` adds the rest of the product. By default, test_tensorflow.py compares TensorFlow with a plain loop, test_parity.py with
# torch, and test_ray.py the bits of Ray, whose workers run the engines that are tested here, with those of pytorch-ddp.
# `python -m distributed.testing 'ray[cpus_per_worker=0.5]:1,3'` runs any other one.
ADAPTERS = list(map(Adapter.parse, ("single:1", "pytorch-ddp:3", "fsdp:2")))
MORE_ADAPTERS = list(map(Adapter.parse, (
    "pytorch-ddp:1,2", "fsdp:1,3", "horovod:1,2,3", "deepspeed[zero_stage=0]:2", "deepspeed[zero_stage=1]:3", "deepspeed[zero_stage=2]:2",
    "deepspeed[zero_stage=3]:2,3", "ray[cpus_per_worker=0.5]:2", "ray[engine=fsdp]:2", "tensorflow:2",
)))  # fmt: skip


def worlds_of(adapters):
    """Return name -> (adapter, number of processes)."""
    return {f"{adapter}-{world}": (adapter, world) for adapter in adapters for world in adapter.world_sizes}


def marks_of(world):
    """Return the marks of the checks of `world`."""
    if world in IN_CONFORMANCE:  # in one test process, with one reference
        return [pytest.mark.conformance, pytest.mark.xdist_group("conformance suite")]
    return [] if world in SOME_WORLDS else FULL


SOME_WORLDS = worlds_of(ADAPTERS)
IN_CONFORMANCE = ("horovod-2", "deepspeed[zero_stage=3]-2")
WORLDS = {**SOME_WORLDS, **worlds_of(MORE_ADAPTERS)}
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def run_python(tmp_path_factory):
    """Run a command of the suite, which `distributed.testing` else starts from nothing."""
    directory = tmp_path_factory.mktemp("commands")

    def run(arguments, timeout):
        environ = clean_environment(OMP_NUM_THREADS="1")
        done = Started([sys.executable, *arguments], directory, None, environ, fresh=False).finish(timeout, grace=10)
        return Finished(done.returncode, done.stdout + done.stderr, done.seconds, done.cpu_s)

    return run


@pytest.fixture(scope="module")
def references(tmp_path_factory, run_python):
    return AllReferences(tmp_path_factory.mktemp("references"), run_python)


@pytest.fixture(scope="module")
def started(tmp_path_factory, run_python):
    """Return (adapter, number of processes) -> all cases on it, each started once, at its first use."""

    @functools.cache
    def start(world):
        adapter, size = WORLDS[world]
        needs_backend(adapter.backend)
        return train_cases(adapter, size, tmp_path_factory.mktemp(world), run_python)

    return start


@pytest.mark.parametrize(
    ("world", "check"),
    [
        pytest.param(name, check, marks=marks_of(name))
        for name, (adapter, _) in WORLDS.items()
        for check in checks_for(adapter)
    ],
)
def test_conforms(started, references, world, check):
    adapter, _ = WORLDS[world]
    checks_for(adapter)[check](started(world), references.of(adapter))


@pytest.mark.parametrize(
    ("adapter", "worlds"),
    [
        *(pytest.param(adapter, SOME_WORLDS, id=str(adapter)) for adapter in ADAPTERS),
        *(
            pytest.param(adapter, WORLDS, id=f"{name}-from all", marks=FULL)
            for name, adapter in {str(adapter): adapter for adapter in [*ADAPTERS, *MORE_ADAPTERS]}.items()
        ),
    ],
)
def test_every_checkpoint_goes_on_here(started, references, adapter, worlds, tmp_path, run_python):
    """A checkpoint of each of `worlds` has the same bits after it is loaded and saved, and training ends in the same numbers."""
    needs_backend(adapter.backend)
    found = references.of(adapter)
    alike = {name: other for name, (other, _) in worlds.items() if other.reference == adapter.reference}
    sources = found.sources([started(name) for name, other in alike.items() if not other.capabilities.missing])
    trips = travel(sources, adapter, max(adapter.world_sizes), tmp_path, found, run_python)
    print(table(trips))
    assert len(trips) == len(sources) >= 2
    assert [str(trip) for trip in trips if not trip.is_good] == []


# ------------------------------------------------------------------ ends

# Number of starts of each backend in a row. One start, as every other test has it, would show nothing more.
STARTS = int(os.environ.get("CONFORMANCE_STARTS", "3"))
# A backend ends in the same way with all of its settings.
BY_BACKEND = {
    adapter.backend: adapter for adapter in [*MORE_ADAPTERS, *ADAPTERS]
}  # with the ones of `make test` where possible
# Our own launcher starts these too. They end as pytorch-ddp does.
ALIKE = ("fsdp", "deepspeed")


def ends(*later):
    """Return an adapter for each backend. `make test` leaves out those of the backends `later`, of which `make conformance` takes the
    two of its suite."""
    suite = [WORLDS[world][0].backend for world in IN_CONFORMANCE]
    marks = {name: pytest.mark.conformance if name in suite else FULL for name in later}
    return [pytest.param(adapter, id=str(adapter), marks=marks.get(name, ())) for name, adapter in BY_BACKEND.items()]


def several(adapter):
    """Return a number of processes of which one can die alone."""
    return min(2, max(adapter.world_sizes))


@FULL
@pytest.mark.timeout(300 + 60 * STARTS)
@pytest.mark.parametrize("adapter", ends())
def test_starts_in_a_row_end_in_order_and_leave_nothing(adapter, tmp_path):
    needs_backend(adapter.backend)
    assert len(check_starts(adapter, several(adapter), tmp_path, STARTS)) == STARTS


# test_ray.py has a script that fails, and test_tensorflow.py lost workers.
@pytest.mark.parametrize("adapter", ends(*ALIKE, "ray", "tensorflow"))
def test_an_exception_on_one_rank_ends_all_and_is_the_last_thing_said(adapter, tmp_path):
    needs_backend(adapter.backend)
    check_exception(adapter, several(adapter), tmp_path)


@pytest.mark.parametrize(
    "adapter", ends(*ALIKE, "ray", "tensorflow")
)  # test_ray.py and test_tensorflow.py kill a rank too
def test_a_killed_rank_ends_all_and_is_named(adapter, tmp_path):
    needs_backend(adapter.backend)
    check_kill(adapter, several(adapter), tmp_path)


@pytest.mark.parametrize("adapter", BY_BACKEND.values(), ids=str)
def test_what_the_table_refuses_is_refused(adapter, tmp_path):
    needs_backend(adapter.backend)
    check_refusals(adapter)
    check_refused_in_a_second(adapter, tmp_path)


def test_every_backend_is_here():
    assert set(BY_BACKEND) == set(REGISTRY)
