"""Decide from the times of workers which of them slows the others down."""

from __future__ import annotations

import io
import json
import random

import pytest

from distributed.launching.heartbeat import Board, Heartbeat, Phase, Spent
from distributed.launching.slow_check import SlowCheck
from distributed.launching.slow_ranks import SlowWatch
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory

MS = 1e-3


class Ranks:
    """Ranks that train together, whose times a watch looks at after every few updates."""

    def __init__(self, num=2, *, is_measured=True, fit=1):
        self.watch, self.is_measured = SlowWatch(), is_measured
        self.spent = {rank: Spent(fit, 0, 0.0, 0.0, 0.0, 0) for rank in range(num)}
        self.watch.look(self.spent)

    def train(self, updates, data, compute, look_every=3):
        """Make updates in which rank r needs data[r] and compute[r] seconds itself. Return what the watch found first."""
        found = None
        step = max(a + b for a, b in zip(data, compute, strict=True))
        for number in range(updates):
            for rank, each in self.spent.items():
                waited = step - data[rank] - compute[rank]
                measured = each.measured + self.is_measured
                self.spent[rank] = Spent(
                    each.fit, each.updates + 1, each.data_s + data[rank], each.training_s + step - data[rank],
                    each.waited_s + waited * self.is_measured, measured,
                )  # fmt: skip
            if number % look_every == 0:
                found = found or self.watch.look(self.spent)
        return found


@pytest.mark.parametrize("num", [2, 3, 8])
@pytest.mark.parametrize("is_measured", [True, False])
def test_a_rank_with_slow_data_is_found(num, is_measured):
    data = [1 * MS] * (num - 1) + [60 * MS]
    found = Ranks(num, is_measured=is_measured).train(80, data, [20 * MS] * num)
    assert found.rank == num - 1 and 50 <= found.updates <= 60
    assert found.own_s == pytest.approx(80 * MS) and found.others_s == pytest.approx(21 * MS)
    assert (found.data, found.compute, found.communication) == pytest.approx((0.75, 0.25, 0.0))


@pytest.mark.parametrize("num", [2, 3, 8])
def test_a_rank_with_slow_passes_is_found(num):
    found = Ranks(num).train(80, [5 * MS] * num, [75 * MS] + [20 * MS] * (num - 1))
    assert found.rank == 0 and (found.data, found.compute) == pytest.approx((1 / 16, 15 / 16))


def test_if_the_waiting_is_not_measured_slow_passes_are_not_found():
    assert Ranks(2, is_measured=False).train(500, [1 * MS] * 2, [90 * MS, 20 * MS]) is None


def test_equally_slow_ranks_are_not_found():
    assert Ranks(4).train(500, [200 * MS] * 4, [300 * MS] * 4) is None
    assert Ranks(4).train(500, [0.0] * 4, [30 * MS, 30 * MS, 55 * MS, 55 * MS]) is None


@pytest.mark.parametrize("look_every", [1, 7, 20])
def test_a_rank_that_is_slow_for_a_few_updates_only_is_not_found(look_every):
    ranks = Ranks(3)
    for _ in range(5):
        assert ranks.train(10, [900 * MS, 0.0, 0.0], [20 * MS] * 3, look_every) is None
        assert ranks.train(30, [0.0] * 3, [20 * MS] * 3, look_every) is None


def test_a_rank_that_delays_the_others_by_less_than_a_second_is_not_found():
    ranks = Ranks(2)
    assert ranks.train(900, [0.0, 1 * MS], [0.5 * MS] * 2) is None
    assert ranks.train(300, [0.0, 1 * MS], [0.5 * MS] * 2).rank == 1


def test_another_fit_and_other_workers_begin_anew():
    ranks = Ranks(2)
    for fit in range(2, 6):
        assert ranks.train(40, [0.0, 90 * MS], [20 * MS] * 2) is None
        ranks.spent = {rank: Spent(fit, each.updates, each.data_s, each.training_s, each.waited_s, each.measured)
                       for rank, each in ranks.spent.items()}  # fmt: skip
    ranks.spent.pop(0)
    assert ranks.train(90, [0.0, 90 * MS], [20 * MS] * 2) is None


def test_noise_alone_is_not_found():
    draw = random.Random(0)
    for _ in range(20):
        ranks = Ranks(2)
        for _ in range(200):
            times = [draw.lognormvariate(-4, 0.7) for _ in range(2)]
            assert ranks.train(1, [0.0] * 2, times, 1) is None


def beat(heartbeat, step, clock, data_s, training_s):
    heartbeat.mark(Phase.DATA, step)
    clock[0] += int(1e9 * data_s)
    heartbeat.mark(Phase.TRAINING, step)
    clock[0] += int(1e9 * training_s)
    heartbeat.mark(Phase.CALLBACKS, step)
    clock[0] += int(1e9)


def test_a_worker_adds_up_its_times_and_the_launcher_names_a_slow_one_once(tmp_path, monkeypatch, capsys):
    clock, board = [0], Board(2)
    monkeypatch.setattr("distributed.launching.heartbeat.time.monotonic_ns", lambda: clock[0])
    workers = [Heartbeat(), Heartbeat()]
    for index, worker in enumerate(workers):
        worker.attach(board._slot(index))
        worker.begin(0, compiles=False, timeout_s=9.0)
    check = SlowCheck(
        RunDirectory(tmp_path), Display(io.StringIO(), live=False), board, lambda rank: ("node 1 (b)", "b")
    )
    for step in range(1, 201):
        beat(workers[0], step, clock, 0.01, 0.05)
        beat(workers[1], step, clock, 0.04, 0.02)
        workers[0].waited(0.04, 1)
        workers[1].waited(0.0, 1)
        check.look([0, 1])
        if step == 100:
            check.begin()  # a restart
    spent = board.spent(0)
    assert (spent.updates, spent.measured) == (200, 200)
    assert (spent.data_s, spent.training_s, spent.waited_s) == pytest.approx((2.0, 10.0, 8.0))
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "warning: rank 1 on node 1 (b) slows the others down: in 50 updates in a row it needed 60 ms itself, and the"
    )
    assert line.endswith(" others 20 ms in the median (data 67%, compute 33%, communication 0% of its time)")
    (event,) = [json.loads(each) for each in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert (event["event"], event["rank"], event["data"], event["compute"]) == ("slow_rank", 1, 0.667, 0.333)
    assert event["host"] == "b"


def test_the_first_batch_of_an_epoch_and_callbacks_do_not_count():
    board, worker = Board(1), Heartbeat()
    worker.attach(board._slot(0))
    worker.mark(Phase.DATA, 1, is_slow=True)
    worker.mark(Phase.TRAINING, 1)
    worker.mark(Phase.CALLBACKS, 1)
    spent = board.spent(0)
    assert spent.updates == 1 and spent.data_s == 0.0 and spent.training_s > 0.0
