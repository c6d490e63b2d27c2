"""Store Keras models and optimizers in the files of a checkpoint, as numpy arrays. Every engine writes the same bytes.

model/model.safetensors          variables by name; its metadata "keras" holds their order and how the model is built
optimizer/optimizer.safetensors  state.<parameter>.<slot>
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy

from distributed.backends._keras.names import matched, model_variables, optimizer_variables, seed_names
from distributed.checkpoints.shards import StoredTensor, read_tensors
from distributed.checkpoints.tensor_file import WORDS, RawTensor, read_raw, write_tensors
from distributed.checkpoints.weights import LoadedWeights, StoredWeights, check_loaded
from distributed.config.reading import parse_json
from distributed.errors import CheckpointError, ConfigError


def save_model(model: Any, directory: Path) -> None:
    """Write the variables of a built model to `directory/model`. Only one process may call it."""
    named = model_variables(model)
    kept = json.dumps({"variables": list(named), "build": _build_config(model)})
    _write(directory / "model" / "model.safetensors", named, {"keras": kept})


def export(model: Any, path: Path) -> None:
    """Write the variables by name into one safetensors file atomically. Only one process may call it."""
    staged = path.with_name(f".tmp-{path.name}")
    _write(staged, model_variables(model), {"format": "pt"})
    staged.replace(path)


def load_model(model: Any, directory: Path) -> None:
    """Load the stored values into the variables of `model`. Every process calls it, but it is not a collective.

    A model without variables is first built with the stored build configuration. Raises CheckpointError if the
    checkpoint belongs to another model.
    """
    stored, _ = read_tensors(directory / "model")
    kept = _kept(_model_files(directory))
    if not model.built and kept["build"] is not None:
        model.build_from_config(kept["build"])
    own = model_variables(model)
    for name, other in _pairs(own, stored, kept["variables"], directory).items():
        _assign(own[name], stored[other])


def load_weights(model: Any, weights: StoredWeights, *, strict: bool) -> LoadedWeights:
    """Load stored weights into the variables of `model` and return what did not fit. The states of seed generators do not
    change.

    If the number, the order and the shapes of all variables agree, they are matched as in `load_model`. Otherwise they are matched
    by the names of their layers. Layers should then have explicit names, because generated names differ between processes.

    Raises CheckpointError with the mismatches, before any variable changes, if `strict` or if nothing fits.
    """
    kept, stored = _kept(weights.files), weights.tensors
    if not model.built and kept["build"] is not None:
        model.build_from_config(kept["build"])
    own = model_variables(model)
    if not own:
        raise ConfigError("the model has no weights before it has seen data: build it with an Input, or call it once")
    seeds = seed_names(model)
    try:
        pairs = _pairs(own, stored, kept["variables"], weights.source)
    except CheckpointError:
        theirs = _without_model(stored)
        pairs = {name: theirs[short] for short, name in _without_model(own).items() if short in theirs}
    taken = set(pairs.values())
    pairs = {name: other for name, other in pairs.items() if name not in seeds}
    shapes = {name: (list(stored[other].shape), list(own[name].shape)) for name, other in pairs.items()}
    others = {name: (there, here) for name, (there, here) in shapes.items() if there != here}
    missing = [name for name in own if name not in pairs and name not in seeds]
    unexpected = [name for name in stored if name not in taken and "seed_generator_state" not in name]
    loaded = LoadedWeights(weights.source, len(pairs) - len(others), tuple(missing), tuple(unexpected), others)
    check_loaded(loaded, strict=strict)
    for name, other in pairs.items():
        if name not in others:
            _assign(own[name], stored[other])
    return loaded


def save_optimizer(optimizer: Any, model: Any, directory: Path) -> dict[str, Any]:
    """Write the slots of a built optimizer to `directory/optimizer` and return the rest of its state as JSON. Only one
    process may call it."""
    content = optimizer_content(optimizer, model)
    slots, _ = optimizer_variables(optimizer, _names(model))
    _write(directory / "optimizer" / "optimizer.safetensors", slots, {})
    return content


def optimizer_content(optimizer: Any, model: Any) -> dict[str, Any]:
    """Return the part of a built optimizer's state that state.json stores: everything except the slots."""
    names = _names(model)
    _, own = optimizer_variables(optimizer, names)
    return {
        "class": f"keras.{type(optimizer).__name__}",
        "params": [names[id(variable)] for variable in optimizer._trainable_variables],
        "iterations": int(value_of(optimizer._iterations)),
        "learning_rate": fixed_rate(optimizer),
        "values": {name: value_of(variable).tolist() for name, variable in own.items()},
    }


def load_optimizer(optimizer: Any, model: Any, directory: Path, content: Mapping[str, Any]) -> None:
    """Load what `save_optimizer` wrote. Every process calls it, but it is not a collective.

    Args:
        content: what `save_optimizer` returned.

    Raises:
        CheckpointError: the checkpoint belongs to another optimizer or to other trained variables.
    """
    _check_content(content, optimizer)
    own = model_variables(model)
    stored_model, _ = read_tensors(directory / "model")
    here = {
        there: name
        for name, there in _pairs(own, stored_model, _kept(_model_files(directory))["variables"], directory).items()
    }
    names = {id(variable): name for name, variable in own.items()}
    trained = [names[id(variable)] for variable in optimizer._trainable_variables]
    if sorted(here.get(name, name) for name in content["params"]) != sorted(trained):
        raise CheckpointError("the checkpoint's optimizer trained other variables: freeze the same layers")
    slots, values = optimizer_variables(optimizer, names)
    stored, _ = read_tensors(directory / "optimizer")
    theirs = {_renamed(key, here): tensor for key, tensor in stored.items()}
    if theirs.keys() != slots.keys() or content["values"].keys() != values.keys():
        key = min(theirs.keys() ^ slots.keys() | content["values"].keys() ^ values.keys())
        raise CheckpointError(
            f"either this optimizer or that of the checkpoint lacks {key}: use the optimizer of the checkpoint"
        )
    for key, tensor in theirs.items():
        _assign(slots[key], tensor)
    for name, value in content["values"].items():
        values[name].assign(value)
    optimizer._iterations.assign(content["iterations"])
    if content["learning_rate"] is not None and fixed_rate(optimizer) is not None:
        optimizer.learning_rate = content["learning_rate"]


