"""Decide which metrics of a trainer are means over samples, and which must be computed over all samples. No framework."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from distributed.backends.over_all import Measure, Wholes
from distributed.backends.splitting import Reduce, Splitting, Value, near

Make = Callable[..., Measure]  # (function, training=) -> the Measure that computes the function over all samples


class Measured:
    """Keep, for each plain metric function, whether it is a mean over samples.

    Means are computed batch by batch, all other metrics over all samples by `wholes`. Metrics that declare what they are
    (`over_all`, objects) are in `wholes` from the start and are not examined here.
    """

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        wholes: Wholes,
        make: Make,
        reduce: Reduce,
        notice: Callable[[str], None],
    ) -> None:
        self._functions, self.wholes, self._make, self._reduce = functions, wholes, make, reduce
        self._splitting = Splitting(functions, notice)
        self.num_evaluated = 0  # batches of this evaluation
        self._is_evaluating = False  # whether an evaluation is running: other batches are not examined
        for name, function in functions.items():  # over all samples until it is known to be a mean
            wholes.add(name, lambda function=function: make(function, training=False))  # type: ignore[misc]

    def begin(self, split: str) -> None:
        """Forget what was kept of `split`, as `Backend.begin` does."""
        if split == "val":
            self.num_evaluated = 0
            self._is_evaluating = True
        self.wholes.begin(split)

    def measure(self, split: str, means: Mapping[str, float]) -> dict[str, float]:
        """Return the values over all samples, as `Backend.measure` does.

        A function that may be a mean is computed both ways. Where both values agree the mean in `means` stands; where they
        differ the function is no mean.
        """
        found = self.wholes.measure(split)
        self._is_evaluating = self._is_evaluating and split != "val"
        for name in self._splitting.unknown if split == "val" else ():
            if name in found and near(found[name], means.get(name, math.nan)):
                del found[name]
            elif name in found:
                self._take_up(self._splitting.refute(name))
        return found

    @property
    def is_looking(self) -> bool:
        """Return whether a batch that is evaluated now must be passed to `look`."""
        return self._is_evaluating and bool(self._splitting.unknown)

    @property
    def unknown(self) -> list[str]:
        """Return the names of the functions that may be means."""
        return self._splitting.unknown

    def look(self, outputs: Any, targets: Any, num_samples: int, value: Value) -> None:
        """Examine the unknown functions on one batch of an evaluation. A collective for some batches, see `Splitting.look`."""
        with self.wholes.keeping_generators():
            known = self._splitting.look(self.num_evaluated, outputs, targets, num_samples, value, self._reduce)
        self._take_up(known)

    def functions(self, split: str) -> dict[str, Callable[..., Any]]:
        """Return the functions that are computed batch by batch in `split`."""
        other = self.wholes.names("train") if split == "train" else self._splitting.not_means
        return {name: function for name, function in self._functions.items() if name not in other}

    def is_call(self, name: str) -> bool:
        """Return whether the entry `name` in the result of a `training_step` holds the arguments of a metric."""
        return self.wholes.has(name) and name not in self._functions

    def is_declared(self, name: str) -> bool:
        """Return whether the user declared that `name` is computed over all samples."""
        return name not in self._functions

    @property
    def form(self) -> dict[str, bool]:
        """Return, for each function of which it is known, whether it is a mean. JSON-able."""
        return self._splitting.known

    @form.setter
    def form(self, form: Mapping[str, bool]) -> None:
        known = {name: is_mean for name, is_mean in form.items() if name in self._splitting.unknown}
        self._splitting.settle(known)
        self._take_up(known)

    def _take_up(self, known: Mapping[str, bool]) -> None:
        for name, is_mean in known.items():
            if is_mean:
                self.wholes.drop(name)
            else:
                self.wholes.train(name, self._make(self._functions[name], training=True))
