"""Write a Keras model as a SavedModel of TensorFlow, and check it on a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from distributed.backends.same_outputs import Output, largest_difference
from distributed.errors import ConfigError


def write(model: Any, path: Path, example: Any) -> tuple[float, bool]:
    """Write `model` to the directory `path`.

    Returns the largest absolute difference of an output on the example, and whether the size of a batch is free.

    Raises ConfigError if Keras does not run on TensorFlow, if the model cannot be traced, or if the outputs differ by more than rounding.
    """
    import keras

    if keras.config.backend() != "tensorflow":
        raise ConfigError(
            f"format 'savedmodel' needs Keras on TensorFlow, and it runs on {keras.config.backend()}: set KERAS_BACKEND=tensorflow"
        )
    import tensorflow as tf

    inputs = tf.nest.map_structure(tf.convert_to_tensor, example)
    wanted = model(inputs, training=False)
    refusals = (TypeError, ValueError, NotImplementedError, tf.errors.OpError)
    try:
        model.export(str(path), format="tf_saved_model", verbose=False)
        program = tf.saved_model.load(str(path))
        found = _served(program, inputs)
    except refusals as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(f"the format 'savedmodel' cannot hold this model: {reason}: change the model") from None
    difference = _compared(wanted, found)
    fewer = _one_sample_less(inputs)
    if fewer is None:
        return difference, False
    try:
        wanted, found = model(fewer, training=False), _served(program, fewer)
    except refusals:
        return difference, False
    return max(difference, _compared(wanted, found)), True


def _served(program: Any, inputs: Any) -> Any:
    """Return the outputs of the SavedModel. The inputs are arranged as in the call that was traced."""
    import tensorflow as tf

    traced, _ = program.serve.concrete_functions[0].structured_input_signature
    return program.serve(*tf.nest.pack_sequence_as(traced, tf.nest.flatten(inputs)))


def _one_sample_less(inputs: Any) -> Any:
    """Return the inputs without the last sample, or None if they hold fewer than two."""
    import tensorflow as tf

    size = next((len(tensor) for tensor in tf.nest.flatten(inputs) if tensor.shape.rank), 0)
    if size < 2:
        return None

    def cut(tensor: Any) -> Any:
        return tensor[: size - 1] if tensor.shape.rank and len(tensor) == size else tensor

    return tf.nest.map_structure(cut, inputs)


def _compared(wanted: Any, found: Any) -> float:
    import tensorflow as tf

    return largest_difference(
        "the SavedModel", *(list(map(_output, tf.nest.flatten(each))) for each in (wanted, found))
    )


def _output(tensor: Any) -> Output:
    values = numpy.asarray(tensor)
    return str(values.dtype), values.astype("float64")
