"""Decide from the progress of the workers of a launcher whether a worker hangs, and which one. Depends on no clock and no process."""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Collection, Mapping, Sequence

from distributed.launching.heartbeat import Phase, Progress

SLOW = 10  # a part of training that is slow by its nature may take this many times `hang_timeout`, unless `hang_timeout_slow` is set
_STEPS = 5  # a part of an update may take this many times the median duration of an update
_MOST = 0.8  # share of the time limit of collectives; below 1, because the launcher looks only at intervals
_KEPT = 31  # number of durations from which the median is taken


@dataclasses.dataclass
class _Seen:
    """The newest progress of a worker, and for how long the launcher has seen no change."""

    progress: Progress
    still_s: float = 0.0
    step_s: float = 0.0  # seconds since the step changed


@dataclasses.dataclass(frozen=True)
class Suspects:
    """The workers with the least progress of those that stand still.

    Attributes:
        ranks: the ranks of the workers; several if they have made the same progress.
        progress: where they are in training.
        still_s: for how many seconds they have made no progress.
        has_others_ahead: whether another worker has made more progress.
    """

    ranks: tuple[int, ...]
    progress: Progress
    still_s: float
    has_others_ahead: bool


class HangWatch:
    """Watch the progress of the workers of an attempt.

    The ranks of a training wait for each other in each update. If one hangs, all stand still soon. The rank with the least progress
    is the one for which the others wait. A worker outside of a fit never counts as hanging, because its script may do anything.

    Args:
        hang_timeout: seconds that a part of an update may take.
        hang_timeout_slow: seconds that a part of training may take that is slow by its nature, such as a save. 0 means no limit, and
            None `SLOW` times `hang_timeout`. Both limits rise if updates take long.
    """

    def __init__(self, hang_timeout: float, hang_timeout_slow: float | None = None) -> None:
        self._timeout_s = hang_timeout
        self._slow_s = SLOW * hang_timeout if hang_timeout_slow is None else hang_timeout_slow or math.inf
        self._seen: dict[int, _Seen] = {}
        self._durations: collections.deque[float] = collections.deque(maxlen=_KEPT)

    def look(self, all_progress: Mapping[int, Progress], seconds: float) -> Suspects | None:
        """Return the workers that hang, or None.

        Args:
            all_progress: the progress of the workers that have not ended, by rank.
            seconds: how long the launcher has watched since the last look.
        """
        self._seen = {key: self._follow(key, progress, seconds) for key, progress in all_progress.items()}
        if not self._seen:
            return None
        least = min(seen.progress.beats for seen in self._seen.values())
        behind = {key: seen for key, seen in self._seen.items() if seen.progress.beats == least}
        still_s = min(seen.still_s for seen in behind.values())
        progress = max((seen.progress for seen in behind.values()), key=self._limit_of)
        if still_s < self._limit_of(progress):
            return None
        return Suspects(tuple(behind), progress, still_s, self._is_another_ahead(progress))

    def standing(self, ranks: Collection[int], timeout_s: float) -> Suspects | None:
        """Return the workers that stood still for the time limit of collectives and have the least progress, or None.

        This is called after other workers failed because they reached that limit.

        Args:
            ranks: the workers to look at.
            timeout_s: the time limit in seconds of workers that have not reported their own.
        """
        watched = {key: seen for key, seen in self._seen.items() if key in ranks}
        still = {
            key: seen for key, seen in watched.items() if seen.still_s >= _MOST * (seen.progress.timeout_s or timeout_s)
        }
        if not still:
            return None
        least = min(still.values(), key=lambda seen: seen.progress.beats)
        found = tuple(key for key, seen in still.items() if seen.progress.beats == least.progress.beats)
        return Suspects(found, least.progress, least.still_s, self._is_another_ahead(least.progress))

    def forgive(self) -> None:
        """Count from now on for how long the workers stand still."""
        for seen in self._seen.values():
            seen.still_s = 0.0

    def _is_another_ahead(self, progress: Progress) -> bool:
        return any(seen.progress.beats > progress.beats for seen in self._seen.values())

    def _follow(self, key: int, progress: Progress, seconds: float) -> _Seen:
        before = self._seen.get(key)
        if before is None:
            return _Seen(progress)
        has_moved, steps = progress.beats != before.progress.beats, progress.step - before.progress.step
        step_s = before.step_s + seconds
        if steps > 0 and progress.fit == before.progress.fit and not before.progress.is_slow:
            self._durations.append(step_s / steps)
        is_same_step = steps == 0 and progress.fit == before.progress.fit
        return _Seen(progress, 0.0 if has_moved else before.still_s + seconds, step_s if is_same_step else 0.0)

    def _limit_of(self, progress: Progress) -> float:
        if progress.phase is Phase.SCRIPT:
            return math.inf
        usual_s = statistics.median(self._durations) if self._durations else 0.0
        return max(self._slow_s if progress.is_slow else self._timeout_s, _STEPS * usual_s)


def culprit(
    suspects: Suspects, silent: Sequence[int], waiting: Sequence[int], *, may_wait_elsewhere: bool = False
) -> int | None:
    """Return the rank of the worker that the others wait for, or None if that cannot be decided.

    Args:
        suspects: the workers with the least progress.
        silent: the ranks of workers that did not answer the request for their stack, because they are stopped or wait for a device.
        waiting: the ranks of workers whose stack says that they wait for others, or whose stack is not known.
        may_wait_elsewhere: whether the suspects may wait for a worker that is not watched, and not only for each other.
    """
    if len(suspects.ranks) == 1 and (suspects.has_others_ahead or not may_wait_elsewhere):
        return suspects.ranks[0]
    if found := [rank for rank in suspects.ranks if rank in silent]:
        return found[0]
    found = [rank for rank in suspects.ranks if rank not in waiting]
    return found[0] if len(found) == 1 else None
