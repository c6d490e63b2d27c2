"""Handle and report an update whose loss or gradients are not finite, for any engine."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from distributed.backends.world import World
from distributed.errors import TrainingError
from distributed.state import OnEvent, StepResult, UpdateBatch

Average = tuple[str, Any, float, Any]  # (name, value, scale, count) as in StepResult.averages


def without_weight(averages: list[Average]) -> list[Average]:
    """Return `averages` with zeros for everything except the names."""
    return [(name, 0.0, 0.0, 0.0) for name, _, _, _ in averages]


class NanPolicy:
    """Apply the setting `nan_policy` to an update whose gradients are not finite."""

    def __init__(self, policy: str, on_event: OnEvent) -> None:
        self._policy, self._on_event = policy, on_event
        self._last_step, self._in_a_row = -1, 0

    def apply(
        self, step: int, describe: Callable[[], str], result: StepResult, can_be_made: bool, *, is_late: bool = False
    ) -> None:
        """Raise TrainingError, mark the update as left out, or warn, as `nan_policy` selects. A collective.

        `describe` returns the beginning of a message. It is a collective, which all ranks call, or none if there is no message.
        `can_be_made` says whether the update can be made anyway, and `is_late` whether it has been made already.
        """
        if self._policy == "stop":
            when = "after the update, which is in no checkpoint" if is_late else "before the update"
            raise TrainingError(
                f"{describe()}: stopped {when}. Lower learning_rate, set gradient_clipping, or set nan_policy=skip"
            )
        is_new = step != self._last_step  # several updates of one batch have the same step
        if is_new:
            self._in_a_row = self._in_a_row + 1 if step == self._last_step + 1 else 1
        self._last_step = step
        if is_new and self._in_a_row in (1, 10, 100, 1000):
            is_made = self._policy == "warn" and can_be_made
            row = f" ({self._in_a_row} in a row)" if self._in_a_row > 1 else ""
            text = f"{describe()}: {'update made anyway' if is_made else 'update left out'}{row}"
            self._on_event({"kind": "warning", "text": text})
        if self._policy == "skip":  # means that are reported must not contain this update
            result.skipped, result.averages, result.deferred = True, without_weight(result.averages), []


_SHOWN = 32  # samples that a message names
_BAD = ("nan", "inf", "-inf")  # a vote is the position here, counted from 1


def vote(losses: Iterable[float]) -> float:
    """Return 0 if all losses are finite, else the position in `_BAD`, counted from 1, of the first loss that is not.

    A rank sends this number to the other ranks.
    """
    bad = next((value for value in losses if not math.isfinite(value)), None)
    return 0.0 if bad is None else 1.0 + _BAD.index(str(bad))


def votes_of(world: World, losses: Iterable[float]) -> dict[int, float]:
    """Return the vote of every rank. A collective."""
    mine = vote(losses)
    return world.reduce({rank: mine if rank == world.rank else 0.0 for rank in range(world.world_size)})


def describe(
    world: World,
    step: int,
    update_batch: UpdateBatch,
    votes: Mapping[int, float],
    losses: Sequence[float],
    find_rows: Callable[[Any, int], Sequence[int]] = lambda batch, num_samples: (),
) -> str:
    """Return a text with the step, the ranks whose loss was not finite (by `votes`), and the samples of the update. A collective.

    Args:
        world: the ranks.
        step: the step, from 1.
        update_batch: the update batch of this rank.
        votes: the vote of every rank.
        losses: the losses of this rank, in the order of its micro-batches, or one loss for all of them.
        find_rows: returns the rows of a batch that hold values that are not finite.
    """
    bad = {rank: _BAD[int(number) - 1] for rank, number in votes.items() if number}
    if bad:
        here = f"the loss is {next(iter(bad.values()))} on rank {', '.join(map(str, bad))}"
    else:
        here = "a gradient is NaN or infinite"
    last = update_batch.position + update_batch.num_samples - 1
    where = f"samples at positions {update_batch.position} to {last} of the epoch"
    shown = max(1, _SHOWN // world.world_size)
    mine: list[_Named] = []
    if not bad:  # a gradient is the sum over all samples of the update
        mine = _suspects(update_batch, None, find_rows, shown)
    elif world.rank in bad:
        mine = _suspects(update_batch, losses, find_rows, shown)
    suspects, rows = zip(*(each or _NOTHING for each in world.gather(mine)), strict=True)
    if count := sum(number for number, _ in suspects):
        here += f" for sample{'s' * (count > 1)} {_listed(suspects)} of the data set"
    if any(number for number, _ in rows):
        here += f"; not finite in the data: {_listed(rows)}"
    return f"step {step}: {here} ({where})"


_Named = Sequence[Any]  # number of samples, the first of their names
_NOTHING: tuple[_Named, _Named] = ((0, []), (0, []))


def _listed(found: Iterable[_Named]) -> str:
    """Return the names that ranks have found, and how many more there are."""
    names: list[str] = [name for _, some in found for name in some]
    rest = sum(int(number) for number, _ in found) - len(names)
    return ", ".join(names) + f" and {rest} more" * (rest > 0)


def _suspects(
    update_batch: UpdateBatch,
    losses: Sequence[float] | None,
    find_rows: Callable[[Any, int], Sequence[int]],
    shown: int,
) -> list[_Named]:
    """Return the samples of this rank that may be the cause, and those of them that hold values that are not finite.

    Each is [number, names], with at most `shown` names. Samples of a micro-batch whose loss in `losses` is finite are left out. The
    list is empty if samples have no names, as in a stream.
    """
    if update_batch.keys_at is None:
        return []
    keys = update_batch.keys_at(update_batch.position, update_batch.num_samples)
    bad: Sequence[int] = range(len(keys))
    if losses is not None and len(losses) == len(keys):
        bad = [index for index, loss in enumerate(losses) if not math.isfinite(loss)]
    micros = update_batch.micro_batches
    rows = {index: find_rows(micros[index].batch, len(keys[index])) for index in bad if index < len(micros)}
    suspects = [key for index in bad for key in keys[index]]
    not_finite = [keys[index][row] for index, found in rows.items() for row in found]
    return [[len(each), list(map(str, each[:shown]))] for each in (suspects, not_finite)]
