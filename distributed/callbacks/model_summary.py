"""Show the modules of a model with their numbers of parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from distributed.callbacks.base import Callback
from distributed.errors import ConfigError

if TYPE_CHECKING:
    from distributed.state import TrainState


class ModelSummary(Callback):
    """Show the modules of the model with their numbers of parameters once, at the start of training.

    Args:
        depth: the number of levels of modules to show. 1 shows the children of the model.

    Raises:
        ConfigError: `depth` is negative.
    """

    def __init__(self, depth: int = 1) -> None:
        if depth < 0:
            raise ConfigError(f"depth={depth!r} must be 0 or more")
        self.depth = depth

    def on_train_start(self, state: TrainState) -> None:
        if state.step:
            return
        for line in summary(self.context.model, self.depth):
            self.context.notice(line)


def summary(model: Any, depth: int) -> list[str]:
    """Return a table of the modules of `model` (a torch module or a Keras model), one line each, and of the whole model."""
    rows = [*_rows(model, depth), ("all", type(model).__name__, *_numbers(model))]
    names, kinds = max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)
    numbers = max(len(f"{row[2]:,}") for row in rows)
    return [
        f"{name:<{names}}  {kind:<{kinds}}  {total:>{numbers},} parameters"
        + (f", {total - trained:,} of them frozen" if trained < total else "")
        for name, kind, total, trained in rows
    ]


def _rows(model: Any, depth: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield (name, class, number of parameters, number of those that are trained) for each module down to `depth`."""
    if hasattr(model, "trainable_variables"):  # of Keras
        for layer in model.layers if depth else ():
            yield layer.name, type(layer).__name__, *_numbers(layer)
    else:
        for name, module in model.named_modules():
            if name and name.count(".") < depth:
                yield name, type(module).__name__, *_numbers(module)


def _numbers(module: Any) -> tuple[int, int]:
    if hasattr(module, "trainable_variables"):
        return _size(module.weights), _size(module.trainable_variables)
    parameters = list(module.parameters())
    return _size(parameters), _size([p for p in parameters if p.requires_grad])


def _size(tensors: Any) -> int:
    """Return the number of elements of `tensors`. A sharded tensor counts as a whole."""
    total = 0
    for tensor in tensors:
        count = 1
        for length in tensor.shape:
            count *= int(length)
        total += count
    return total
