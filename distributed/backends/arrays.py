"""Arrays of inputs, targets and sample weights as a data set that every engine reads. Loads no framework."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from distributed.backends.forms import fault_of, is_array
from distributed.errors import ConfigError

_FORMS = "pass an array or tensor with one sample per row, or a tuple or dict of them"


class ArrayBatch(tuple):  # type: ignore[type-arg]
    """A batch `(x,)`, `(x, y)` or `(x, y, sample_weight)` of an ArrayData. Several inputs are a tuple or a dict."""

    __slots__ = ()


class ArrayData:
    """A data set with one sample per row of its arrays.

    Args:
        x: the inputs: an array or tensor, or a tuple or dict of them.
        y: the targets in the same forms, or None.
        sample_weight: the weight of each sample, of shape `[samples]`, or None.
        class_weight: the weight of the samples of each class, by class index. Classes without an entry weigh 1.

    Raises:
        ConfigError: an argument is not an array, the arrays have different lengths, or the weights do not fit the targets.
    """

    def __init__(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Mapping[int, float] | None = None
    ) -> None:
        if class_weight is not None:
            if sample_weight is not None:
                raise ConfigError("class_weight and sample_weight both weigh the samples: multiply them, and drop one")
            sample_weight = _weights_of_classes(y, class_weight)
        if sample_weight is not None and y is None:
            raise ConfigError("sample_weight weighs the loss of targets, and there are none: pass y too")
        named = {"x": x, "y": y, "sample_weight": sample_weight}
        self.parts = ArrayBatch(_read(name, value) for name, value in named.items() if value is not None)
        lengths = {len(leaf) for leaf in leaves(self.parts)}
        if len(lengths) > 1:
            counts = " and ".join(map(str, sorted(lengths)))
            raise ConfigError(f"x, y and sample_weight have {counts} samples: pass as many of each")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return tuple(mapped(lambda leaf: leaf[index], self.parts))

    def __getitems__(self, indices: Sequence[int]) -> ArrayBatch:
        """Return the samples `indices` as one batch. torch's loaders call this method."""
        import numpy

        rows = numpy.asarray(indices, dtype=numpy.int64)
        return ArrayBatch(mapped(lambda leaf: leaf[rows], part) for part in self.parts)

    @property
    def is_weighted(self) -> bool:
        """Return whether the samples have weights."""
        return len(self.parts) == 3


def is_arrays(value: Any) -> bool:
    """Return whether `value` is an array or tensor, or a non-empty tuple, list or dict of them."""
    found = list(leaves(value))
    return bool(found) and all(is_array(leaf) or hasattr(leaf, "to_numpy") for leaf in found)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return the tuples, lists and dicts of `value` with `function` applied to their leaves. Lists become tuples."""
    if isinstance(value, Mapping):
        return {name: mapped(function, each) for name, each in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(mapped(function, each) for each in value)
    return function(value)


def leaves(value: Any) -> Iterator[Any]:
    """Yield the leaves of `value` in order."""
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from leaves(each)
    else:
        yield value


def _read(name: str, value: Any) -> Any:
    if isinstance(value, (tuple, list, Mapping)) and not value:
        raise ConfigError(f"{name} is empty: {_FORMS}")
    return mapped(lambda leaf: _array(name, leaf), value)


def _array(name: str, leaf: Any) -> Any:
    """Return `leaf` as a detached tensor on the CPU if it is a torch tensor, else as a numpy array."""
    import numpy

    if hasattr(leaf, "to_numpy"):  # pandas, polars
        leaf = leaf.to_numpy()
    if not is_array(leaf):
        fault = None if isinstance(leaf, (int, float)) else fault_of(leaf, f"{name} as an array")
        raise ConfigError(f"fit({name}=): {fault or f'a {type(leaf).__name__} is not an array: {_FORMS}'}")
    if type(leaf).__module__.partition(".")[0] == "torch":
        leaf = leaf.detach().cpu()
    else:
        leaf = numpy.asarray(leaf)
        if leaf.dtype.kind not in "biuf":
            raise ConfigError(
                f"{name} has elements of type {leaf.dtype}: pass numbers, for instance {name}.astype('float32')"
            )
    if not len(leaf.shape) or not len(leaf):
        raise ConfigError(f"{name} of shape {list(leaf.shape)} has no samples: {_FORMS}")
    return leaf


def _weights_of_classes(y: Any, class_weight: Any) -> Any:
    """Return the weight of each sample, as Keras's `fit` computes it from the class indices or one-hot targets `y`."""
    import numpy

    example = "pass class_weight={0: 1.0, 1: 5.0}"
    if not isinstance(class_weight, Mapping):
        raise ConfigError(f"class_weight is a {type(class_weight).__name__}: {example}")
    for name, weight in class_weight.items():
        if isinstance(name, bool) or not isinstance(name, numbers.Integral) or not _is_weight(weight):
            raise ConfigError(
                f"class_weight[{name!r}]={weight!r} is not a number of 0 or more for a class index: {example}"
            )
    if y is None or not is_array(y):
        raise ConfigError("class_weight needs the targets as one array: pass y, or give each sample its sample_weight")
    classes = numpy.asarray(_array("y", y))
    if classes.ndim > 1:
        classes = classes[..., 0] if classes.shape[-1] == 1 else classes.argmax(-1)
    if classes.ndim != 1:
        raise ConfigError(
            f"class_weight needs one class per sample, and y has the shape {list(y.shape)}: pass sample_weight instead"
        )
    weights = numpy.ones(len(classes))
    for index, weight in class_weight.items():
        weights[numpy.round(classes).astype(numpy.int64) == index] = weight
    return weights


def _is_weight(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return bool(is_number and 0 <= value < math.inf)
