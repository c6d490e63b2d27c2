"""Look for a worker that slows the others down, and name it once."""

from __future__ import annotations

from collections.abc import Callable, Collection

from distributed.launching.heartbeat import Reports
from distributed.launching.slow_ranks import SlowRank, SlowWatch
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory


class SlowCheck:
    """Check the workers of each attempt. With several nodes, the launcher of node 0 checks those of all nodes.

    Args:
        run: the run directory, whose journal gets an event.
        display: shows the warning.
        reports: the progress and the times of the workers, by rank.
        node_of: returns (the name of the node of a rank, such as "node 1 (b)", or "" if there is only one node; its host name).
    """

    def __init__(
        self, run: RunDirectory, display: Display, reports: Reports, node_of: Callable[[int], tuple[str, str]]
    ) -> None:
        self._run, self._display, self._reports, self._node_of = run, display, reports, node_of
        self._named: set[int] = set()  # the ranks that were named in this run
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._watch = SlowWatch()

    def look(self, ranks: Collection[int]) -> None:
        """Report a worker that is slow. `ranks` are those of the workers to check."""
        found = self._watch.look({rank: self._reports.spent(rank) for rank in ranks})
        if found is None or found.rank in self._named:
            return
        self._named.add(found.rank)
        node, host = self._node_of(found.rank)
        text = f"rank {found.rank}{' on ' * bool(node)}{node} slows the others down: {_in_words(found)}"
        self._run.event(
            "slow_rank", step=max(self._reports.progress(rank).step for rank in ranks), rank=found.rank, host=host, cause=text,
            data=round(found.data, 3), compute=round(found.compute, 3), communication=round(found.communication, 3),
        )  # fmt: skip
        self._display.handle({"kind": "warning", "text": text})


def _in_words(found: SlowRank) -> str:
    return (
        f"in {found.updates} updates in a row it needed {_ms(found.own_s)} itself, and the others {_ms(found.others_s)} in the median"
        f" (data {found.data:.0%}, compute {found.compute:.0%}, communication {found.communication:.0%} of its time)"
    )


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms"
