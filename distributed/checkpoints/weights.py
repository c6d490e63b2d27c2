"""Find the weights of a run, a checkpoint or a safetensors file, and compare them with those of a model. Needs no framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.directory import open_verified
from distributed.checkpoints.manifest import MANIFEST, inspect, list_checkpoints, read_manifest, resolve
from distributed.checkpoints.shards import StoredTensor, read_files, weights_in
from distributed.checkpoints.tensor_file import check_header
from distributed.config.addresses import address_in
from distributed.errors import CheckpointError, ConfigError, shown

PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
_SHOWN = 3  # number of names that a message lists of each kind


@dataclasses.dataclass(frozen=True)
class StoredWeights:
    """The weights at `source`, a checkpoint, a safetensors file or a directory of such files, by name."""

    source: Path
    tensors: Mapping[str, StoredTensor]  # a tied tensor appears under each of its names
    files: Sequence[Path]  # the safetensors files that hold them
    is_trainable_only: bool = False  # whether it is a checkpoint that leaves out frozen parameters


@dataclasses.dataclass(frozen=True)
class LoadedWeights:
    """Names of the weights that `load_weights` could not load, and the source of the others.

    Attributes:
        source: the checkpoint or the file.
        num_loaded: the number of tensors of the model that were loaded.
        missing: names of the model that the source lacks. These tensors keep their values.
        unexpected: names of the source that the model lacks.
        other_shapes: name -> (shape in the source, shape in the model), or the element types, if only one of them is floating.
        is_trainable_only: whether the source is a checkpoint that leaves out the frozen parameters.
    """

    source: Path
    num_loaded: int
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    other_shapes: Mapping[str, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    is_trainable_only: bool = False

    @property
    def fits(self) -> bool:
        """Return whether the source has exactly the tensors of the model."""
        return not (self.missing or self.unexpected or self.other_shapes)

    def describe(self) -> str:
        """Return the mismatches in one line: the number and the first names of each kind. Control characters are shown as escapes."""
        shapes = [f"{name} is {there} there, {here} here" for name, (there, here) in self.other_shapes.items()]
        kinds = {"missing keys": self.missing, "unexpected keys": self.unexpected, "other shapes:": shapes}
        parts = [f"{what} {_first(names)}" for what, names in kinds.items() if names]
        return shown("; ".join([*parts, *(["it has the trainable parameters only"] if self.is_trainable_only else [])]))


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def check_loaded(loaded: LoadedWeights, *, strict: bool) -> None:
    """Raise CheckpointError with the mismatches if `strict` and there are any, or if nothing was loaded."""
    if strict and loaded.missing and loaded.is_trainable_only and loaded.num_loaded:
        raise CheckpointError(
            f"the weights of {loaded.source} do not fill the model: {loaded.describe()}: pass strict=False, which leaves the"
            " frozen ones as they are in the model"
        )
    if (strict and not loaded.fits) or not loaded.num_loaded:
        none = "" if loaded.num_loaded else "no tensor fits: "
        raise CheckpointError(
            f"the weights of {loaded.source} are of another model: {none}{loaded.describe()}: build the model as it was saved"
        )


def check_weights(setting: str, source: str) -> None:
    """Check that `source`, the value of `setting`, holds weights. Only names, sizes and headers of files are checked.

    Raises ConfigError if `source` is an address, and CheckpointError if it holds no weights or is damaged.
    """
    try:
        found = find_weights(source)
        if (found / MANIFEST).exists():
            inspect(found)
        for file in _files_of(found):
            check_header(file)
    except CheckpointError as error:
        raise CheckpointError(f"{setting}={source!r}: {error}") from None


def find_weights(source: str | Path) -> Path:
    """Return the checkpoint, the safetensors file or the directory of such files that `source` means, without reading it.

    For a run or a directory of checkpoints, the best checkpoint by the run's monitor is returned, or the newest one if no
    checkpoint has a value of the monitor. Raises CheckpointError if there are no weights, and ConfigError for an address.
    """
    if address_in(Path(source)) is not None:
        raise ConfigError(f"weights are not loaded from the address {str(source)!r}: copy it to this machine first")
    path = Path(source)
    if path.is_file():
        return _checked_file(path)
    if not path.is_dir():
        raise CheckpointError(f"there is no {path}: give a run directory, a checkpoint or a .safetensors file")
    if (path / MANIFEST).exists():
        return path
    infos = list_checkpoints(path / "checkpoints") or list_checkpoints(path)
    if infos:
        return next((info.path for info in infos if info.is_best), infos[-1].path)
    if any(path.glob("*.safetensors")):
        return path
    if pickles := sorted(file.name for file in path.iterdir() if file.suffix in PICKLES):
        raise _refused_pickle(path / pickles[0])
    return resolve(path)  # raises the error, or returns a directory called step-... without a manifest


def _checked_file(path: Path) -> Path:
    if path.suffix in PICKLES:
        raise _refused_pickle(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(f"{path} is not a .safetensors file: give a run directory, a checkpoint or such a file")
    return path


def _refused_pickle(path: Path) -> CheckpointError:
    return CheckpointError(
        f"{path} is a pickle, which can run code when it is read: convert it with"
        f" 'distributed checkpoint convert {path} model.safetensors'"
    )


def read_stored(source: str | Path) -> StoredWeights:
    """Return the weights that `source` means (see `find_weights`). The bytes of tensors are read when they are used.

    Every byte of a checkpoint is verified. Raises CheckpointError if the source is damaged or holds no weights.
    """
    found = find_weights(source)
    if not found.is_file() and ((found / MANIFEST).exists() or not any(found.glob("*.safetensors"))):
        found = open_verified(found)
    files = _files_of(found)
    tensors, aliases = read_files(files, found)
    tensors |= {name: tensors[owner] for name, owner in aliases.items() if owner in tensors}
    if not tensors:
        raise CheckpointError(f"{found} holds no weights: give another run directory, checkpoint or .safetensors file")
    is_checkpoint = (found / MANIFEST).exists()
    return StoredWeights(found, tensors, files, is_checkpoint and read_manifest(found).is_trainable_only)


def _files_of(found: Path) -> list[Path]:
    if found.is_file():
        return [found]
    # A safetensors file at the top of a checkpoint holds the state of callbacks, not weights.
    own = [] if (found / MANIFEST).exists() else sorted(found.glob("*.safetensors"))
    return own or sorted((weights_in(found) / "model").glob("*.safetensors"))
