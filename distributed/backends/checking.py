"""Find plain metric functions that are not means, by comparing the mean over batches with the value over all samples.

Each rank keeps batches up to a limit. Further batches are joined to chunks, and each chunk is examined by
`splitting.judge`. Loads no framework.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distributed.backends.failures import Failures
from distributed.backends.over_all import MetricEngine, Update
from distributed.backends.parts import Arguments, Part, micro_batches, num_bytes
from distributed.backends.splitting import REFUSES, Value, judge, near

CHECK = ""  # the name of the check among the metrics of `Wholes`; no metric has it
LIMIT_BYTES = 16 << 20  # limit of bytes that all processes together keep
_CHUNK_BYTES = 1 << 20  # small batches are examined together until they have this size

Prepare = Callable[[Arguments], Arguments]


class MeansCheck:
    """Keep batches of an evaluation or an epoch to find functions that are not means. It is one of the measures in
    `Wholes`."""

    training = True

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        engine: MetricEngine,
        value: Value,
        whole: Callable[[Callable[..., Any], Sequence[Update]], Any],
        prepare: Prepare,
        failures: Failures,
        limit_bytes: int,
    ) -> None:
        """Begin with nothing kept.

        `functions` is read at each use, because it changes. `whole` computes a function over all samples. `prepare` copies
        arguments to the host.
        """
        self._functions, self._engine, self._value, self._whole = functions, engine, value, whole
        self._prepare, self._failures, self._limit_bytes = prepare, failures, limit_bytes
        # Returns the parts of the updates that were passed to `wait`. Set by an engine that joins many updates.
        self.parts_of: Callable[[Sequence[Any]], Iterable[Part]] = lambda waiting: ()
        # Means over batches of the same samples, with which the values over all samples are compared.
        self.means: Mapping[str, float] = {}
        self.is_end = True  # whether the evaluation or epoch ends
        self.reset()

    def reset(self) -> None:
        """Drop everything that was kept or found."""
        self._waiting: list[Any] = []
        self._parts: list[Part] = []
        self._num_bytes = 0  # bytes of all admitted calls, also of those that `take` has returned
        self.is_over = False  # whether a batch was not kept
        self._num_checked = 0  # number of samples at the last check; set on the main process only
        self._refuted: set[str] = set()  # functions that are not means, found in batches that were not kept
        self._chunk: list[Update] = []
        self._chunk_bytes = 0

    def admits(self, size: int) -> bool:
        """Return whether a micro-batch of `size` bytes may be kept. After the first False, return False for every later
        micro-batch."""
        self.is_over = self.is_over or self._num_bytes + size > self._limit_bytes
        self._num_bytes += 0 if self.is_over else size
        return not self.is_over

    def wait(self, update: Any) -> None:
        """Keep `update` until `take`, which passes it to `parts_of` together with other updates."""
        self._waiting.append(update)

    def leave_out(self) -> None:
        """Keep no further batch of this evaluation or epoch."""
        self.is_over = True

    def ask(self, call: Arguments, num_samples: int) -> None:
        """Examine a batch that was not kept. Small batches are joined to chunks; the host waits for the device once per
        chunk."""
        self._chunk.append([(call, num_samples)])
        self._chunk_bytes += num_bytes(call)
        if self._chunk_bytes >= _CHUNK_BYTES:
            self._ask_chunk()

    def _ask_chunk(self) -> None:
        chunk, self._chunk, self._chunk_bytes = self._chunk, [], 0
        if chunk:
            self._refuted |= {name for name, (is_mean, _) in self._judged(chunk).items() if is_mean is False}

    def _judged(self, updates: Sequence[Update]) -> dict[str, tuple[bool | None, float]]:
        """Return name -> (whether it is a mean, its value) for the samples of `updates`."""
        # Drop `JOINED`, because the samples may be in any order here. A value may hold several micro-batches, so the values of the
        # ranks may differ in their numbers of samples by more than one and cannot be put into one update.
        calls = [[(Arguments(value.args, {}), n)] for update in updates for value, n in update]
        args, number = self._engine.joined(calls).args, sum(n for update in updates for _, n in update)
        found: dict[str, tuple[bool | None, float]] = {}
        for name, function in self._functions.items():
            # A function may refuse joined batches, such as sequences of different lengths. It then stays a mean over batches.
            with self._failures.noting(name), contextlib.suppress(*REFUSES):
                found[name] = judge(function, args[0], args[1], number, self._value)
        return found

    # ------------------------------------------------------------------ as a measure of `Wholes`

    def absorb(self, part: Part) -> None:
        """Keep a micro-batch for which `admits` returned True."""
        self._parts.append(part._replace(value=self._prepare(part.value)))

    def take(self) -> list[Part]:
        """Return the parts kept since the last call, and drop them."""
        waiting, self._waiting = self._waiting, []
        taken, self._parts = [*self._parts, *self.parts_of(waiting)], []
        return taken

    def state(self) -> dict[str, Any]:
        """Return the state of this rank, which the main process needs and a checkpoint stores."""
        self._ask_chunk()
        return {
            "bytes": self._num_bytes,
            "is_over": self.is_over,
            "refuted": sorted(self._refuted),
            "checked": self._num_checked,
        }

    def restore(self, states: Sequence[Any]) -> None:
        """Continue from `states`, which `state` returned on one rank, or on several ranks that this rank replaces."""
        self.reset()
        for state in states:
            self._num_bytes += int(state["bytes"])
            self.is_over = self.is_over or bool(state["is_over"])
            self._refuted |= set(state["refuted"])
            self._num_checked = max(self._num_checked, int(state["checked"]))

    def value(self, updates: Sequence[Update], states: Sequence[Any]) -> dict[str, Any]:
        """Return name -> value over all samples, for each function that is not a mean. A value is None if not all
        samples were kept.

        Within an epoch the functions are called only when the number of samples has doubled, so that log lines stay
        cheap.
        """
        is_over = any(state["is_over"] for state in states)
        refuted = {name for state in states for name in state["refuted"]}
        number = sum(n for update in updates for _, n in update)
        is_due = number > 0 and (self.is_end or number >= 2 * self._num_checked)
        self._num_checked = number if is_due else self._num_checked
        for name, (is_mean, value) in self._judged(updates).items() if is_due else ():
            is_apart = not is_over and name in self.means and not near(value, self.means[name])
            if is_mean is False or is_apart:
                refuted.add(name)
        found: dict[str, Any] = {}
        for name in sorted(refuted & self._functions.keys()):
            with self._failures.noting(name):
                found[name] = None if is_over else self._whole(self._functions[name], _by_micro_batch(updates))
        return found


def _by_micro_batch(updates: Sequence[Update]) -> list[Update]:
    """Return `updates` with each micro-batch of the world in a list of its own, in the order of the samples."""
    found: list[Update] = []
    for update in updates:
        by_key: defaultdict[tuple[int, int], Update] = defaultdict(list)
        for value, num_samples in update:
            for key, size, part in micro_batches((-1, -1), num_samples, value):
                by_key[key].append((part, size))
        found += [by_key[key] for key in sorted(by_key)]
    return found
