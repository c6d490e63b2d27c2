"""Compute the losses and metrics that steps report.

Losses are read at each log line. Metrics are computed then too, on all outputs kept since the last log line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy
import torch

from distributed.backends._torch.objective import (
    Loss,
    as_loss,
    evaluate_metrics,
    is_class_index,
    scores,
    weighted,
)
from distributed.backends._torch.over_all import ENGINE, is_whole, measure_of, measure_of_function, on_host, widened
from distributed.backends.checking import CHECK
from distributed.backends.failures import no_arguments, not_called
from distributed.backends.measured import Measured
from distributed.backends.non_finite import Average, without_weight
from distributed.backends.over_all import Deferred, Wholes
from distributed.backends.parts import JOINED, Arguments, Part, arguments, mapped, num_bytes
from distributed.backends.sums import added
from distributed.state import MicroBatch, StepResult, Sums, UpdateBatch

# Outputs of up to this many elements are kept until the next log line, when metrics are computed on all of them.
_SMALL_OUTPUTS = 1 << 16

KeptOutputs = tuple[Any, Any, int]  # (outputs, targets, samples)
Gather = Callable[[dict[str, Any]], list[dict[str, Any]]]


class Averages:
    """Create step results and sum them up. Nothing is read from the device before `collect`."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        device: torch.device,
        *,
        wholes: Wholes,
        notice: Callable[[str], None],
        dtype: torch.dtype | None = None,
    ) -> None:
        """Prepare the metrics. `dtype` is the element type of the run, or None for torch's default."""
        functions = {name: metric for name, metric in metrics.items() if not is_whole(metric)}
        self._metrics, self._device, self._dtype = functions, device, dtype
        self.measured = Measured(functions, wholes, ENGINE, measure_of_function, _pair, on_host, notice)
        self._large: list[KeptOutputs] = []  # the large outputs of the newest update
        if (check := self.measured.check("train")) is not None:
            check.parts_of = self._parts_of_updates
        self._has_accuracy = "accuracy" in metrics  # if False, accuracy is added for class indices
        for name, metric in metrics.items():
            if is_whole(metric):
                self.add(name, metric)

    def add(self, name: str, metric: Any) -> None:
        """Compute `metric` over all samples. A metric that is already known is not added again."""
        self.measured.wholes.add(name, lambda: measure_of(metric, self._device, self._dtype))

    def of_training(
        self, micros: Sequence[MicroBatch], losses: Sequence[Loss], update_batch: UpdateBatch
    ) -> StepResult:
        """Return the result of one update. Large outputs are kept only for the newest update."""
        averages: list[Average] = []
        deferred = Deferred("train", [], {})
        for number, (micro, loss) in enumerate(zip(micros, losses, strict=True)):
            averages += self._averages_of_loss(loss, micro.num_samples)
            if loss.targets is not None:
                self._keep(loss.outputs, loss.targets, micro.num_samples, deferred.kept)
            self._keep_parts(deferred, (update_batch.position, number), micro.num_samples, loss)
        result = StepResult(averages, update_batch.num_samples, deferred)
        if self._metrics and (check := self.measured.check("train")) is not None:
            check.wait((update_batch.position, result))
        self.measured.wholes.keep("train", result)
        return result

    def of_evaluation(self, micro: MicroBatch, loss: Loss) -> StepResult:
        """Return the result of one evaluation batch. Metrics of large outputs are computed immediately."""
        n = micro.num_samples
        self.measured.num_evaluated += 1
        if n == 0:
            loss.count, loss.value = None if loss.count is None else 0.0, torch.zeros_like(loss.value)
        averages = self._averages_of_loss(loss, n)
        deferred = Deferred("val", [(loss.outputs, loss.targets, n)] if loss.targets is not None else [], {})
        if deferred.kept and not (_is_small(loss.outputs) and _is_small(loss.targets)):
            averages += self._measure(deferred.kept, "val")
            deferred.kept.clear()
        self._keep_parts(deferred, (self.measured.num_evaluated, 0), n, loss)
        result = StepResult(averages, n, deferred)
        self.measured.wholes.keep("val", result)
        return result

    # ------------------------------------------------------------------ metrics over all samples

    def _keep_parts(self, deferred: Deferred, key: tuple[int, int], n: int, loss: Loss) -> None:
        for name in self.measured.wholes.names(deferred.split):
            if name == CHECK and deferred.split == "train":
                continue  # `_parts_of_updates` adds the parts of the check
            call = self._call(name, loss)
            if n and call is not None and (name != CHECK or self._admits(call, n)):
                deferred.parts.setdefault(name, []).append(Part(key, n, _detached(call)))

    def _admits(self, call: Arguments, n: int) -> bool:
        """Return whether the check of means keeps this evaluation batch. If it does not, examine the batch
        immediately."""
        check = self.measured.check("val")
        assert check is not None
        if check.admits(num_bytes(call)):
            return True
        self.measured.ask("val", _detached(call), n)
        return False

    def _parts_of_updates(self, updates: Sequence[tuple[int, StepResult]]) -> Sequence[Part]:
        """Return the kept outputs of training updates, given as (position, result), joined for the check of means.

        Updates that the check does not keep are examined immediately. The check stops keeping at the first large
        output, because metrics are computed only for some of the large outputs.
        """
        check = self.measured.check("train")
        kept: list[tuple[list[int], KeptOutputs]] = []
        for position, result in updates if check is not None else ():
            for number, (outputs, targets, n) in enumerate(result.deferred.kept if result.deferred else ()):
                assert check is not None
                if not (_is_small(outputs) and _is_small(targets)):
                    check.leave_out()
                elif check.admits(outputs.nbytes + targets.nbytes):
                    kept.append(([position, number, n], (outputs, targets, n)))
                else:
                    self.measured.ask("train", Arguments((outputs, targets), {}), n)
        return _parts_of(kept)

    def _call(self, name: str, loss: Loss) -> Arguments | None:
        if loss.metrics is not None and name in loss.metrics and self.measured.is_call(name):
            return arguments(loss.metrics[name])
        if loss.targets is not None:
            return Arguments((loss.outputs, loss.targets), {})
        if self.measured.is_declared(name):
            raise no_arguments(name)
        return None

    # ------------------------------------------------------------------ means

    def collect(self, results: Sequence[StepResult], gather: Gather) -> dict[str, Sums]:
        """Return name -> (sum, count) over all ranks for each of `results`. A collective."""
        return added(gather(self._local_sums(results)))

    def _local_sums(self, results: Sequence[StepResult]) -> dict[str, Any]:
        """Return name -> array [results, 2] of this rank's sums and counts. The host waits for the device here."""
        averages = [(index, *average) for index, result in enumerate(results) for average in result.averages]
        averages += self._averages_of_metrics(results)
        by_name: defaultdict[str, list[tuple[int, Any, float, Any]]] = defaultdict(list)
        for index, name, *entry in averages:
            by_name[name].append((index, *entry))
        columns = [column for entries in by_name.values() for column in list(zip(*entries, strict=True))[1::2]]
        numbers = iter(self._on_host(columns))
        sums: dict[str, Any] = {}
        for name, entries in by_name.items():
            sums[name] = numpy.zeros((len(results), 2))
            for (index, _, scale, _), value, count in zip(entries, next(numbers), next(numbers), strict=True):
                sums[name][index] += (value * scale, count)
        return sums

    def _averages_of_metrics(self, results: Sequence[StepResult]) -> list[tuple[int, *Average]]:
        """Return the metrics of kept outputs, each with the index of its result.

        In training, metrics are computed for each update separately. If updates were joined, the result would depend on
        the positions of log lines and checkpoints. The default accuracy may be computed on joined updates, because it
        is a sum of integers, which does not depend on the order.
        """
        kept = [
            (index, each) for index, result in enumerate(results) if result.deferred for each in result.deferred.kept
        ]
        split = next((result.deferred.split for result in results if result.deferred), "val")
        if split == "train" and self.measured.functions(split):
            averages = self._measure_each(kept)
        else:
            averages = [(0, *average) for average in self._measure([each for _, each in kept], split)]
        return averages

    def _averages_of_loss(self, loss: Loss, n: int) -> list[Average]:
        if loss.targets is None:
            # Sorted, so that all ranks name the same metric.
            for name in sorted(self._metrics.keys() - (loss.metrics or {}).keys()):
                raise not_called(name)
        value = loss.value.detach()
        averages: list[Average] = [("loss", value, n, n) if loss.count is None else ("loss", value, 1.0, loss.count)]
        if loss.metrics:
            means = {name: metric for name, metric in loss.metrics.items() if not self.measured.is_call(name)}
            own = [(name, *weighted(as_loss(metric, name), n, name)) for name, metric in means.items()]
            averages += own if n else without_weight(own)
            self._has_accuracy = self._has_accuracy or "accuracy" in loss.metrics
        return averages

    def _keep(self, outputs: Any, targets: Any, n: int, kept: list[KeptOutputs]) -> None:
        """Add the outputs of a micro-batch to `kept` if a metric needs them. Of large outputs keep only those of the
        newest update."""
        if not self._metrics:
            if self._has_accuracy:
                return
            # The default accuracy needs only the scores.
            outputs = outputs if isinstance(outputs, torch.Tensor) else scores(outputs)
            if not is_class_index(outputs, targets):
                return
        if _is_small(outputs) and _is_small(targets):
            kept.append((outputs.detach(), targets, n))
            return
        if self._large is not kept:
            self._large.clear()
            self._large = kept
        kept.append((outputs, targets, n))

    def _measure(self, kept: list[KeptOutputs], split: str) -> list[Average]:
        """Return the metrics of kept outputs. A rank without samples returns the same names with zero weight."""
        with torch.no_grad(), self.measured.wholes.keeping_generators():
            return self._averages_of(kept, self.measured.functions(split), split, default=not self._has_accuracy)

    def _measure_each(self, kept: list[tuple[int, KeptOutputs]]) -> list[tuple[int, *Average]]:
        """Return the metrics of training updates, given as (index, outputs). The default accuracy is computed on all of
        them together."""
        functions, averages = self.measured.functions("train"), []
        with torch.no_grad(), self.measured.wholes.keeping_generators():
            for index, each in kept:
                averages += [
                    (index, *average) for average in self._averages_of([each], functions, "train", default=False)
                ]
            if kept and not self._has_accuracy:
                averages += [
                    (0, *average)
                    for average in self._averages_of([each for _, each in kept], {}, "train", default=True)
                ]
        return averages

    def _averages_of(
        self, kept: list[KeptOutputs], functions: Mapping[str, Callable[..., Any]], split: str, *, default: bool
    ) -> list[Average]:
        averages: list[Average] = []
        counted = [entry for entry in kept if entry[2]]
        for outputs, targets, n in _joined(counted or kept[:1]):
            if split == "train" and functions and not (_is_small(outputs) and _is_small(targets)):
                self.measured.ask("train", Arguments((outputs, targets), {}), n)
            averages += evaluate_metrics(functions, outputs, targets, n, default=default)
        return averages if counted else without_weight(averages)

    def _on_host(self, columns: Sequence[Sequence[Any]]) -> list[list[float]]:
        """Return columns of floats and device scalars as floats. All device values are copied in one transfer."""
        on_device = [column for column in columns if any(isinstance(value, torch.Tensor) for value in column)]
        flat = torch.cat([self._stacked(column) for column in on_device]).tolist() if on_device else []
        found, begin = [], 0
        for column in columns:
            if any(isinstance(value, torch.Tensor) for value in column):
                found.append(flat[begin : begin + len(column)])
                begin += len(column)
            else:
                found.append([float(value) for value in column])
        return found

    def _stacked(self, values: Sequence[Any]) -> torch.Tensor:
        try:
            return torch.stack(list(values)).double()
        except (TypeError, RuntimeError):  # some values are plain numbers, have shape [1] or are on another device
            return torch.stack([torch.as_tensor(value, device=self._device).reshape(()).double() for value in values])


