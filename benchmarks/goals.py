"""Goals for the figures of a benchmark, judged against the noise of the same run."""

from __future__ import annotations

import dataclasses
import statistics

import machine


@dataclasses.dataclass(frozen=True)
class Goal:
    """Upper limit for the median of `figures`, which holds one value per round.

    `again` compares the hand-written loop with itself in the same rounds. Without noise it equals `par`: 1 for ratios,
    0 for differences.
    """

    name: str
    limit: float
    figures: list[float]
    again: list[float]
    par: float = 1.0

    @property
    def noise(self) -> float:
        """Largest distance of the middle half of `again` from `par`."""
        cut, values = len(self.again) // 4, sorted(self.again)
        return max(self.par - values[cut], values[-1 - cut] - self.par, 0.0)

    @property
    def is_met(self) -> bool:
        """True if the limit is met within the noise."""
        return statistics.median(self.figures) <= self.limit + self.noise

    def row(self) -> list[str]:
        """Return the cells of a table row."""
        figures = (f"{value:.3g}" for value in (self.limit, statistics.median(self.figures), self.noise))
        return [self.name, *figures, "met" if self.is_met else "MISSED"]


def verdicts(goals: list[Goal]) -> str:
    """Return a Markdown table of all goals."""
    return machine.table([["goal", "at most", "found", "noise", ""], *(goal.row() for goal in goals)])
