"""Metrics over all samples, and the metric that is monitored. How an engine computes them belongs to `backends`."""

from distributed.metrics.over_all import OverAll, over_all

__all__ = ["OverAll", "over_all"]
