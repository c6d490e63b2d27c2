"""Wait for Ray to place workers. Show messages meanwhile, and give up after a time limit.

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

_LINE_S = 30.0  # time between two lines that show the remaining time
_TICK_S = 0.5
_LONG_S = 10.0**6  # a longer time limit counts as unlimited and is not shown
_MARGIN_S = 30.0  # time for Ray's process to report that its own wait is over


class Patience:
    """Wait for news of Ray's process. One thread adds news (`put`, `saw_nodes`), another waits for them (`news_within`)."""

    def __init__(self, run: RunDirectory, display: Display, node_timeout: float) -> None:
        self._run, self._display, self._node_timeout = run, display, node_timeout
        self._news: queue.SimpleQueue[str | tuple[str, float]] = queue.SimpleQueue()
        self._used: Mapping[str, str] = {}  # id -> name of each node of the newest attempt
        self._gone: dict[str, str] = {}  # id of each lost node -> how it was lost
        self._shown: set[str] = set()  # nodes whose loss was shown
        self._missing: str | None = None  # what the workers lack on the nodes that are left
        self.error: DistributedError | None = None  # why waiting ended

    def put(self, news: str | tuple[str, float]) -> None:
        """Add news: joined, begun, failed, stop, left (Ray ended), or (what the cluster lacks, seconds that Ray's process waits
        for it)."""
        self._news.put(news)

    def saw_nodes(self, gone: Sequence[str], missing: str | None, how: str = "left the Ray cluster") -> None:
        """Record that nodes are lost, and what the workers now lack on the others."""
        self._missing = missing
        self._gone = {**dict.fromkeys(gone, how), **self._gone}

    @property
    def has_lost_a_node(self) -> bool:
        """Return whether a node of the newest attempt is lost."""
        return bool(self._gone.keys() & self._used.keys())

    def begin(self, used: Mapping[str, str]) -> None:
        """Begin an attempt on the nodes `used`, id -> name."""
        if lost := [each for each in self._lost() if each not in used]:
            self._show_lost(lost, f"{self._words(lost)}: the workers start again on the other nodes")
        for node in sorted(self._shown & used.keys()):
            self._run.event("node_joined", node=used[node])
            self._display.handle({"kind": "notice", "text": f"{used[node]} answers again"})
        self._used, self._gone, self._shown = dict(used), {}, set()

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
            waiting = _Countdown(f"waiting for resources: {news[0]}", news[1], "wait", _MARGIN_S)
            waiting.show(self._display, is_first=True)

    def _look(self, lost: _Countdown) -> _Countdown:
        """Return the countdown for a lost node, or an empty one if the other nodes suffice."""
        nodes = self._lost()
        if not nodes:
            return lost
        what = self._words(nodes)
        if self._missing is None:
            self._show_lost(nodes, f"{what}: the workers start again on the other nodes")
            self._used = {key: name for key, name in self._used.items() if key not in self._gone}
            return _Countdown("", 0.0, "")
        if not lost.what:
            limit = f"waiting {self._node_timeout:g} s for a replacement (node_timeout)"
            self._show_lost(nodes, f"{what}, and {self._missing}: {limit}")
            return _Countdown(f"{what}, and no replacement came", self._node_timeout, "node_timeout")
        return lost

    def _lost(self) -> list[str]:
        """Return the ids of the lost nodes of the newest attempt."""
        return sorted(self._gone.keys() & self._used.keys())

    def _words(self, nodes: Sequence[str]) -> str:
        return f"{', '.join(self._used[each] for each in nodes)} {self._gone[nodes[0]]}"

    def _show_lost(self, nodes: Sequence[str], text: str) -> None:
        """Show the loss of `nodes`, unless it was shown before."""
        for node in (new := [each for each in nodes if each not in self._shown]):
            self._run.event("node_lost", node=self._used[node])
        if new:
            self._display.handle({"kind": "warning", "text": text})
        self._shown.update(new)


class _Countdown:
    """A time limit that is counted down on the screen. It is over `margin` seconds after the countdown has reached 0."""

    def __init__(self, what: str, seconds: float, name: str, margin: float = 0.0) -> None:
        self.what, self._seconds, self._name, self._margin = what, seconds, name, margin
        self._deadline = time.monotonic() + seconds
        self._next_line = time.monotonic() + _LINE_S

    @property
    def limit(self) -> str:
        """The setting with its value."""
        return f"{self._name}={self._seconds:g} s"

    def is_over(self) -> bool:
        """Return whether the time is over."""
        return time.monotonic() >= self._deadline + self._margin

    def show(self, display: Display, *, is_first: bool = False) -> None:
        """Show from time to time how many seconds are left."""
        if not self.what or (time.monotonic() < self._next_line and not is_first):
            return
        self._next_line = time.monotonic() + _LINE_S
        left = max(0.0, self._deadline - time.monotonic())
        end = f": {left:.0f} s left ({self._name})" if left < _LONG_S else ""
        display.handle({"kind": "notice", "text": f"{self.what}{end}"})
