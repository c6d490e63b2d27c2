"""Write a trained model in a format that other programs run. Check the file by running it and the model on the same batch."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from distributed.backends._keras.batches import unpacked
from distributed.backends.arrays import ArrayBatch
from distributed.backends.base import TARGET_NAMES
from distributed.backends.keras_kinds import is_model
from distributed.backends.keras_scripts import imported, keras_engine
from distributed.backends.weights import load_trained
from distributed.config.libraries import is_installed
from distributed.config.registry import REGISTRY, backend_entry, default_backend
from distributed.errors import ConfigError, ResourceError, nearest


@dataclasses.dataclass(frozen=True)
class Format:
    """A format of `export`."""

    suffix: str  # of the file; "" for a directory
    default: str  # the name that the command line uses if none is given
    kind: str  # the models that it holds, for messages
    requires: tuple[str, ...] = ()  # libraries by the names under which they are imported and installed
    # The backend on which a script makes such a model, or None for the one of a single process.
    backend: str | None = None


FORMATS: Mapping[str, Format] = {
    "safetensors": Format(".safetensors", "model.safetensors", "torch modules and Keras models"),
    "onnx": Format(".onnx", "model.onnx", "torch modules", ("onnx", "onnxscript", "onnxruntime")),
    "torch-export": Format(".pt2", "model.pt2", "torch modules"),
    "savedmodel": Format("", "saved_model", "Keras models on TensorFlow", ("tensorflow",), "tensorflow"),
    "huggingface": Format("", "hugging_face", "models of transformers", ("transformers",)),
}


# Names in the directories that formats write.
_OF_EXPORTS = (
    "saved_model.pb", "fingerprint.pb", "variables", "assets",
    "config.json", "generation_config.json", "adapter_config.json", "*.safetensors", "*.safetensors.index.json", "README.md",
    "tokenizer*", "*_tokens*.json", "chat_template*", "vocab*", "merges.txt", "spiece.model", "*processor_config.json",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Exported:
    """A file or directory that `export` has written.

    Attributes:
        path: the file or directory.
        source: the checkpoint or file that the weights came from, or None if the model kept its own weights.
        difference: the largest absolute difference between an output of the model and of the file, for the same batch. None for
            "safetensors", which holds no program to run.
        takes_any_batch_size: whether the batches may have another size than the example.
    """

    path: Path
    source: Path | None
    difference: float | None
    takes_any_batch_size: bool = True


def export(
    model: Any,
    source: str | os.PathLike[str] | None,
    path: str | os.PathLike[str],
    *,
    format: str,  # noqa: A002 - the word of the command line
    example: Any = None,
    force: bool = False,
    processing_class: Any = None,
) -> Exported:
    """Write `model`, in evaluation mode, to `path`. Check it by running the model and the file on the same batch.

    Runs in this process alone. The file is written beside its target and renamed after the check.

    Args:
        model: a torch module, a Keras model, or a factory of one.
        source: the weights to load first, in any form that `load_weights` takes. A run directory means its best checkpoint. None
            keeps the weights of `model`.
        path: the file or directory to write.
        format: "safetensors" (weights alone), "onnx", "torch-export" (a `.pt2` file), "savedmodel" (Keras models on TensorFlow) or
            "huggingface" (models of transformers).
        example: the inputs of one batch: a tensor, a tuple of positional arguments, or a dict of named ones. Not needed for
            "safetensors".
        force: whether to replace what is at `path`.
        processing_class: a tokenizer or a processor, which "huggingface" saves beside the model.

    Returns:
        The path, the source of the weights, and the difference that the check found.

    Raises:
        ConfigError: the format does not exist or does not hold this model. The message names an unsupported operator.
        ResourceError: a library is missing.
        CheckpointError: the weights do not fit.
    """
    path = Path(path)
    check_format(format, path, force=force)
    if format != "safetensors" and example is None:
        raise ConfigError(
            f"format={format!r} is checked on a batch: pass example=inputs, such as the first batch of a loader"
        )
    made = _made(model)
    if (names := getattr(made, "names_of_models", None)) and format != "safetensors":
        raise ConfigError(
            f"format {format!r} holds one model, and there are {', '.join(names)}: export one of them in code, with"
            f" distributed.export(trainer.model[{names[0]!r}], None, PATH, format={format!r}, example=INPUTS)"
        )
    _check_kind(made, format)
    loaded = None if source is None else load_trained(made, source)
    with _staged(path) as staged:
        difference, is_free = _written(made, staged, format, example)
        if format == "huggingface" and processing_class is not None:
            processing_class.save_pretrained(staged)
    return Exported(path, None if loaded is None else loaded.source, difference, is_free)


def save_pretrained(model: Any, processing_class: Any, path: Path) -> None:
    """Save a model of transformers into the directory `path`, and the tokenizer or processor beside it unless it is None."""
    if not callable(getattr(model, "save_pretrained", None)):
        raise ConfigError(
            f"a {type(model).__name__} has no save_pretrained(): save its weights with trainer.save('model.safetensors')"
        )
    for each in (model, processing_class):
        if each is not None:
            each.save_pretrained(path)


def backend_for(name: str, recorded: str | None, script: Path) -> str | None:
    """Return the backend on which the script of an export makes its model, or None for the one of a single process.

    This is another one for a Keras model on another engine: of the format, of the run, or of KERAS_BACKEND.

    Args:
        name: the format.
        recorded: the backend that the run has recorded, or None.
        script: the script. Its source is searched for imports of keras.
    """
    usual = backend_entry(default_backend(1)).environ
    for other in (FORMATS[name].backend, recorded):
        if other in REGISTRY and keras_engine(REGISTRY[other].environ) not in (None, keras_engine(usual)):
            return other
    if any(each.partition(".")[0] == "keras" for names in imported(script) for each in names):
        chosen = os.environ.get("KERAS_BACKEND")
        if chosen is not None and chosen != keras_engine(usual):
            return next((each.name for each in REGISTRY.values() if keras_engine(each.environ) == chosen), None)
    return None


def check_format(name: str, path: Path, *, force: bool) -> None:
    """Raise an error if the format does not exist, lacks a library, or cannot be written to `path`."""
    if name not in FORMATS:
        raise ConfigError(
            f"format={name!r} is not a format{nearest(name, FORMATS)}: choose one of {', '.join(FORMATS)}"
        )
    form = FORMATS[name]
    missing = [library for library in form.requires if not is_installed(library)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise ResourceError(
            f"format {name!r} needs {', '.join(missing)}, which {verb} not installed: run pip install {' '.join(missing)}"
        )
    if path.suffix != form.suffix and (form.suffix or path.suffix in {each.suffix for each in FORMATS.values()}):
        wanted = f"a file that ends with {form.suffix}" if form.suffix else "a directory"
        near = path / form.default if path.is_dir() else path.with_name(form.default)
        raise ConfigError(f"{path} does not suit the format {name!r}: name {wanted}, such as {near}")
    if form.suffix and path.is_dir():
        raise ConfigError(f"{path} is a directory: name a file, {path / form.default}")
    if path.exists() and not force:
        raise ConfigError(f"{path} already exists: name another path, or replace it with force=True (--force)")
    if path.is_dir() and not _may_be_replaced(path):
        raise ConfigError(
            f"{path} is a directory with files that no export writes. They would be deleted: name another path"
        )


def _may_be_replaced(directory: Path) -> bool:
    """Return whether `directory` holds only files of an export.

    Return False for the current directory, for its parents and for a symbolic link.
    """
    if Path.cwd().is_relative_to(directory.resolve()) or directory.is_symlink():
        return False
    return all(any(fnmatch.fnmatch(each.name, known) for known in _OF_EXPORTS) for each in directory.iterdir())


def inputs_of(model: Any, batch: Any) -> Any:
    """Return the inputs of a batch of training data, without its targets, as the `example` for `export`."""
    if is_model(model):
        return unpacked(batch).x
    if isinstance(batch, Mapping):
        target = next((name for name in TARGET_NAMES if name in batch), None)
        return {name: value for name, value in batch.items() if name != target}
    if isinstance(batch, ArrayBatch):
        return batch[0] if isinstance(batch[0], (dict, tuple)) else batch[:1]
    if isinstance(batch, (tuple, list)):
        return tuple(batch[:-1]) if len(batch) > 1 else tuple(batch)
    return batch


def _made(model: Any) -> Any:
    loaded = sys.modules.get("torch")
    is_made = is_model(model) or (loaded is not None and isinstance(model, loaded.nn.Module))
    made = model if is_made else model()
    if is_model(made):
        return made
    import torch

    if not isinstance(made, torch.nn.Module):
        raise ConfigError(f"model is a {type(made).__name__}: pass a torch module, a Keras model, or a factory of one")
    return made


def _check_kind(model: Any, name: str) -> None:
    fits = {
        "safetensors": True,
        "onnx": not is_model(model),
        "torch-export": not is_model(model),
        "savedmodel": is_model(model),
        "huggingface": hasattr(model, "save_pretrained") and hasattr(type(model), "from_pretrained"),
    }
    if fits[name]:
        return
    others = ", ".join(other for other in FORMATS if fits[other])
    kind = "Keras model" if is_model(model) else "torch module"
    raise ConfigError(
        f"format {name!r} holds {FORMATS[name].kind}, and this is a {kind} ({type(model).__name__}): choose one of {others}"
    )


@contextlib.contextmanager
def _staged(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`, which takes the place of `path` at the end. Nothing is left after an error."""
    if not path.parent.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no directory {path.parent}")
    staged = path.with_name(f".tmp-{path.name}")
    _remove(staged)
    try:
        yield staged
        if path.is_dir():
            _remove(path)
        staged.replace(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    finally:
        _remove(staged)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _written(model: Any, path: Path, name: str, example: Any) -> tuple[float | None, bool]:
    """Write `model` to `path`. Return the difference on the example, and whether the size of a batch is free."""
    if name == "safetensors":
        _write_weights(model, path)
        return None, True
    if name == "savedmodel":
        from distributed.backends._keras import saved_model

        return saved_model.write(model, path, example)
    from distributed.backends._torch import programs

    return programs.write(model, path, name, example)


def _write_weights(model: Any, path: Path) -> None:
    if is_model(model):
        from distributed.backends._keras import files

        files.export(model, path)
    else:
        from distributed.backends._torch import tensors

        tensors.save_weights(model, path)
