"""The time in collectives is added up for each update, and what they return is the same."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from distributed.backends._deepspeed.measured_collectives import MeasuredCollectives
from distributed.backends._torch import collective_timer
from distributed.backends._torch.collective_timer import CollectiveTimer
from distributed.backends._torch.waits import MeasuredWaits


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now

    def pass_(self, seconds):
        self.now += seconds
        return seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(collective_timer, "time", clock)
    return clock


@pytest.fixture
def waits():
    return MeasuredWaits()


@pytest.fixture
def timer(clock, waits):
    return CollectiveTimer(waits)


def test_the_time_of_an_update_is_the_sum_of_its_collectives_with_those_that_they_call(timer, clock, waits):
    timer.begin_update()
    assert timer.run(clock.pass_, 2.0) == 2.0
    timer.run(lambda: (timer.run(clock.pass_, 2.0), clock.pass_(1.0)))
    timer.add(0.5)
    clock.pass_(50.0)  # computation
    timer.end_update()
    assert waits.take_new() == pytest.approx(2.0 + 3.0 + 0.5)


def test_collectives_between_updates_are_not_measured(timer, clock, waits):
    for _ in range(3):
        timer.run(clock.pass_, 2.0)
        timer.begin_update()
        timer.end_update()
    assert waits.take() == 0.0


def test_an_update_that_has_failed_in_a_collective_leaves_nothing(timer, clock, waits):
    def fail():
        clock.pass_(7.0)
        raise MemoryError

    timer.begin_update()
    with pytest.raises(MemoryError):
        timer.run(fail)
    timer.begin_update()
    timer.run(clock.pass_, 2.0)
    timer.end_update()
    assert waits.take() == pytest.approx(2.0)


def test_of_a_collective_in_the_background_only_the_waiting_is_measured(timer, clock, waits, monkeypatch):
    comm = pytest.importorskip("deepspeed.comm.comm")

    class Communicator:
        def all_reduce(self, tensor, async_op=False):
            clock.pass_(0.25)
            return SimpleNamespace(wait=lambda: clock.pass_(2.0), tensor=tensor) if async_op else None

    communicator = Communicator()
    monkeypatch.setattr(comm, "cdb", communicator)
    measured = MeasuredCollectives(timer)
    timer.begin_update()
    work = communicator.all_reduce("gradients", async_op=True)
    clock.pass_(50.0)  # computation, while the collective goes on
    assert work.wait() == 2.0 and work.tensor == "gradients"
    assert communicator.all_reduce("gradients") is None
    timer.end_update()
    assert waits.take() == pytest.approx(0.25 + 2.0 + 0.25)
    measured.release()
    assert vars(communicator) == {}


def test_each_reader_gets_the_mean_since_it_has_asked():
    waits = MeasuredWaits()
    assert waits.take() is None and waits.take_new() is None
    waits.add(1.0)
    assert waits.take_new() == 1.0 and waits.take_new() is None
    waits.add(3.0)
    assert waits.take() == 2.0 and waits.take() == 2.0  # the same again, because nothing was measured
    assert waits.take_new() == 3.0
