"""Refuse scripts and objects that belong to torch before TensorFlow is imported, because that import takes seconds."""

from __future__ import annotations

from pathlib import Path

from distributed.backends.keras_scripts import imported
from distributed.errors import ConfigError
from distributed.state import Job

_FIX = "choose backend='pytorch-ddp' or another torch backend, or make it a Keras model"


def refuse_torch(job: Job, words: str) -> None:
    """Raise ConfigError for a model or optimizer of torch. `words` names the setting that needs Keras models."""
    for name, value in (("model", job.model), ("optimizer", job.optimizer)):
        of_torch = [cls for cls in type(value).__mro__ if cls.__module__.startswith("torch.")]
        if any(cls.__name__ in ("Module", "Optimizer") for cls in of_torch):
            kind = type(value).__name__
            raise ConfigError(f"the {name} is a torch object ({kind}), but {words} trains Keras models: {_FIX}")


def refuse_reading(job: Job, words: str) -> None:
    """Raise ConfigError for arguments that say how torch data becomes batches."""
    given = {"collate_fn": job.collate_fn, "processing_class": job.processing_class}
    if job.predict_with_generate:
        raise ConfigError(f"predict_with_generate=True needs torch models, but {words} trains Keras models: drop it")
    for name, value in given.items():
        if value is not None:
            raise ConfigError(
                f"{name} makes batches for torch models, but {words} trains Keras models: batch the data in a tf.data.Dataset"
            )


def refuse_torch_script(script: Path) -> None:
    """Raise ConfigError if a script and the files beside it that it imports use torch.nn and import neither Keras nor
    TensorFlow."""
    is_of_torch = False
    for names in imported(script):
        if {name.partition(".")[0] for name in names} & {"keras", "tensorflow"}:
            return
        is_of_torch |= "torch.nn" in names
    if is_of_torch:
        raise ConfigError(
            f"{script} makes torch models and imports neither keras nor tensorflow, but backend='tensorflow' trains Keras"
            f" models: {_FIX}"
        )
