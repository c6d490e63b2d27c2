"""Metrics over all samples, and checks of the monitored metric; how an engine computes metrics belongs in `backends`."""

from distributed.metrics.over_all import OverAll, over_all

__all__ = ["OverAll", "over_all"]
