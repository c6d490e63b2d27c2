"""Wait for Ray to place workers: what the launcher says meanwhile, and when it gives up.

Workaround (Ray 2.60, ray-project/ray#38984; may go when Ray limits the time to join a cluster and to place workers): Ray may
wait for ever.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Mapping, Sequence

from distributed.errors import DistributedError, ResourceError
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory

_LINE_S = 30.0  # between two lines that say how long is still waited
_TICK_S = 0.5
_LONG_S = 10.0**6  # a time limit above this is none
_MARGIN_S = 30.0  # time for Ray's process to report that its own wait is over


class Patience:
    """Wait for news of Ray's process. One thread adds news (`put`, `saw_nodes`), another waits for them (`news_within`)."""

    def __init__(self, run: RunDirectory, display: Display, node_timeout: float) -> None:
        self._run, self._display, self._node_timeout = run, display, node_timeout
        self._news: queue.SimpleQueue[str | tuple[str, float]] = queue.SimpleQueue()
        self._used: Mapping[str, str] = {}  # id -> name of each node of the newest attempt
        self._gone: set[str] = set()
        self._missing: str | None = None  # what the workers lack on the nodes that are left
        self.error: DistributedError | None = None  # why waiting ended

    def put(self, news: str | tuple[str, float]) -> None:
        """Add news: joined, begun, failed, stop, left (Ray ended), or (what the cluster lacks, seconds that Ray's process waits
        for it)."""
        self._news.put(news)

    def saw_nodes(self, gone: Sequence[str], missing: str | None) -> None:
        """Record that nodes have left the cluster, and what the workers now lack there."""
        self._missing = missing
        self._gone.update(gone)

    @property
    def has_lost_a_node(self) -> bool:
        """Return whether a node of the newest attempt has left the cluster."""
        return bool(self._gone & self._used.keys())

    def begin(self, used: Mapping[str, str]) -> None:
        """Begin an attempt on the nodes `used`, id -> name."""
        self._used, self._gone = dict(used), set()

    def news_within(self, seconds: float, late: DistributedError, name: str) -> str:
        """Wait at most `seconds`, the value of the setting `name`, for the next news and return them.

        If none come, set `error` to `late` and return "late". If nodes of the last attempt have left the cluster and the others
        are too few, wait `node_timeout` instead, for as long as they are too few.
        """
        lost = _Countdown("", 0.0, "")
        waiting = _Countdown("Ray has not placed the workers yet" if name == "start_timeout" else "", seconds, name)
        while True:
            try:
                news = self._news.get(timeout=_TICK_S)
            except queue.Empty:
                lost = self._look(lost)
                now = lost if lost.what else waiting
                if now.is_over():
                    self.error = late if now is waiting else ResourceError(f"{lost.what} within {lost.limit}")
                    return "late"
                now.show(self._display)
                continue
            if isinstance(news, str):
                return news
            waiting = _Countdown(f"waiting for resources: {news[0]}", news[1] + _MARGIN_S, "wait")
            waiting.show(self._display, is_first=True)

    def _look(self, lost: _Countdown) -> _Countdown:
        """Return the countdown for a lost node, or an empty one if the other nodes suffice."""
        names = [self._used[each] for each in sorted(self._gone & self._used.keys())]
        if not names:
            return lost
        what = f"{', '.join(names)} left the Ray cluster"
        if self._missing is None:
            if not lost.what:
                self._show_lost(names, f"{what}: the workers start again on the other nodes")
            self._used = {key: name for key, name in self._used.items() if key not in self._gone}
            return _Countdown("", 0.0, "")
        if not lost.what:
            self._show_lost(
                names, f"{what}, and {self._missing}: waiting {self._node_timeout:g} s for a replacement (node_timeout)"
            )
            return _Countdown(f"{what}, and no replacement came", self._node_timeout, "node_timeout")
        return lost

    def _show_lost(self, names: Sequence[str], text: str) -> None:
        for name in names:
            self._run.event("node_lost", node=name)
        self._display.handle({"kind": "warning", "text": text})


class _Countdown:
    """A time limit that is counted down on the screen."""

    def __init__(self, what: str, seconds: float, name: str) -> None:
        self.what, self._seconds, self._name = what, seconds, name
        self._deadline = time.monotonic() + seconds
        self._next_line = time.monotonic() + _LINE_S

    @property
    def limit(self) -> str:
        """The setting with its value."""
        return f"{self._name}={self._seconds:g} s"

    def is_over(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self._deadline

    def show(self, display: Display, *, is_first: bool = False) -> None:
        """Show from time to time how many seconds are left."""
        if not self.what or (time.monotonic() < self._next_line and not is_first):
            return
        self._next_line = time.monotonic() + _LINE_S
        left = self._deadline - time.monotonic()
        end = f": {left:.0f} s left ({self._name})" if left < _LONG_S else ""
        display.handle({"kind": "notice", "text": f"{self.what}{end}"})
