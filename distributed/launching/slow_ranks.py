"""Decide from the times of the workers whether one of them slows the others down. Uses no clock and no process."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

from distributed.launching.heartbeat import Spent

FACTOR = 2.0  # a slow rank needs at least this many times the median of the other ranks
UPDATES = 50  # number of updates in a row in which a rank must be slow
_WINDOWS = 5  # the updates are divided into so many windows; a rank must be slow in each, because a few slow updates do not count
_WINDOW = UPDATES // _WINDOWS
_LEAST_S = 1.0  # seconds by which the rank must have delayed the others before it is named


@dataclasses.dataclass(frozen=True)
class _Times:
    """Seconds of a rank, per update or in a number of updates."""

    data: float = 0.0
    compute: float = 0.0  # from the batch to the end of the update, without `waited`
    waited: float = 0.0

    @property
    def own(self) -> float:
        """Seconds in which the rank does not wait for others."""
        return self.data + self.compute

    @property
    def total(self) -> float:
        return self.own + self.waited

    def plus(self, other: _Times, times: int) -> _Times:
        """Return these times and `times` times the `other`."""
        return _Times(
            *(a + times * b for a, b in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True))
        )


@dataclasses.dataclass(frozen=True)
class SlowRank:
    """A rank that slows the others down.

    Attributes:
        rank: the rank.
        updates: the number of updates in a row in which it was slow.
        own_s: its seconds per update in these updates, without waiting for other ranks.
        others_s: the median of the same time of the other ranks.
        data, compute, communication: the shares of its time, which add up to 1.
    """

    rank: int
    updates: int
    own_s: float
    others_s: float
    data: float
    compute: float
    communication: float


@dataclasses.dataclass
class _Streak:
    """The windows in a row in which a rank was slow."""

    windows: int = 0
    updates: int = 0
    others: float = 0.0  # the sum of the medians of the other ranks
    times: _Times = _Times()

    def add(self, updates: int, times: _Times, others: float) -> None:
        self.windows += 1
        self.updates += updates
        self.others += updates * others
        self.times = self.times.plus(times, updates)

    @property
    def is_enough(self) -> bool:
        return self.windows >= _WINDOWS and self.updates >= UPDATES and self.times.own - self.others >= _LEAST_S

    def found(self, rank: int) -> SlowRank:
        times, total = self.times, self.times.total
        return SlowRank(
            rank, self.updates, times.own / self.updates, self.others / self.updates, times.data / total, times.compute / total,
            times.waited / total,
        )  # fmt: skip


class SlowWatch:
    """Watch the times of the workers of an attempt.

    All ranks of a training need the same time for an update, because they wait for each other. The watch therefore compares the time
    without waiting: data and compute. If the engine does not measure the waiting, the compute time of every rank is taken to be the
    shortest time of all ranks from the batch to the end of the update. In this case, only slow data is detected.
    """

    def __init__(self) -> None:
        self._begun: dict[int, Spent] = {}
        self._streaks: dict[int, _Streak] = {}

    def look(self, spent: Mapping[int, Spent]) -> SlowRank | None:
        """Return a rank that is slow, or None. `spent` has the times of the workers that have not ended, by rank."""
        if not _continues(self._begun, spent):
            self._begun, self._streaks = dict(spent), {}
            return None
        if not all(_is_window(self._begun[rank], each) for rank, each in spent.items()):
            return None
        updates = min(each.updates - self._begun[rank].updates for rank, each in spent.items())
        times = _per_update(self._begun, spent)
        self._begun = dict(spent)
        return self._judge(times, updates)

    def _judge(self, times: Mapping[int, _Times], updates: int) -> SlowRank | None:
        for rank, mine in times.items():
            others = statistics.median(each.own for other, each in times.items() if other != rank)
            if mine.own < FACTOR * others:
                self._streaks.pop(rank, None)
            else:
                self._streaks.setdefault(rank, _Streak()).add(updates, mine, others)
        return next((each.found(rank) for rank, each in self._streaks.items() if each.is_enough), None)


def _continues(begun: Mapping[int, Spent], spent: Mapping[int, Spent]) -> bool:
    """Return whether there are several workers, the same as before, in the same fit."""
    return len(spent) > 1 and begun.keys() == spent.keys() and all(spent[rank].fit == begun[rank].fit for rank in spent)


def _is_window(begun: Spent, now: Spent) -> bool:
    """Return whether enough updates were made since `begun`, and their waiting was measured if the engine measures it."""
    return now.updates - begun.updates >= _WINDOW and (not now.measured or now.measured > begun.measured)


def _per_update(begun: Mapping[int, Spent], now: Mapping[int, Spent]) -> dict[int, _Times]:
    """Return the seconds per update of each rank since `begun`."""
    found: dict[int, _Times] = {}
    for rank, each in now.items():
        before = begun[rank]
        updates, measured = each.updates - before.updates, each.measured - before.measured
        training = (each.training_s - before.training_s) / updates
        waited = min((each.waited_s - before.waited_s) / measured, training) if measured else 0.0
        found[rank] = _Times((each.data_s - before.data_s) / updates, training - waited, waited)
    if all(each.measured > begun[rank].measured for rank, each in now.items()):
        return found
    least = min(each.compute for each in found.values())
    return {rank: _Times(each.data, least, each.compute + each.waited - least) for rank, each in found.items()}
