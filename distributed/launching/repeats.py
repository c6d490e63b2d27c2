"""Detect that a run fails again and again at the same step, so that further restarts are in vain."""

from __future__ import annotations

from distributed.launching.causes import Failure

_MOST = 3  # equal failures in a row: two restarts have made no progress


class Repeats:
    """Count the failures in a row that are the same: of one rank, for one reason, at the same step of the same fit.

    A failure whose step is not known, such as one outside of a fit, is never the same as another one. Neither is a failure that is a
    consequence of another one.
    """

    def __init__(self) -> None:
        self._last: object = None
        self._count = 0

    def count(self, failure: Failure) -> str:
        """Count a failure. Return a message if the same failure came too often, else ""."""
        fit, step = failure.reached
        same = (failure.rank, failure.kind, failure.type, failure.signum, fit, step)
        is_known = fit > 0 and not failure.is_consequence
        self._count = self._count + 1 if is_known and same == self._last else 1
        self._last = same
        if self._count < _MOST:
            return ""
        where = f"at step {step}" if step else "before the first step"
        return f"stopped, because the same failure came {self._count} times {where}"
