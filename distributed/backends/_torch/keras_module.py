"""A Keras model as a torch module: its variables under their own names, as parameters and buffers of one flat module."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from distributed.backends._keras import files
from distributed.backends._keras.floats import floats_of
from distributed.backends._keras.names import model_variables, seed_names

_MARK = "_distributed_rank"  # whose streams the seed generators of a model draw


@contextlib.contextmanager
def keras_scope(device: torch.device, dtype: str) -> Iterator[None]:
    """Within it Keras makes tensors on `device`, and floats are `dtype`."""
    import keras

    whole = _whole_float64() if dtype == "float64" else contextlib.nullcontext()
    with keras.device(str(device)), whole, floats_of(dtype):
        yield


@contextlib.contextmanager
def _whole_float64() -> Iterator[None]:
    """Everywhere but on TensorFlow Keras makes float32 of float64 in some operations (variance, maximum), as JAX does."""
    from keras.src.backend.common import dtypes

    table = dtypes.BIT64_TO_BIT32_DTYPE
    before = table["float64"]
    table["float64"] = "float64"
    try:
        yield
    finally:
        table["float64"] = before


class KerasModule(torch.nn.Module):
    """Calls the Keras model and holds its variables; empty until `adopt`.

    What can be trained is a parameter, also where it is frozen; moving statistics are buffers. States of seed generators are
    neither: each rank draws its own, so that none may be copied over another's.
    """

    keras: Any
    seeds: list[Any]  # variables with the states of seed generators
    masks: list[Any]  # of the newest outputs

    def __init__(self, model: Any) -> None:
        super().__init__()
        # Not through __setattr__, which makes a submodule of it: its parameters would count twice, under other names.
        self.__dict__.update(keras=model, seeds=[], masks=[])

    def adopt(self, rank: int) -> None:
        """Take up the variables of the model, which is built by now. `rank` gets streams of its own from seed generators."""
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
        """Make streams of rank 0, which are alike on all ranks, into those of `rank`."""
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
    """Put the weights of a checkpoint into a model outside of the workers, whose Keras may run on any engine.

    On torch it is float64 afterwards where the run was, as in the workers; on another engine it stays what it was.
    """
    import keras

    files.load_model(model, directory)  # builds it, too
    if dtype == "float64" and keras.config.backend() == "torch":
        to_float64(model)
        files.load_model(model, directory)


def to_float64(model: Any) -> None:
    """Change the floating variables of a built model, and what its layers compute in, to float64."""
    import keras

    policy = keras.DTypePolicy("float64")
    for layer in model._flatten_layers():
        layer.dtype_policy = policy
        read = [layer] if isinstance(layer, keras.layers.InputLayer) else []  # a Sequential casts the batch to its type
        for each in (*read, *_inputs(layer)):
            if "float" in str(each.dtype):
                each._dtype = "float64"
        for name, value in list(vars(layer).items()):  # what a layer has made of its constants, as Normalization
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                setattr(layer, name, value.double())
    widen(model.variables)


def _inputs(layer: Any) -> list[Any]:
    """What a model casts the batch to: of a Sequential the graph inside knows."""
    graphs = [layer, getattr(layer, "_functional", None)]
    return [tensor for graph in graphs for tensor in getattr(graph, "_inputs", None) or ()]


def widen(variables: Any) -> None:
    """Make floating variables float64, in place."""
    for variable in variables:
        if variable.value.is_floating_point():
            variable.value.data = variable.value.data.double()
            variable._dtype = "float64"
