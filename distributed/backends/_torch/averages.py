"""What steps report: losses at once, metrics later, in one call over all that was kept since the last log line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from distributed.backends._torch.objective import (
    Loss,
    as_loss,
    evaluate_metrics,
    is_class_index,
    scores,
    weighted,
)
from distributed.backends._torch.over_all import is_whole, measure_of, measure_of_function, widened
from distributed.backends.measured import Measured
from distributed.backends.non_finite import Row, without_weight
from distributed.backends.over_all import Deferred, Wholes, no_arguments
from distributed.backends.parts import Arguments, Part, arguments, mapped
from distributed.state import Group, MicroBatch, StepResult

# Outputs up to this many numbers are kept until the next log line, where metrics are computed on all of them at once.
_SMALL_OUTPUTS = 1 << 16

Kept = tuple[Any, Any, int]  # (outputs, targets, samples)
Reduce = Callable[[Mapping[tuple[str, str], float]], dict[tuple[str, str], float]]
Gather = Callable[[list[str]], list[list[str]]]


class Averages:
    """Makes and sums up step results; reads nothing from the device before `collect`."""

    def __init__(
        self,
        metrics: Mapping[str, Any],
        device: torch.device,
        *,
        wholes: Wholes,
        reduce: Reduce,
        notice: Callable[[str], None],
        dtype: torch.dtype | None = None,
    ) -> None:
        """`dtype`: the run's, where that is not torch's usual one."""
        functions = {name: metric for name, metric in metrics.items() if not is_whole(metric)}
        self._metrics, self._device, self._dtype = functions, device, dtype
        self.measured = Measured(functions, wholes, measure_of_function, reduce, notice)
        self.names: list[str] = []  # that every rank knows, in the order in which sums travel
        self._large: list[Kept] = []  # the newest step's large outputs
        self._has_accuracy = "accuracy" in metrics  # else class indices get it
        for name, metric in metrics.items():
            if is_whole(metric):
                self.add(name, metric)

    def add(self, name: str, metric: Any) -> None:
        """Compute `metric` over all samples; nothing for one that is known already."""
        self.measured.wholes.add(name, lambda: measure_of(metric, self._device, self._dtype))

    def of_training(self, micros: Sequence[MicroBatch], losses: Sequence[Loss], group: Group) -> StepResult:
        """The result of one update. Large outputs are kept of the newest update only."""
        rows: list[Row] = []
        deferred = Deferred("train", [], {})
        for number, (micro, loss) in enumerate(zip(micros, losses, strict=True)):
            rows += self._rows(loss, micro.num_samples)
            if loss.targets is not None:
                self._keep(loss.outputs, loss.targets, micro.num_samples, deferred.kept)
            self._keep_parts(deferred, (group.position, number), micro.num_samples, loss)
        result = StepResult(rows, group.num_samples, deferred)
        self.measured.wholes.keep("train", result)
        return result

    def of_evaluation(self, micro: MicroBatch, loss: Loss) -> StepResult:
        """The result of one evaluation batch; metrics of large outputs are computed now."""
        n = micro.num_samples
        self.measured.num_evaluated += 1
        if n == 0:
            loss.count, loss.value = None if loss.count is None else 0.0, torch.zeros_like(loss.value)
        rows = self._rows(loss, n)
        deferred = Deferred("val", [(loss.outputs, loss.targets, n)] if loss.targets is not None else [], {})
        self._look(loss, n)
        if deferred.kept and not (_is_small(loss.outputs) and _is_small(loss.targets)):
            rows += self._measure(deferred.kept, "val")
            deferred.kept.clear()
        self._keep_parts(deferred, (self.measured.num_evaluated, 0), n, loss)
        result = StepResult(rows, n, deferred)
        self.measured.wholes.keep("val", result)
        return result

    # ------------------------------------------------------------------ metrics over all samples

    def _look(self, loss: Loss, n: int) -> None:
        if loss.targets is not None and self.measured.is_looking:
            self.measured.look(loss.outputs, loss.targets, n, _pair)

    def _keep_parts(self, deferred: Deferred, key: tuple[int, int], n: int, loss: Loss) -> None:
        for name in self.measured.wholes.names(deferred.split):
            call = self._call(name, loss)
            if n and call is not None:
                kept = mapped(call, lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf)
                deferred.parts.setdefault(name, []).append(Part(key, n, kept))

    def _call(self, name: str, loss: Loss) -> Arguments | None:
        if loss.metrics is not None and name in loss.metrics and self.measured.is_call(name):
            return arguments(loss.metrics[name])
        if loss.targets is not None:
            return Arguments((loss.outputs, loss.targets), {})
        if self.measured.is_declared(name):
            raise no_arguments(name)
        return None

    # ------------------------------------------------------------------ means

    def collect(self, results: Sequence[StepResult], reduce: Reduce, gather: Gather) -> dict[str, tuple[float, float]]:
        """name -> (sum, count) over all `results` of the ranks that have the name. A collective, and one all-reduce.

        Sums travel without their names, in an order that all ranks know. A rank with a name that is new raises a flag
        in the same all-reduce; the new names are then agreed, once, and summed in a second one.
        """
        mine = self._local_sums(results)
        new = sorted(mine.keys() - self.names)
        total = reduce(_numbers(mine, self.names) | {("", "new"): float(bool(new))})
        if total["", "new"]:
            found = sorted({name for names in gather(new) for name in names})
            total |= reduce(_numbers(mine, found))
            self.names += found
        return {
            name: (total[name, "sum"], total[name, "count"])
            for name in sorted(self.names)
            if total[name, "ranks"]  # else nobody had it this time
        }

    def _local_sums(self, results: Sequence[StepResult]) -> dict[str, tuple[float, float]]:
        """name -> (sum, count) of everything in `results`, on this rank. The host waits for the device here."""
        entries: defaultdict[str, list[Row]] = defaultdict(list)
        kept: list[Kept] = []
        split = "val"
        for result in results:
            for row in result.averages:
                entries[row[0]].append(row)
            if result.deferred:
                kept += result.deferred.kept
                split = result.deferred.split
        for row in self._measure(kept, split):
            entries[row[0]].append(row)
        sums: dict[str, tuple[float, float]] = {}
        for name, rows in entries.items():
            _, values, scales, counts = zip(*rows, strict=True)
            sums[name] = self._dot(values, scales), float(sum(counts))
        return sums

    def _rows(self, loss: Loss, n: int) -> list[Row]:
        value = loss.value.detach()
        rows: list[Row] = [("loss", value, n, n) if loss.count is None else ("loss", value, 1.0, loss.count)]
        if loss.metrics:
            means = {name: metric for name, metric in loss.metrics.items() if not self.measured.is_call(name)}
            own = [(name, *weighted(as_loss(metric, name), n, name)) for name, metric in means.items()]
            rows += own if n else without_weight(own)
            self._has_accuracy = self._has_accuracy or "accuracy" in loss.metrics
        return rows

    def _keep(self, outputs: Any, targets: Any, n: int, kept: list[Kept]) -> None:
        if not self._metrics:
            if self._has_accuracy:
                return
            outputs = (
                outputs if isinstance(outputs, torch.Tensor) else scores(outputs)
            )  # all that the default accuracy needs
            if not is_class_index(outputs, targets):
                return
        if _is_small(outputs) and _is_small(targets):
            kept.append((outputs.detach(), targets, n))
            return
        if self._large is not kept:
            self._large.clear()
            self._large = kept
        kept.append((outputs, targets, n))

    def _measure(self, kept: list[Kept], split: str) -> list[Row]:
        """Metrics of kept outputs. A rank without samples reports the same names as the others, with nothing in them."""
        rows: list[Row] = []
        counted = [entry for entry in kept if entry[2]]
        functions = self.measured.functions(split)
        with torch.no_grad(), self.measured.wholes.keeping_generators():
            for outputs, targets, n in _joined(counted or kept[:1]):
                rows += evaluate_metrics(functions, outputs, targets, n, default=not self._has_accuracy)
        return rows if counted else without_weight(rows)

    def _dot(self, values: tuple[Any, ...], scales: tuple[float, ...]) -> float:
        """Sum of value x scale over floats and scalars of the device, in float64; one transfer."""
        try:
            stacked = torch.stack(values)
        except (TypeError, RuntimeError):  # some are plain numbers, or of shape [1], or elsewhere
            stacked = torch.stack([torch.as_tensor(value, device=self._device).reshape(()) for value in values])
        return float(stacked.double() @ torch.tensor(scales, dtype=torch.float64, device=self._device))


def _pair(function: Callable[..., Any], outputs: Any, targets: Any, n: int) -> tuple[float, float]:
    """(sum, count) of one batch, as plain numbers."""
    value, scale, count = weighted(as_loss(function(widened(outputs), widened(targets))), n, "")
    return float(value) * scale, float(count)


def _numbers(sums: Mapping[str, tuple[float, float]], names: Sequence[str]) -> dict[tuple[str, str], float]:
    numbers: dict[tuple[str, str], float] = {}
    for name in names:
        total, count = sums.get(name, (0.0, 0.0))
        numbers |= {(name, "sum"): total, (name, "count"): count, (name, "ranks"): float(name in sums)}
    return numbers


def _is_small(outputs: Any) -> bool:
    return isinstance(outputs, torch.Tensor) and outputs.numel() <= _SMALL_OUTPUTS


def _joined(kept: list[Kept]) -> list[Kept]:
    if len(kept) < 2:
        return kept
    outputs, targets, counts = zip(*kept, strict=True)
    try:
        return [(torch.cat(outputs), torch.cat(targets), sum(counts))]
    except (RuntimeError, TypeError):  # of different shapes, or no tensors
        return kept
