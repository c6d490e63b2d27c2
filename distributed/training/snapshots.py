"""Keep snapshots of a fit in the memory of the machine. Workers that the launcher starts again continue from the newest one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.backends.base import Backend
from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.store import CheckpointStore
from distributed.errors import ConfigError
from distributed.launching.request import launched_by
from distributed.runs.shared_memory import MEMORY
from distributed.runs.temporary import claim, memory_of
from distributed.state import OnEvent, TrainState, WorkerContext

_KEPT = 2  # the newest snapshot, and the one before it while the newest is written
_NEVER = 1 << 30  # more failed snapshots in a row than can occur, so that they never end the run


class Snapshots:
    """Take snapshots, and find the newest one. Every rank must call every method.

    A snapshot has the files of a checkpoint, in a directory in memory that belongs to the launcher, which removes it when the run
    ends. A later launch removes it if the launcher was killed.

    Args:
        directory: the directory in memory.
        backend: the adapter that writes and reads the tensors.
        context: the ranks and the device of this process.
        on_event: called on the main process with warnings.
    """

    def __init__(self, directory: Path, backend: Backend[Any], context: WorkerContext, on_event: OnEvent) -> None:
        self.directory, self._is_on = directory, True
        self._agreement = Agreement(backend.world, backend.config.timeout_s)
        self._on_event = on_event if context.is_main_process else lambda event: None
        self._store = CheckpointStore(
            directory, backend, keep_latest_k=_KEPT, keep_best=False, monitor="", monitor_mode="min", context=context,
            on_event=self._on_event, max_failed_saves=_NEVER,
        )  # fmt: skip

    def __contains__(self, checkpoint: Path | None) -> bool:
        """Return whether `checkpoint` is a snapshot. Not a collective."""
        return checkpoint is not None and checkpoint.parent == self.directory

    def take(self, state: TrainState, settings: Mapping[str, Any]) -> bool:
        """Keep a snapshot of `state` and of the backend. A collective.

        If there is too little memory for a snapshot, show a warning, take no more snapshots, and return False.
        """
        if self._is_on and self._store.save(state, settings, None) is None:
            self._is_on = False
            self._on_event(
                {"kind": "warning", "text": "snapshot_every_n_steps: no more snapshots are taken in this attempt"}
            )
        return self._is_on

    def newest(self) -> Path | None:
        """Return the newest snapshot that verifies, or None. A collective."""
        return self._store.find(in_full=True) if self._agreement.on_main(lambda: self.directory.is_dir()) else None


def open_snapshots(
    backend: Backend[Any],
    run_dir: Path,
    context: WorkerContext,
    on_event: OnEvent,
    on_main: Callable[[Callable[[], Any]], Any],
) -> Snapshots | None:
    """Return the snapshots of a fit with the run directory `run_dir`. Return None if the settings ask for none, or no launcher keeps them.

    A collective. `on_main` runs a function on the main process. Raises ConfigError on several nodes, which share no memory.
    """
    request = launched_by()
    if backend.config.snapshot_every_n_steps is None or request is None:
        return None
    if backend.plan.num_nodes > 1:
        raise ConfigError(
            f"snapshot_every_n_steps keeps snapshots in the memory of one node, and num_nodes={backend.plan.num_nodes}: drop it, or set"
            " checkpoint_every_n_steps"
        )
    memory = memory_of(request.run_dir)
    on_main(lambda: _claim(memory))
    fit = os.path.relpath(run_dir.resolve(), Path(request.run_dir).resolve())
    return Snapshots(memory / "fits" / fit, backend, context, on_event)


def _claim(memory: Path) -> None:
    """Create the directory, which belongs to the parent of this process, the launcher."""
    if not MEMORY.is_dir():
        raise ConfigError(f"snapshot_every_n_steps needs {MEMORY}, which this system does not have: drop it")
    if not memory.exists():
        claim(memory, os.getppid())
