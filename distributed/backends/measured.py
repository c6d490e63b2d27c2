"""Decide which metrics of a trainer are means over samples, and which must be computed over all samples. Loads no framework."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.backends.base import MetricsOverAll
from distributed.backends.checking import CHECK, LIMIT_BYTES, MeansCheck, Prepare
from distributed.backends.over_all import Measure, MetricEngine, Update, Wholes
from distributed.backends.parts import Arguments
from distributed.backends.splitting import Value, text_of

Make = Callable[..., Measure]  # (function, training=) -> the Measure that computes the function over all samples


class Measured(MetricsOverAll):
    """Keep, for each plain metric function, whether it is a mean over samples.

    A function is computed as a mean, batch by batch, until an evaluation or a log line of training shows that it is not
    a mean. Metrics declared with `over_all` and metric objects are in `wholes` from the start and are not examined
    here.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        wholes: Wholes,
        engine: MetricEngine,
        make: Make,
        value: Value,
        prepare: Prepare,
        notice: Callable[[str], None],
    ) -> None:
        """Treat every function as a mean at first.

        `value` returns (sum, count) of a function for one batch. `prepare` copies the arguments of a metric to the host.
        """
        self._functions, self.wholes, self._make, self._notice = functions, wholes, make, notice
        self._candidates = dict(functions)  # functions that are still treated as means
        self.num_evaluated = 0  # number of batches of this evaluation
        limit_bytes = LIMIT_BYTES // wholes.world_size

        def whole(function: Callable[..., Any], updates: Sequence[Update]) -> Any:
            value_of = make(function, training=True).value(updates, [])
            return next(number for _, number in wholes.numbers(CHECK, value_of))

        if functions:
            wholes.add(
                CHECK, lambda: MeansCheck(self._candidates, engine, value, whole, prepare, wholes.failures, limit_bytes)
            )

    def begin(self, split: str) -> None:
        if split == "val":
            self.num_evaluated = 0
        self.wholes.begin(split)

    def check(self, split: str) -> MeansCheck | None:
        """Return the check that finds functions that are not means, or None if every function is known not to be
        one."""
        is_on = CHECK in self.wholes.names(split)
        return self.wholes.measure_of(split, CHECK) if is_on else None  # type: ignore[return-value]

    def ask(self, split: str, call: Arguments, num_samples: int) -> None:
        """Examine a batch that the check could not keep."""
        check = self.check(split)
        if check is not None and num_samples:
            with self.wholes.keeping_generators():
                check.ask(call, num_samples)

    def measure(self, split: str, means: Mapping[str, float], *, is_end: bool = True) -> dict[str, float] | None:
        if (check := self.check(split)) is not None:
            check.means, check.is_end = means, is_end
        found: dict[str, Any] = self.wholes.measure(split)
        is_incomplete = False
        for name in [name for name in found if name in self._candidates]:
            is_kept = found[name] is not None
            is_incomplete = is_incomplete or not is_kept
            self._notice(text_of(name, self._functions[name]))
            self._take_up(name, is_open=split == "train" and is_kept)
        if is_incomplete and split == "val":
            return None
        return {name: value for name, value in found.items() if value is not None}

    def functions(self, split: str) -> dict[str, Callable[..., Any]]:
        """Return the functions that are computed batch by batch in `split`."""
        other = self.wholes.names(split)
        return {name: function for name, function in self._functions.items() if name not in other}

    def is_call(self, name: str) -> bool:
        """Return whether the entry `name` in the result of a `training_step` holds arguments of a metric, not its
        value."""
        return self.wholes.has(name) and self.is_declared(name)

    def is_declared(self, name: str) -> bool:
        """Return whether the user declared that `name` is computed over all samples."""
        return name not in self._functions and name != CHECK

    def names_over_all(self) -> list[str]:
        return [name for name in self.wholes.names("val") if name != CHECK]

    @property
    def form(self) -> dict[str, bool]:
        """Name -> False for each function that is known not to be a mean. JSON-able."""
        return {name: False for name in self._functions if name not in self._candidates}

    @form.setter
    def form(self, form: Mapping[str, bool]) -> None:
        for name, is_mean in form.items():
            if not is_mean and name in self._candidates:
                self._take_up(name, is_open=False)

    def _take_up(self, name: str, *, is_open: bool) -> None:
        """Compute `name` over all samples from now on. In training, begin with this epoch if `is_open`, else with the
        next."""
        function = self._candidates.pop(name)
        pieces = CHECK if is_open else None
        self.wholes.take_up(name, lambda training: self._make(function, training=training), pieces)
        if not self._candidates:
            self.wholes.drop(CHECK)