def fixed_rate(optimizer: Any) -> float | None:
    """Return the learning rate, or None if a schedule or a function computes it.

    A rate that Keras keeps in float32 is returned as the shortest decimal number with that value, such as 0.003. The
    result is the same on every engine.
    """
    rate = optimizer._learning_rate
    return float(str(value_of(rate))) if hasattr(rate, "assign") else None


def value_of(variable: Any) -> Any:
    """Return the value of a variable as a numpy array."""
    import keras

    return numpy.asarray(keras.ops.convert_to_numpy(variable))


def _names(model: Any) -> dict[int, str]:
    return {id(variable): name for name, variable in model_variables(model).items()}


def _pairs(
    own: Mapping[str, Any], stored: Mapping[str, StoredTensor], order: list[str], directory: Path
) -> dict[str, str]:
    shapes = {name: tuple(variable.shape) for name, variable in own.items()}
    return matched(shapes, {name: tensor.shape for name, tensor in stored.items()}, order, str(directory))


def _renamed(key: str, here: Mapping[str, str]) -> str:
    name, _, slot = key.removeprefix("state.").rpartition(".")
    return f"state.{here.get(name, name)}.{slot}"


def _build_config(model: Any) -> Any:
    """Return the configuration with which Keras can build the model's variables, or None if JSON cannot represent
    it."""
    config = model.get_build_config()
    try:
        return json.loads(json.dumps(config))
    except TypeError:
        return None


def _without_model(names: Iterable[str]) -> dict[str, str]:
    """Return short name -> name for the names of variables.

    A short name lacks the name of the model if all names begin with it. Keras adds a number to it that differs between
    processes. States of seed generators are left out.
    """
    kept = [name for name in names if "seed_generator_state" not in name]
    models = {name.partition("/")[0] for name in kept}
    is_common = len(models) == 1 and all("/" in name.partition("/")[2] for name in kept)
    return {name.partition("/")[2] if is_common else name: name for name in kept}


def _model_files(directory: Path) -> list[Path]:
    return sorted((directory / "model").glob("*.safetensors"))


def _kept(files: Iterable[Path]) -> dict[str, Any]:
    """Return what `save_model` stored beside the variables, or empty entries for a model that was saved without
    Keras."""
    for file in files:
        _, metadata = read_raw(file)
        try:
            kept = parse_json(metadata.get("keras", "{}"))
        except ValueError:
            raise CheckpointError(f"{file}: its metadata 'keras' is damaged") from None
        if isinstance(kept, dict) and isinstance(kept.get("variables"), list):
            return {"variables": kept["variables"], "build": kept.get("build")}
    return {"variables": [], "build": None}


def _check_content(content: Mapping[str, Any], optimizer: Any) -> None:
    kinds = {"class": str, "params": list, "iterations": int, "values": dict}
    here, there = f"keras.{type(optimizer).__name__}", content.get("class")
    if isinstance(there, str) and here != there:
        raise CheckpointError(
            f"the optimizer is {here}, the checkpoint holds {there}: use {there} or start without the checkpoint"
        )
    if not all(isinstance(content.get(name), kind) for name, kind in kinds.items()):
        raise CheckpointError("the checkpoint's state.json does not hold a Keras optimizer")


def _write(path: Path, named: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    raw = [
        RawTensor(name, WORDS[_dtype(variable)], tuple(variable.shape), _reader(variable))
        for name, variable in named.items()
    ]
    write_tensors(path, raw, metadata)


def _dtype(variable: Any) -> str:
    # Workaround (Keras 3.15, no upstream issue known; may go when Keras uses torch's uint16 and uint32): on torch it stores
    # these types as int32 and int64, so the type is that of the value and not `variable.dtype`.
    dtype = str(value_of(variable).dtype)
    if dtype not in WORDS:
        raise CheckpointError(f"{variable.path} is {dtype}, which a checkpoint cannot hold")
    return dtype


def _reader(variable: Any) -> Callable[[], memoryview]:
    def read() -> memoryview:
        return numpy.ascontiguousarray(value_of(variable)).reshape(-1).view(numpy.uint8).data

    return read


def _assign(variable: Any, stored: StoredTensor) -> None:
    word = {word: dtype for dtype, word in WORDS.items()}.get(stored.dtype)
    if word is None:
        raise CheckpointError(f"{stored.name} has the element type {stored.dtype}, which Keras does not have")
    if word == "bfloat16":
        import ml_dtypes  # installed with keras, which requires it

        dtype = numpy.dtype(ml_dtypes.bfloat16)
    else:
        dtype = numpy.dtype(word)
    variable.assign(numpy.frombuffer(stored.read(), dtype).reshape(stored.shape))
