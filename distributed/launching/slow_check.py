"""Look for a worker of this node that slows the others down, and name it once."""

from __future__ import annotations

import socket
from collections.abc import Mapping

from distributed.launching.heartbeat import Board
from distributed.launching.slow_ranks import SlowRank, SlowWatch
from distributed.loggers.console import Display
from distributed.runs.directory import RunDirectory


class SlowCheck:
    """Check the workers of each attempt of this node.

    Args:
        run: the run directory, whose journal gets an event.
        display: shows the warning.
        board: the progress and the times of the workers.
        node: the name of this node, if there are several.
    """

    def __init__(self, run: RunDirectory, display: Display, board: Board, node: str) -> None:
        self._run, self._display, self._board = run, display, board
        self._where = f" on {node}" if node else ""
        self._named: set[int] = set()  # the ranks that were named in this run
        self.begin()

    def begin(self) -> None:
        """Begin an attempt."""
        self._watch = SlowWatch()

    def look(self, ranks: Mapping[int, int]) -> None:
        """Report a worker that is slow. `ranks` maps the local rank of each worker to check to its rank."""
        found = self._watch.look({index: self._board.spent(index) for index in ranks})
        if found is None or ranks[found.key] in self._named:
            return
        rank = ranks[found.key]
        self._named.add(rank)
        text = f"rank {rank}{self._where} slows the others down: {_in_words(found)}"
        self._run.event(
            "slow_rank", step=self._board.progress(found.key).step, rank=rank, host=socket.gethostname(), cause=text,
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
