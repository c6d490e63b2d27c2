"""Create the results of steps: sums, and the arguments that metrics over all samples keep."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy

from distributed.backends._tensorflow import over_all
from distributed.backends._tensorflow.objective import pair
from distributed.backends.checking import CHECK
from distributed.backends.measured import Measured
from distributed.backends.over_all import Deferred, Wholes
from distributed.backends.parts import Part, num_bytes
from distributed.backends.sums import added
from distributed.metrics.over_all import is_of_keras
from distributed.state import Job, StepResult, Sums

if TYPE_CHECKING:
    from distributed.backends._tensorflow.world import TensorFlowWorld

MetricSums = Mapping[str, tuple[Any, Any]]  # name -> (sum, count)


class Results:
    """Create the results of steps and sum them up over the ranks."""

    def __init__(
        self,
        job: Job,
        world: TensorFlowWorld,
        keeping_generators: Callable[[], contextlib.AbstractContextManager[None]],
        warn: Callable[[str], None],
        notice: Callable[[str], None],
    ) -> None:
        self._world = world
        self._unasked: Part | None = None
        wholes = Wholes(
            over_all.ENGINE, world, is_presharded=False, warn=warn, keeping_generators=keeping_generators
        )  # fmt: skip
        functions = {
            n: f
            for n, f in job.metrics.items()
            if not over_all.is_whole(f) and not is_of_keras(f) and not isinstance(f, str)
        }
        self.measured = Measured(
            functions, wholes, over_all.ENGINE, over_all.measure_of_function, pair, over_all.on_host, notice
        )
        for name, metric in job.metrics.items():
            # The objective measures Keras's means itself, unless a training_step returns their arguments.
            if over_all.is_whole(metric) or (is_of_keras(metric) and job.training_step is not None):
                wholes.add(name, functools.partial(over_all.measure_of, metric))

    def keep(self, deferred: Deferred, calls: Sequence[Any], key: tuple[int, int]) -> None:
        """Add to `deferred` the parts of one micro-batch that metrics over all samples keep."""
        for name, parts in self._parts(deferred.split, calls, key).items():
            deferred.parts.setdefault(name, []).extend(parts)

    def of_training(self, sums: MetricSums, num_samples: int, deferred: Deferred) -> StepResult:
        """Return the result of an update."""
        return self._made("train", sums, num_samples, deferred)

    def of_evaluation(self, sums: MetricSums, num_samples: int, calls: Sequence[Any]) -> StepResult:
        """Return the result of an evaluation batch."""
        self.measured.num_evaluated += 1
        deferred = Deferred("val", [], {})
        self.keep(deferred, calls, (self.measured.num_evaluated, 0))
        return self._made("val", sums, num_samples, deferred)

    def collect(self, results: Sequence[StepResult]) -> dict[str, Sums]:
        """Return name -> (sum, count) of each of `results` over all ranks, as `Backend.collect` does. A collective."""
        part, self._unasked = self._unasked, None
        if part is not None:
            self.measured.ask("train", over_all.on_host(part.value), part.num_samples)
        sums: dict[str, Any] = {}
        for index, result in enumerate(results):
            for name, value, _, count in result.averages:
                array = sums.setdefault(name, numpy.zeros((len(results), 2)))
                array[index] += (float(value), float(count))
        return added(self._world.gather(sums))

    def _made(self, split: str, sums: MetricSums, num_samples: int, deferred: Deferred) -> StepResult:
        averages = [(name, value, 1.0, count) for name, (value, count) in sums.items()]
        result = StepResult(averages, num_samples, deferred)
        self.measured.wholes.keep(split, result)
        return result

    def _parts(self, split: str, calls: Sequence[Any], key: tuple[int, int]) -> dict[str, list[Part]]:
        """Return for each metric its parts of one micro-batch. For the check of means, return only parts that it may
        keep, and examine the others."""
        found = over_all.parts_of(calls, key)
        check = self.measured.check(split)
        for part in found.pop(CHECK, ()) if check is not None else ():
            assert check is not None
            if split == "train" and check.is_over:
                self._unasked = part  # only the newest part is kept, and examined at the log line
                continue
            part = part._replace(value=over_all.on_host(part.value))
            if check.admits(num_bytes(part.value)):
                found.setdefault(CHECK, []).append(part)
            elif split == "val":
                self.measured.ask(split, part.value, part.num_samples)
        return found
