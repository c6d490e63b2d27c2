"""Ranks find each other in a store that may hold what an earlier attempt left, and know who stayed away."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from distributed.backends._torch import meeting


def join(store, ranks, world_size, seconds=5.0):
    """What each of `ranks` learns: (name, missing ranks); and what rank 0 said meanwhile."""
    said = []
    deadline = time.monotonic() + seconds

    def run(rank):
        if rank == 0:
            return meeting._call_the_roll(store, world_size, deadline, seconds, said.append)
        return meeting._answer(store, rank, deadline + 5)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(run, ranks)), said


def test_every_attempt_has_a_name_of_its_own_that_all_ranks_know():
    store = dist.HashStore()
    names = []
    for _ in range(20):  # each finds the words and answers of all before it
        found, said = join(store, [0, 1, 2], 3)
        assert found[0] == found[1] == found[2] and found[0][1] == "" and said == []
        names.append(found[0][0])
    assert len(set(names)) == 20


def test_who_stays_away_is_named_while_waiting_and_when_time_is_up(monkeypatch):
    monkeypatch.setattr(meeting, "_PATIENCE_S", 0.05)
    store = dist.HashStore()
    join(store, [0, 1, 2, 3], 4)  # an earlier attempt, where all came

    found, said = join(store, [0, 2], 4, 0.3)

    assert [missing for _, missing in found] == ["1, 3", "1, 3"]
    assert said == ["waiting for ranks 1, 3 to call fit(), as every rank must (at most 0.3 s)"]


def test_without_rank_0_the_others_name_it():
    assert meeting._answer(dist.HashStore(), 1, time.monotonic() + 0.05)[1] == "0"


@pytest.mark.parametrize(("listed", "text"), [("0", "rank 0"), ("1, 3", "ranks 1, 3")])
def test_the_error_says_who_and_how_long(listed, text):
    assert (
        meeting._absence(listed, 600) == f"{text} did not join within start_timeout=600 s: every rank must call fit()"
    )
