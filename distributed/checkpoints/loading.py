"""Verify a checkpoint and load it into a backend, on all ranks together. Loads no framework."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.copies import Copies
from distributed.checkpoints.digests import FileRecord
from distributed.checkpoints.manifest import Manifest, read_manifest
from distributed.checkpoints.part_checks import PartChecks
from distributed.checkpoints.state_file import read_state
from distributed.checkpoints.verifying import (
    large_parts,
    part_to_verify,
    verify_files,
    verify_small_parts,
    verify_unread,
)
from distributed.errors import CheckpointError, DamagedError, escaped
from distributed.state import TrainState


class Loads(Protocol):
    """Protocol of an adapter that loads its own part of a checkpoint."""

    def load(self, directory: Path, state: Mapping[str, Any], /) -> Callable[[], None]:
        """Begin to load what `save` wrote into `directory`, and return a function that does the rest.

        `state` is what `save` returned on rank 0. See `Backend.load`.
        """


class CheckpointReader:
    """Verify and load checkpoints. Every rank must call each of the methods.

    Args:
        backend: the adapter that loads the tensors.
        agreement: the agreement of all ranks.
        copies: the copies of checkpoints on nodes that do not share the directory.
    """

    def __init__(self, backend: Loads, agreement: Agreement, copies: Copies) -> None:
        self._backend, self._agreement, self._copies = backend, agreement, copies

    def verify(self, path: Path, *, in_full: bool) -> None:
        """Read a checkpoint, each rank a part of the files: every byte if `in_full`, else all but large parts. A collective.

        Raises CheckpointError, on every rank, with a bad file and the reason.
        """
        readers, read = self._readers(path), verify_files if in_full else verify_small_parts
        self._agreement.on_all(lambda: read(path, self._own_files(lambda: read_manifest(path), readers)))

    def _readers(self, path: Path) -> list[int]:
        """Return the ranks that verify a checkpoint together: those that see it where the main process does. A collective."""
        away = self._copies.away_from(path)
        return [rank for rank in range(self._agreement.context.world_size) if rank not in away]

    def _own_files(self, manifest: Callable[[], Manifest], readers: list[int]) -> dict[str, FileRecord]:
        """Return the files of a checkpoint that this rank verifies if the ranks `readers` do this together.

        `manifest` returns the manifest of the checkpoint. It is called on these ranks only.
        """
        context = self._agreement.context
        if context.rank not in readers:
            return {}
        return part_to_verify(manifest().files, readers, context.rank, context.world_size)

    def load(self, path: Path, *, is_verified: bool) -> TrainState:
        """Load a checkpoint into the backend, and return the training state. `is_verified` tells whether it was verified in full.

        Raises CheckpointError, on every rank, if it belongs to another model or cannot be read. Of this kind is DamagedError for a large
        tensor that is damaged and was not verified before.
        """
        readers, checks = self._readers(path), PartChecks()
        with self._copies.here(path) as here:

            @functools.cache
            def manifest() -> Manifest:
                return read_manifest(here)

            def verify_rest() -> None:
                verify_unread(here, checks, self._own_files(manifest, readers))

            def begin() -> tuple[TrainState, Callable[[], None]]:
                state, extra = read_state(here)
                files = {} if is_verified else manifest().files
                with checks.of(large_parts(here, files)), _of_another_run(here):
                    finish = self._backend.load(here, extra)
                if not is_verified:
                    verify_rest()
                return state, finish

            def finish_load() -> None:
                with _of_another_run(here):
                    finish()

            try:
                state, finish = self._agreement.on_all(begin)
            except (OSError, CheckpointError) as error:
                if not is_verified:
                    self._raise_damage(verify_rest)
                if isinstance(error, DamagedError):  # on this rank alone: what it could not read can be read now
                    raise CheckpointError(str(error)) from None
                raise
            self._agreement.on_all(finish_load)
        return state

    def _raise_damage(self, verify_rest: Callable[[], None]) -> None:
        """Raise DamagedError on every rank if damage is the cause of an error of a load. A collective."""
        try:
            self._agreement.on_all(verify_rest)
        except (OSError, CheckpointError) as error:
            raise DamagedError(str(error)) from None


@contextlib.contextmanager
def _of_another_run(path: Path) -> Iterator[None]:
    """Raise CheckpointError for an error of the block that a state of another run causes."""
    try:
        yield
    except (TypeError, KeyError, ValueError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise CheckpointError(
            f"checkpoint {path}: its state does not fit this run ({type(error).__name__}: {error})"
        ) from escaped(error)
