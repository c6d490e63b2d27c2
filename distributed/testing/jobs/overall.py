"""Metrics that are no means over samples, in NumPy: the same for the outputs of every engine."""

from __future__ import annotations

from typing import Any

import numpy

from distributed import over_all

Array = numpy.ndarray[Any, Any]


def macro_f1(scores: Any, targets: Any) -> float:
    """The mean of the F1 of each class."""
    found, wanted = numpy.asarray(scores).argmax(1), numpy.asarray(targets)
    values = []
    for label in range(numpy.asarray(scores).shape[1]):
        right = int(((found == label) & (wanted == label)).sum())
        values.append(2 * right / max(1, int((found == label).sum() + (wanted == label).sum())))
    return float(numpy.mean(values))


def auroc(scores: Any, targets: Any) -> float:
    """How often a sample of class 0 scores higher for it than one of another class."""
    of_first, wanted = numpy.asarray(scores, "float64")[:, 0], numpy.asarray(targets)
    return float((of_first[wanted == 0][:, None] > of_first[wanted != 0][None]).mean())


def perplexity(scores: Any, targets: Any) -> float:
    """exp of the mean cross-entropy."""
    logits, wanted = numpy.asarray(scores, "float64"), numpy.asarray(targets)
    chosen = logits[numpy.arange(len(wanted)), wanted]
    return float(numpy.exp((numpy.log(numpy.exp(logits).sum(1)) - chosen).mean()))


def in_order(scores: Any, targets: Any) -> float:
    """Changes with the order of the samples."""
    weights = numpy.arange(1, len(numpy.asarray(targets)) + 1)
    return float((numpy.asarray(scores, "float64")[:, 0] * weights).sum() / weights.sum())


_FUNCTIONS = {"auroc": auroc, "f1": macro_f1, "order": in_order, "perplexity": perplexity}
FOUND_OUT = "root_mean"  # a plain function, which is found out at the first log line


def declared() -> dict[str, Any]:
    """For `Trainer(metrics=...)`."""
    return {name: over_all(function) for name, function in _FUNCTIONS.items()}


def expected(scores: Array, targets: Any) -> dict[str, float]:
    """name -> value of those of `declared`, and of the function that is found out."""
    found = {name: function(scores, targets) for name, function in _FUNCTIONS.items()}
    return {**found, FOUND_OUT: float(numpy.sqrt((scores**2).mean()))}
