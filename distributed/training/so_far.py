"""The means over the epoch so far, for callbacks that read them after each update."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from distributed.training.validation import add, means_of

if TYPE_CHECKING:
    from distributed.training.loop import Run


@dataclasses.dataclass
class Peeked:
    """Sums over the first `num_results` results of the window, which the loop has not summed yet."""

    sums: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    num_results: int = 0


def means_of_epoch(run: Run) -> dict[str, float]:
    """Return the means over the training of the epoch so far. A collective that waits for the device.

    In `on_epoch_end`, the epoch is the one that ends. The window stays as it is, because later hooks of the step may log values
    that belong to its last result.
    """
    if run.ended_means is not None:
        return dict(run.ended_means)
    peeked, window = run.peeked, run.window
    if new := window[peeked.num_results :]:
        add(peeked.sums, run.backend.collect(new))
        peeked.num_results = len(window)
    sums = {name: list(pair) for name, pair in run.state.epoch_sums.items()}
    add(sums, {name: [(total, count)] for name, (total, count) in peeked.sums.items()})
    return means_of(sums)