def _detached(call: Arguments) -> Arguments:
    kept: Arguments = mapped(call, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
    return kept


def _pair(function: Callable[..., Any], outputs: Any, targets: Any, n: int) -> tuple[float, float]:
    """Return (sum, count) of one batch as Python floats."""
    value, scale, count = weighted(as_loss(function(widened(outputs), widened(targets))), n, "")
    return float(value) * scale, float(count)


def _is_small(outputs: Any) -> bool:
    return isinstance(outputs, torch.Tensor) and outputs.numel() <= _SMALL_OUTPUTS


def _parts_of(kept: list[tuple[list[int], KeptOutputs]]) -> list[Part]:
    """Return kept outputs as one part with the [position, number, samples] of each micro-batch.

    If the outputs cannot be joined, return one part per micro-batch.
    """
    if not kept:
        return []
    joined = _joined([entry for _, entry in kept if entry[2]] or [kept[0][1]])
    (position, number, _), _ = kept[0]
    if len(joined) > 1:
        return [
            Part((where[0], where[1]), n, on_host(Arguments((outputs, targets), {})))
            for where, (outputs, targets, n) in kept
            if n
        ]
    outputs, targets, n = joined[0]
    call = on_host(Arguments((outputs, targets), {}))
    return (
        [Part((position, number), n, Arguments(call.args, {JOINED: [where for where, _ in kept if where[2]]}))]
        if n
        else []
    )


def _joined(kept: list[KeptOutputs]) -> list[KeptOutputs]:
    if len(kept) < 2:
        return kept
    outputs, targets, counts = zip(*kept, strict=True)
    try:
        return [(torch.cat(outputs), torch.cat(targets), sum(counts))]
    except (RuntimeError, TypeError):  # the shapes differ, or a value is not a tensor
        return kept
