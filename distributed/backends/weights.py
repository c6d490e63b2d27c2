"""Load weights by name into a torch or Keras model, for the code of users and before the first update of a fit."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.backends.keras_kinds import is_model
from distributed.backends.world import World
from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.weights import LoadedWeights, check_loaded, read_stored
from distributed.errors import CheckpointError, ConfigError


def load_weights(model: Any, source: str | os.PathLike[str], *, strict: bool = True) -> LoadedWeights:
    """Load the weights at `source` into `model`, in place. No code of the source runs.

    Not a collective: each process reads the files by itself.

    Args:
        model: a torch module, which may be wrapped or compiled, or a Keras model.
        source: a run directory, a checkpoint, or a `.safetensors` file. Of a run, the best checkpoint by the run's monitor is used,
            or the newest one if the monitor was never measured.
        strict: whether every tensor must fit. If False, tensors that do not fit keep their values.

    Returns:
        The checkpoint or file that was used, and the names that did not fit.

    Raises:
        CheckpointError: the source is missing or damaged, or its tensors do not fit. The model has not changed, unless the source
            can be read only in part.
        ConfigError: `model` is neither a torch module nor a Keras model with weights.
    """
    weights = read_stored(os.fspath(source))
    if is_model(model):
        from distributed.backends._keras import files

        return files.load_weights(model, weights, strict=strict)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        several = (
            ", or torch.nn.ModuleDict(models) for several models" if isinstance(model, Mapping) else ", not a factory"
        )
        raise ConfigError(f"model is a {type(model).__name__}: pass a torch module or a Keras model{several}")
    from distributed.backends._torch import tensors

    return tensors.load_weights(model, weights, strict=strict)


def load_trained(model: Any, source: str | os.PathLike[str]) -> LoadedWeights:
    """Load the weights at `source` as `load_weights` does. If `source` has only the trainable ones, `model` must have the others.

    Raises CheckpointError also if the frozen parameters of `model` are not those with which the checkpoint was trained.
    """
    weights = read_stored(os.fspath(source))
    torch = sys.modules.get("torch")
    if not weights.is_trainable_only or torch is None or not isinstance(model, torch.nn.Module):
        return load_weights(model, source)
    from distributed.backends._torch import frozen, tensors
    from distributed.checkpoints.state_file import read_state

    left_out = frozen.checked_names(model, read_state(weights.source)[1].get("frozen"), weights.source)
    loaded = tensors.load_weights(model, weights, strict=False)
    loaded = dataclasses.replace(loaded, missing=tuple(name for name in loaded.missing if name not in left_out))
    check_loaded(dataclasses.replace(loaded, is_trainable_only=False), strict=True)
    return loaded


def start_from(
    source: str, model: Any, world: World, timeout_s: float, *, notice: Callable[[str], None], warn: Callable[[str], None]
) -> None:  # fmt: skip
    """Load the weights at `source` into the main process's `model`, as the setting `init_from` asks.

    The caller then copies them to the other ranks. What does not fit is passed to `warn`. A collective: if loading fails, all ranks
    raise CheckpointError.
    """

    def load() -> dict[str, Any]:
        try:
            loaded = load_weights(model, source, strict=False)
        except CheckpointError as error:
            raise CheckpointError(f"init_from={source!r}: {error}") from None
        return dataclasses.asdict(loaded) | {"source": str(loaded.source)}

    content = Agreement(world, timeout_s).on_main(load)
    loaded = LoadedWeights(**content | {"source": Path(content["source"])})
    notice(f"starts from the weights of {loaded.source}: {loaded.num_loaded} tensors")
    if not loaded.fits:
        warn(
            f"init_from: not all weights of {loaded.source} fit: {loaded.describe()}; what does not fit keeps its initial values"
        )
