"""Metrics that are not means over samples, in NumPy. They give the same values for the outputs of every engine."""

from __future__ import annotations

from typing import Any

import numpy

from distributed import over_all

Array = numpy.ndarray[Any, Any]


def macro_f1(scores: Any, targets: Any) -> float:
    """Return the mean of the F1 scores of all classes."""
    found, wanted = numpy.asarray(scores).argmax(1), numpy.asarray(targets)
    values = []
    for label in range(numpy.asarray(scores).shape[1]):
        right = int(((found == label) & (wanted == label)).sum())
        values.append(2 * right / max(1, int((found == label).sum() + (wanted == label).sum())))
    return float(numpy.mean(values))


def auroc(scores: Any, targets: Any) -> float:
    """Return how often a sample of class 0 has a higher score for class 0 than a sample of another class."""
    of_first, wanted = numpy.asarray(scores, "float64")[:, 0], numpy.asarray(targets)
    return float((of_first[wanted == 0][:, None] > of_first[wanted != 0][None]).mean())


def perplexity(scores: Any, targets: Any) -> float:
    """Return exp of the mean cross-entropy."""
    logits, wanted = numpy.asarray(scores, "float64"), numpy.asarray(targets)
    chosen = logits[numpy.arange(len(wanted)), wanted]
    return float(numpy.exp((numpy.log(numpy.exp(logits).sum(1)) - chosen).mean()))


def in_order(scores: Any, targets: Any) -> float:
    """Return a mean weighted by position, which changes with the order of the samples."""
    weights = numpy.arange(1, len(numpy.asarray(targets)) + 1)
    return float((numpy.asarray(scores, "float64")[:, 0] * weights).sum() / weights.sum())


_FUNCTIONS = {"auroc": auroc, "f1": macro_f1, "order": in_order, "perplexity": perplexity}
FOUND_OUT = "root_mean"  # name of a plain function; at the first log line, the Trainer detects that it is not a mean


def declared() -> dict[str, Any]:
    """Return the metrics for `Trainer(metrics=...)`."""
    return {name: over_all(function) for name, function in _FUNCTIONS.items()}


def expected(scores: Array, targets: Any) -> dict[str, float]:
    """Return the values of the `declared` metrics and of the undeclared function, by name."""
    found = {name: function(scores, targets) for name, function in _FUNCTIONS.items()}
    return {**found, FOUND_OUT: float(numpy.sqrt((scores**2).mean()))}
