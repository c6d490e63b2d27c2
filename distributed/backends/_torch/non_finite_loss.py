"""Make a loss that is not finite show in the gradients, which all ranks exchange and check."""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def shown_in_gradients(value: torch.Tensor, factor: torch.Tensor | float, number: int | None = None) -> Iterator[None]:
    """Multiply gradients of parameters by `factor` in a backward pass from `value` within the block.

    `factor` is 1, or NaN if the loss is not finite. The gradient of such a loss may be finite: cross-entropy without a label to
    count is 0 / 0, and its gradient is 0.

    Args:
        value: the loss.
        factor: a number, or a tensor without dimensions on the device of the loss. The host does not wait for it.
        number: how many parameters to take, beginning with those that the loss uses last. None means all.
    """

    def multiply(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(None if gradient is None else gradient * factor for gradient in gradients)

    handles = [node.register_prehook(multiply) for node in itertools.islice(_leaves(value), number)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _leaves(value: torch.Tensor) -> Iterator[Any]:
    """Yield the nodes of the graph of `value` that accumulate the gradients of parameters, the nearest first."""
    waiting, seen = deque([value.grad_fn]), {value.grad_fn}
    while waiting:
        node = waiting.popleft()
        if hasattr(node, "variable"):
            yield node
        for following, _ in getattr(node, "next_functions", ()):
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
