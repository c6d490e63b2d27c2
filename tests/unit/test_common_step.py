"""All ranks act at the same step, whoever asks and however far apart they are."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest

from distributed.training.common_step import CommonStep
from tests.conftest import poll


class Store:
    """torch's Store, as far as it is used, between threads."""

    def __init__(self):
        self._values, self._lock = {}, threading.Lock()

    def set(self, key, value):
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key):
        return self._values[key]

    def check(self, keys):
        return all(key in self._values for key in keys)

    def compare_set(self, key, expected, desired):
        with self._lock:
            return self._values.setdefault(key, desired.encode())


def run_rank(common, wait, acted):
    units = 0
    while True:
        action = common.tick()
        if action == "stop":
            acted.append((units, action))
            return
        if action is not None:
            acted.append((units, action))
            continue
        wait()
        units += 1


@pytest.mark.parametrize("trial", range(20))
@pytest.mark.parametrize("in_step", [True, False])  # as in training (a collective each unit), and as in evaluation
def test_all_ranks_act_at_the_same_unit(trial, in_step):
    chance = random.Random(trial)
    world = chance.choice([2, 3, 4])
    store, barrier = Store(), threading.Barrier(world)
    ranks = [CommonStep(rank, world, store, "test", poll_s=0.01) for rank in range(world)]
    acted = [[] for _ in ranks]
    pause = [chance.random() * 0.002 for _ in ranks]
    waits = [barrier.wait if in_step else (lambda seconds=seconds: time.sleep(seconds)) for seconds in pause]
    threads = [
        threading.Thread(target=run_rank, args=(common, wait, out))
        for common, wait, out in zip(ranks, waits, acted, strict=True)
    ]
    for thread in threads:
        thread.start()
    ranks[chance.randrange(world)].request("save")
    for rank in chance.sample(range(world), chance.randint(1, world)):  # a signal reaches some of them, or all
        ranks[rank].request("stop")
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    for common in ranks:
        common.close()
    assert all(each == acted[0] for each in acted)
    assert acted[0][-1][1] == "stop"


def test_a_rank_trains_on_until_all_watchers_have_seen_the_request():
    def units_until_it_acts(common):
        return next(number for number in itertools.count() if common.tick() == "save")

    store = Store()
    first = CommonStep(0, 2, store, "test", poll_s=0.001, timeout_s=30)
    first.request("save")
    poll(lambda: store.check(["test/0/seen/0"]), 10, lambda: "the watcher of rank 0 does not wait for the other")
    assert [first.tick() for _ in range(20)] == [None] * 20
    other = CommonStep(1, 2, store, "test", poll_s=0.001, timeout_s=30)
    assert units_until_it_acts(other) == 20 + units_until_it_acts(first)
    other.close()
    first.close()


def test_ranks_that_do_not_agree_in_time_say_so():
    common = CommonStep(0, 2, Store(), "test", poll_s=0.001, timeout_s=0.1)  # rank 1 never answers
    common.request("save")
    poll(lambda: common._known.is_set(), 10, lambda: "the watcher waits for ever")
    with pytest.raises(TimeoutError, match=r"the other ranks did not agree on save within 0\.1 s"):
        common.tick()
    common.close()


def test_a_fit_that_ends_before_its_request_is_met_leaves_no_thread():
    store = Store()
    common = CommonStep(0, 2, store, "test", poll_s=0.001, timeout_s=60)
    common.request("save")
    poll(lambda: store.check(["test/0/seen/0"]), 10, lambda: "the request was not published")
    assert common.tick() is None
    common.close()
    assert not common._watcher.is_alive()


def test_alone_a_request_is_met_at_the_next_unit():
    common = CommonStep(0, 1, None, "test")
    assert common.tick() is None
    common.request("save")
    assert common.tick() == "save" and common.tick() is None


def test_alone_a_signal_that_comes_while_another_request_is_met_is_not_lost():
    class Interrupted(list):
        """A signal strikes while the list is looked at."""

        def __len__(self):
            length = super().__len__()
            if not struck:
                struck.append(True)
                common.request("signal 15")
            return length

    struck = []
    common = CommonStep(0, 1, None, "test")
    common._requests = Interrupted(["save"])
    common._is_armed = True
    assert [common.tick(), common.tick(), common.tick()] == ["save", "signal 15", None]


def test_alone_a_request_half_made_by_the_clock_is_met_once():
    common = CommonStep(0, 1, None, "test")
    common._is_armed = True  # what a thread does last, after the training thread has already met its request
    assert common.tick() is None and common.tick() is None


def test_a_store_that_is_gone_does_not_hold_a_rank_for_ever():
    class Gone(Store):
        def check(self, keys):
            raise RuntimeError("connection reset")

    common = CommonStep(0, 2, Gone(), "test", poll_s=0.01)
    common._watcher.join(5)
    assert common.tick() is None
    common.close()
