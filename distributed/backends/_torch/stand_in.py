"""Make an object that shares the attributes of another one and replaces some of its methods."""

from __future__ import annotations

from typing import Any


def stand_in(target: Any, **methods: Any) -> Any:
    """Return an object of a subclass of `target`'s class. It has the same attributes, and `methods` in the place of its own.

    Copying or pickling the object copies or pickles `target`. `fully_shard` replaces the class of a module in the same way.
    """

    def reduce(self: Any, protocol: Any) -> Any:
        return target.__reduce_ex__(1)  # later protocols require the class of `self`

    kind = type(target)
    made: Any = object.__new__(
        type(kind.__name__, (kind,), {**methods, "__reduce_ex__": reduce, "__module__": kind.__module__})
    )
    object.__setattr__(made, "__dict__", vars(target))
    return made
