"""What a benchmark's figures must reach, judged against the noise of the same run."""

from __future__ import annotations

import dataclasses
import statistics

import machine


@dataclasses.dataclass(frozen=True)
class Goal:
    """`figures` (one of each round) are to have a median of at most `limit`.

    `again` is what the hand-written loop gave against itself in the same rounds. Without noise that is `par`: 1 for ratios,
    0 for differences.
    """

    name: str
    limit: float
    figures: list[float]
    again: list[float]
    par: float = 1.0

    @property
    def noise(self) -> float:
        """How far from `par` the middle half of `again` goes."""
        cut, values = len(self.again) // 4, sorted(self.again)
        return max(self.par - values[cut], values[-1 - cut] - self.par, 0.0)

    @property
    def is_met(self) -> bool:
        """Missed is what noise alone does not explain."""
        return statistics.median(self.figures) <= self.limit + self.noise

    def row(self) -> list[str]:
        """Cells of a table."""
        figures = (f"{value:.3g}" for value in (self.limit, statistics.median(self.figures), self.noise))
        return [self.name, *figures, "met" if self.is_met else "MISSED"]


def verdicts(goals: list[Goal]) -> str:
    """A Markdown table of all goals."""
    return machine.table([["goal", "at most", "found", "noise", ""], *(goal.row() for goal in goals)])
