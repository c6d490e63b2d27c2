"""Is a plain metric function a mean over samples? Its mean over batches is compared with its value over all samples. No framework.

What a rank keeps for it is bounded. Beyond that its batches are asked by themselves: see `vote`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distributed.backends.failures import Failures
from distributed.backends.over_all import Engine, Update
from distributed.backends.parts import Arguments, Part, num_bytes
from distributed.backends.splitting import REFUSES, Value, judge, near

CHECK = ""  # the name under which `Wholes` drives the check: no metric's
LIMIT_BYTES = 16 << 20  # that all processes together keep
_CHUNK_BYTES = 1 << 20  # of small batches, which are asked together

Prepare = Callable[[Arguments], Arguments]


class Check:
    """What this rank keeps of an evaluation, or of an epoch, to find functions that are no means."""

    training = True

    def __init__(
        self,
        functions: Mapping[str, Callable[..., Any]],
        engine: Engine,
        value: Value,
        whole: Callable[[Callable[..., Any], Sequence[Update]], Any],
        prepare: Prepare,
        failures: Failures,
        limit_bytes: int,
    ) -> None:
        """`functions` changes while it is used. `whole` computes one over all samples; `prepare` takes arguments to the host."""
        self._functions, self._engine, self._value, self._whole = functions, engine, value, whole
        self._prepare, self._failures, self._limit_bytes = prepare, failures, limit_bytes
        self.means: Mapping[str, float] = {}  # that are compared, of the same samples
        self.is_end = True  # of the evaluation or epoch
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._parts: list[Part] = []
        self._num_bytes = 0  # admitted, also of what has been taken away
        self.is_over = False  # whether something was not kept
        self._num_checked = 0  # samples, the last time; known to the main process
        self._refuted: set[str] = set()  # by batches that were asked by themselves
        self._chunk: list[Update] = []
        self._chunk_bytes = 0

    def admits(self, call: Arguments) -> bool:
        """Whether a micro-batch may be kept. After the first that may not, none is."""
        size = num_bytes(call)
        self.is_over = self.is_over or self._num_bytes + size > self._limit_bytes
        self._num_bytes += 0 if self.is_over else size
        return not self.is_over

    def leave_out(self) -> None:
        """Keep no more of this evaluation or epoch."""
        self.is_over = True

    def ask(self, call: Arguments, num_samples: int) -> None:
        """Ask a batch that was not kept, together with others where they are small. The host waits for the device now and then."""
        self._chunk.append([(call, num_samples)])
        self._chunk_bytes += num_bytes(call)
        if self._chunk_bytes >= _CHUNK_BYTES:
            self._ask_chunk()

    def _ask_chunk(self) -> None:
        chunk, self._chunk, self._chunk_bytes = self._chunk, [], 0
        if chunk:
            self._refuted |= {name for name, (is_mean, _) in self._judged(chunk).items() if is_mean is False}

    def _judged(self, updates: Sequence[Update]) -> dict[str, tuple[bool | None, float]]:
        """name -> (whether it is a mean, its value) over the samples of `updates`."""
        args, number = self._engine.joined(updates).args, sum(n for update in updates for _, n in update)
        found: dict[str, tuple[bool | None, float]] = {}
        for name, function in self._functions.items():
            # It may refuse what cannot be joined, as sequences of different lengths. Then it stays a mean of batches.
            with self._failures.noting(name), contextlib.suppress(*REFUSES):
                found[name] = judge(function, args[0], args[1], number, self._value)
        return found

    # ------------------------------------------------------------------ as a measure of `Wholes`

    def absorb(self, part: Part) -> None:
        """Take in a micro-batch that was admitted."""
        self._parts.append(part._replace(value=self._prepare(part.value)))

    def take(self) -> list[Part]:
        """Everything that was kept since the last call."""
        taken, self._parts = self._parts, []
        return taken

    def state(self) -> dict[str, Any]:
        """What the main process is to know, and a checkpoint keeps."""
        self._ask_chunk()
        return {
            "bytes": self._num_bytes,
            "is_over": self.is_over,
            "refuted": sorted(self._refuted),
            "checked": self._num_checked,
        }

    def restore(self, states: Sequence[Any]) -> None:
        """Go on from what `state` gave on one rank, or on several that this one stands for."""
        self.reset()
        for state in states:
            self._num_bytes += int(state["bytes"])
            self.is_over = self.is_over or bool(state["is_over"])
            self._refuted |= set(state["refuted"])
            self._num_checked = max(self._num_checked, int(state["checked"]))

    def value(self, updates: Sequence[Update], states: Sequence[Any]) -> dict[str, Any]:
        """name -> value over all samples of each function that is no mean; None where not all samples were kept.

        Within an epoch the functions are called each time that the samples have doubled, so that log lines cost little.
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
                found[name] = None if is_over else self._whole(self._functions[name], updates)
        return found
