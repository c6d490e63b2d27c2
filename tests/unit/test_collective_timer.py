"""In the updates that are measured, the time in collectives is added up, and what they return is the same."""

from __future__ import annotations

import pytest
import torch

from distributed.backends._torch import collective_timer
from distributed.backends._torch.collective_timer import CollectiveTimer
from distributed.backends._torch.waits import MeasuredWaits


class Work:
    """A collective that goes on for two seconds of a clock."""

    def __init__(self, clock):
        self.clock = clock

    def wait(self):
        self.clock.now += 2.0


class Clock:
    now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(collective_timer, "time", clock)
    return clock


@pytest.fixture
def timer(clock):
    return CollectiveTimer(torch.device("cpu"))


def test_the_first_ten_updates_and_then_one_in_ten_are_measured(timer, clock):
    measured = []
    for number in range(41):
        timer.begin_update()
        timer.run(Work, clock)
        timer.end_update()
        if timer.waits.take_new() is not None:
            measured.append(number)
    assert measured == [*range(10), 10, 20, 30, 40]


def test_the_time_of_an_update_is_the_sum_of_its_collectives_with_those_that_they_call(timer, clock):
    def outer():
        timer.run(Work, clock).wait()  # the inner one is not waited for, so that it counts once
        clock.now += 1.0

    timer.begin_update()
    work = timer.run(Work, clock)
    assert isinstance(work, Work) and clock.now == 102.0
    assert timer.run(outer) is None
    timer.add(0.5)
    clock.now += 50.0  # computation
    timer.end_update()
    assert timer.waits.take_new() == pytest.approx(2.0 + 3.0 + 0.5)


def test_collectives_between_updates_and_those_of_other_updates_are_not_waited_for(timer, clock):
    for _ in range(12):
        timer.run(Work, clock)
        timer.begin_update()
        timer.end_update()
    assert clock.now == 100.0 and timer.waits.take() == 0.0


def test_an_update_that_has_failed_in_a_collective_leaves_nothing(timer, clock):
    def fail():
        clock.now += 7.0
        raise MemoryError

    timer.begin_update()
    with pytest.raises(MemoryError):
        timer.run(fail)
    timer.begin_update()
    timer.run(Work, clock)
    timer.end_update()
    assert timer.waits.take() == pytest.approx(2.0)


def test_each_reader_gets_the_mean_since_it_has_asked():
    waits = MeasuredWaits()
    assert waits.take() is None and waits.take_new() is None
    waits.add(1.0)
    assert waits.take_new() == 1.0 and waits.take_new() is None
    waits.add(3.0)
    assert waits.take() == 2.0 and waits.take() == 2.0  # the same again, because nothing was measured
    assert waits.take_new() == 3.0
