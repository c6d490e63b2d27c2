"""Tasks that read files run in several threads."""

from __future__ import annotations

import threading
import time

import pytest

from distributed.checkpoints import reading


@pytest.fixture(autouse=True)
def _three_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "cores_of_rank", lambda: 3)


def test_each_task_runs_once_in_one_of_three_threads() -> None:
    met, done = threading.Barrier(3), []

    def task(number: int) -> None:
        if number < 3:
            met.wait(10)
        done.append(number)

    reading.run_in_threads([lambda number=number: task(number) for number in range(20)])
    assert sorted(done) == list(range(20))


def test_the_error_of_the_first_task_is_raised_although_a_later_one_fails_before() -> None:
    later_failed, begun = threading.Event(), []

    def first() -> None:
        assert later_failed.wait(10)
        raise ValueError("first")

    def second() -> None:
        later_failed.set()
        raise ValueError("second")

    def other() -> None:
        begun.append(1)
        time.sleep(0.01)  # 1,000 of these take longer than the failures

    with pytest.raises(ValueError, match="first"):
        reading.run_in_threads([first, second, *[other] * 1000])
    assert len(begun) < 1000


def test_an_interrupted_caller_stops_the_other_threads() -> None:
    stop, stopped = threading.Event(), []

    def task() -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        stopped.append(stop.wait(10))

    with pytest.raises(KeyboardInterrupt):
        reading.run_in_threads([task] * 10, stop)
    assert len(stopped) <= 2 and all(stopped)


def test_without_further_threads_the_caller_runs_all_tasks_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    done: list[int] = []
    monkeypatch.setattr(threading.Thread, "start", refused)
    reading.run_in_threads([lambda number=number: done.append(number) for number in range(5)])
    assert done == list(range(5))
