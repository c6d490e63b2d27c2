"""Wrap a Keras model in a flat torch module that holds its variables as parameters and buffers under their names."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from distributed.backends._keras import files
from distributed.backends._keras.floats import floats_of
from distributed.backends._keras.names import model_variables, seed_names

_MARK = "_distributed_rank"  # the rank whose streams the model's seed generators use


@contextlib.contextmanager
def keras_scope(device: torch.device, dtype: str) -> Iterator[None]:
    """Make Keras create tensors on `device`, with floats of `dtype`, in this block."""
    import keras

    whole = _whole_float64() if dtype == "float64" else contextlib.nullcontext()
    with keras.device(str(device)), whole, floats_of(dtype):
        yield


@contextlib.contextmanager
def _whole_float64() -> Iterator[None]:
    """Keep float64 in all operations in this block.

    Workaround (Keras 3.15, keras-team/keras#23704; may go when Keras keeps float64 on torch): on every engine but
    TensorFlow, Keras computes some operations (variance, maximum) on float64 in float32, as JAX does.
    """
    from keras.src.backend.common import dtypes

    table = dtypes.BIT64_TO_BIT32_DTYPE
    before = table["float64"]
    table["float64"] = "float64"
    try:
        yield
    finally:
        table["float64"] = before


class KerasModule(torch.nn.Module):
    """Call the Keras model and hold its variables. The module is empty until `adopt`.

    Trainable variables are parameters, even if they are frozen; moving statistics are buffers. States of seed
    generators are neither: each rank draws its own, so they must not be copied between ranks.
    """

    keras: Any
    seeds: list[Any]  # variables that hold the states of seed generators
    masks: list[Any]  # Keras masks of the newest outputs

    def __init__(self, model: Any) -> None:
        super().__init__()
        # Bypass __setattr__, which would register the model as a submodule and count its parameters twice.
        self.__dict__.update(keras=model, seeds=[], masks=[])

    def adopt(self, rank: int) -> None:
        """Register the variables of the model, which must be built.

        The seed generators draw separate streams for `rank`.
        """
        model = self.keras
        trained = {id(v) for layer in model._flatten_layers() for v in layer._trainable_variables}
        seeds = seed_names(model)
        for name, variable in model_variables(model).items():
            if name in seeds:
                self.seeds.append(variable)
            elif id(variable) in trained:
                self.register_parameter(name, variable.value)
            else:
                self.register_buffer(name, variable.value)
        if getattr(model, _MARK, None) is None:
            self.mix_seeds(rank)

    def mix_seeds(self, rank: int) -> None:
        """Turn the seed streams of rank 0, which are the same on all ranks, into those of `rank`."""
        object.__setattr__(self.keras, _MARK, rank)
        with torch.no_grad():
            for variable in self.seeds:
                variable.value[0].bitwise_xor_(_mixed(rank))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        import keras

        if self.keras._call_has_training_arg:
            kwargs["training"] = self.training
        outputs = self.keras(*args, **kwargs)
        self.masks[:] = [getattr(tensor, "_keras_mask", None) for tensor in keras.tree.flatten(outputs)]
        return outputs

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> KerasModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        own = self._parameters | self._buffers
        for name, variable in model_variables(self.keras).items() if own else ():
            variable._value = own[name] if name in own else fn(variable.value.data)
        return self


def _mixed(rank: int) -> int:
    return rank * 0x3D4D51CB & 0x3FFFFFFF


def take_weights(model: Any, directory: Path, dtype: str) -> None:
    """Load the weights of a checkpoint into a model outside of the workers. Keras may run on any engine there.

    On torch, the model becomes float64 if the run was float64, as in the workers. On another engine its type does not
    change.
    """
    import keras

    files.load_model(model, directory)  # also builds the model
    if dtype == "float64" and keras.config.backend() == "torch":
        to_float64(model)
        files.load_model(model, directory)


def to_float64(model: Any) -> None:
    """Change the floating variables of a built model and the compute type of its layers to float64."""
    import keras

    policy = keras.DTypePolicy("float64")
    for layer in model._flatten_layers():
        layer.dtype_policy = policy
        read = [layer] if isinstance(layer, keras.layers.InputLayer) else []  # a Sequential casts to its type
        for each in (*read, *_inputs(layer)):
            if "float" in str(each.dtype):
                each._dtype = "float64"
        for name, value in list(vars(layer).items()):  # constants that a layer computed, as Normalization does
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                setattr(layer, name, value.double())
    widen(model.variables)


def _inputs(layer: Any) -> list[Any]:
    """Return the input tensors whose type the model casts the batch to.

    A Sequential keeps its input tensors in its inner graph.
    """
    graphs = [layer, getattr(layer, "_functional", None)]
    return [tensor for graph in graphs for tensor in getattr(graph, "_inputs", None) or ()]


def widen(variables: Any) -> None:
    """Convert floating variables to float64 in place."""
    for variable in variables:
        if variable.value.is_floating_point():
            variable.value.data = variable.value.data.double()
            variable._dtype = "float64"
