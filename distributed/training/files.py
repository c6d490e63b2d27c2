"""Choose, lock and open the run directory and the checkpoint directory of a trainer."""

from __future__ import annotations

import dataclasses
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from distributed.backends.base import Backend
from distributed.checkpoints.agreement import Agreement
from distributed.checkpoints.durable import replace_text, size_text
from distributed.checkpoints.manifest import list_checkpoints
from distributed.checkpoints.objects import Objects
from distributed.checkpoints.staging import check_memory
from distributed.checkpoints.store import CheckpointStore
from distributed.config.addresses import below, check_library, is_address
from distributed.config.merging import MergedConfig, config_yaml
from distributed.config.plan import ProcessPlan
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.environments.registry import launch_identity
from distributed.launching.request import link
from distributed.launching.tee import tee_output
from distributed.runs.directory import RunDirectory, choose_run_dir, find_run_dir, script_name
from distributed.runs.remote import RemoteRun, record_checkpoints
from distributed.state import OnEvent, WorkerContext
from distributed.training.setup import Setup
from distributed.training.trial import Trial, current

T = TypeVar("T")


class _Taken:
    """Count the run directories that the trainers of this process have taken, and hold the first of them."""

    first: Path | None = None
    count = 0
    num_named: ClassVar[Counter[str]] = Counter()
    trial: Trial | None = None  # the trial that the counts are for; they restart with the next trial


def take_run_dir(choose: Callable[[], Path], name: str | None = None) -> Path:
    """Return the run directory of one more trainer of this process.

    The first trainer gets the directory that `choose` returns. Later ones get `fit-2`, `fit-3` and so on below it. A fit with a
    directory `name` gets `name`, `name-2` and so on below it.
    """
    trial = current()
    if trial is not _Taken.trial:
        _Taken.first, _Taken.count, _Taken.num_named, _Taken.trial = None, 0, Counter(), trial
    if _Taken.first is None:
        _Taken.first = trial.directory if trial is not None else choose()
    if name is not None:
        _Taken.num_named[name] += 1
        number = _Taken.num_named[name]
        return _Taken.first / (name if number == 1 else f"{name}-{number}")
    _Taken.count += 1
    return _Taken.first if _Taken.count == 1 else _Taken.first / f"fit-{_Taken.count}"


def is_first_trainer() -> bool:
    """Return whether no trainer of this process has taken a run directory yet."""
    return _Taken.first is None


def is_trial_again() -> bool:
    """Return whether this process is in a trial of a sweep that continues from its own checkpoints."""
    trial = current()
    return trial is not None and trial.is_again


def own_checkpoint_dir(config: DistributedConfig, run_dir: Path) -> str | None:
    """Return the user's `checkpoint_dir`, a path or an address, or None if it is not set.

    A later trainer of this process gets a directory below it, so that no two trainers share checkpoints.
    """
    own = config.checkpoint_dir
    if own is None or run_dir == _Taken.first:
        return own
    return below(own, run_dir.name) if is_address(own) else str(Path(own) / run_dir.name)


class TrainerFiles:
    """Hold the run directory and the checkpoints of one trainer. All ranks call every method, and all raise the same error."""

    def __init__(
        self,
        setup: Setup,
        backend: Backend[Any],
        context: WorkerContext,
        on_event: OnEvent,
    ) -> None:
        self._handover, self._request = setup.handover, setup.request
        self._overrides = setup.layers.overrides
        self._worker, self._plan, self._restart_count = setup.worker, setup.plan, setup.restart_count
        self._backend, self._context, self._on_event = backend, context, on_event
        self._agreement = Agreement(backend.world, setup.merged.config.timeout_s)
        self._directory: Path | None = None
        self._run: RunDirectory | None = None
        self._is_store_open = False

    def wants_resume(self, merged: MergedConfig) -> bool:
        """Return whether to continue from a checkpoint of an earlier attempt or run."""
        return (
            (self._handover is not None and self._handover.resume)
            or merged.config.resume_from_checkpoint is not False
            or self._restart_count > 0
            or is_trial_again()
        )

    def notices(self) -> list[str]:
        """Return the notices about the choice of the run directory."""
        is_alone = self._context.world_size == 1  # no launcher restarts such a run
        if self._run is None or is_alone or self._handover_dir() is not None:
            return []
        if not self._is_foreign() or self._identity() is not None:
            return []
        return [
            "restarts by this launcher begin at step 0: start it with --run-dir DIR --resume to continue from the last checkpoint (mkdir DIR first)"
        ]

    @property
    def directory(self) -> Path:
        """The run directory of this trainer, chosen at the first access."""
        if self._directory is None:
            self._directory = take_run_dir(self._choose, self._request.directory_name)
        return self._directory

    def on_main(self, action: Callable[[], T]) -> T:
        """Run `action` on the main process and return its result on all ranks, as `Agreement.on_main` does. A collective."""
        return self._agreement.on_main(action)

    def open_run(self, merged: MergedConfig) -> RunDirectory:
        """Return the run directory of this trainer, locked by this process unless our launcher has locked it. A collective.

        Raises:
            ConfigError: if the run directory cannot be used.
        """
        if self._run is None:
            directory = self.directory
            run = RunDirectory(directory)
            self._agreement.on_main(lambda: self._hold(run, merged))
            if directory == _Taken.first and self._is_foreign():
                tee_output(run, self._context.rank)
            self._run = run
        return self._run

    def open_store(self, merged: MergedConfig, run: RunDirectory) -> CheckpointStore:
        """Return the checkpoint store of `run` for the settings of this fit. A collective."""
        config = merged.config
        users_own = own_checkpoint_dir(config, run.path)
        remote = RemoteRun.of(run.path) if self._context.is_main_process else None
        address = users_own if is_address(users_own) else None
        if users_own is None and remote is not None:
            address = remote.checkpoints_of(run.path)
        directory = Path(users_own) if users_own is not None and address is None else None
        objects = Objects(address) if address is not None else None
        store = CheckpointStore(
            directory or run.checkpoints, self._backend, keep_latest_k=config.keep_latest_k, keep_best=config.keep_best,
            monitor=config.monitor, monitor_mode=config.monitor_mode, context=self._context,
            on_event=lambda event: self._of_store(run, event), objects=objects,
            on_upload=lambda upload: run.event("checkpoint_uploaded", **dataclasses.asdict(upload)),
            copy_run=remote.push if remote is not None else lambda: None, max_failed_saves=config.max_failed_saves,
            is_restart=self._restart_count > 0,
        )  # fmt: skip
        # The trainer keeps the lock, even after a fit that failed, so it takes the lock only once.
        if not self._is_store_open:
            if directory is not None:
                self._agreement.on_main(lambda: self._claim(directory, merged))
            self._agreement.on_main(lambda: self._claim_objects(objects, store, merged, run))
        self._is_store_open = True
        try:
            self._check_is_shared(config, store, address)
        except ConfigError:
            store.close()
            raise
        return store

    def _check_is_shared(self, config: DistributedConfig, store: CheckpointStore, address: str | None) -> None:
        """Raise ConfigError if the nodes do not share the directory of `store` and have to. A collective."""
        if config.checkpoint_async and not store.is_shared():
            raise ConfigError(
                f"checkpoint_async=True needs a directory that all nodes share, and they do not share {str(store.directory)!r}: set"
                " checkpoint_dir to one that they share, or checkpoint_async=False"
            )
        is_cut = self._backend.observer.cuts_weights
        # Only the main process knows the address of a run directory.
        if is_cut and not self._agreement.on_main(lambda: address is not None) and not store.is_shared():
            raise ConfigError(
                f"{self._plan.backend} saves a part of the weights on every node, and the nodes do not share {str(store.directory)!r}:"
                " set checkpoint_dir (or --run-dir) to a directory on a file system that all nodes share, or to an address in object storage"
            )

    def _of_store(self, run: RunDirectory, event: Mapping[str, Any]) -> None:
        """Show an event of the checkpoint store. Write failed saves and deleted checkpoints into the journal. Main process only."""
        self._on_event(event)
        if "deleted" in event:
            run.event("checkpoints_deleted", path=event["deleted"])
        if "bytes_needed" in event:
            run.event("save_failed", checkpoint=Path(event["path"]).name, cause=event["cause"])

    def memory_for_copies(self) -> str:
        """Return a notice of the memory that `checkpoint_async` needs. A collective. Raises TrainingError if there is too little."""
        ranks = self._context.local_world_size if self._backend.copying.is_on_all_ranks else 1
        known, estimated = self._backend.copying.num_bytes()
        self._agreement.on_all(lambda: check_memory(known * ranks))
        return f"checkpoint_async keeps a copy of the state in memory: about {size_text(estimated)} on each of {ranks} process(es) of a node"

    def refuse_to_start_over(self, run: RunDirectory, store: CheckpointStore) -> None:
        """Raise ConfigError if the run saved checkpoints before and `store` holds none of them. A collective."""
        self._agreement.on_main(lambda: _refuse_to_start_over(run, store.directory))

    def _choose(self) -> Path:
        return self._handover_dir() or Path(self._agreement.on_main(lambda: str(self._name())))

    def _name(self) -> Path:
        """Return a new run directory, or that of the earlier attempt that this one restarts. Called on the main process."""
        identity = self._identity()
        before = find_run_dir(script_name(), identity) if identity and self._restart_count else None
        return before or choose_run_dir(script_name(), identity)

    def _handover_dir(self) -> Path | None:
        run_dir = self._handover.run_dir if self._handover is not None else None
        return Path(run_dir) if run_dir is not None else None

    def _is_foreign(self) -> bool:
        """Return whether a foreign launcher (not that of this package) started this worker."""
        return self._worker is not None and link() is None

    def _identity(self) -> str | None:
        return launch_identity(self._worker) if self._worker is not None else None

    def _hold(self, run: RunDirectory, merged: MergedConfig) -> None:
        """Lock the run directory and write its config.yaml. Called on the main process."""
        check_library("resume_from_checkpoint", merged.config.resume_from_checkpoint)  # before its address is written
        if link() is None:
            if self._handover is not None and self._handover.resume and run.path == _Taken.first:
                run.check_resumable()
            run.check(resume=self.wants_resume(merged))
            self._lock(run)
        run.path.mkdir(parents=True, exist_ok=True)
        if self._is_foreign():
            merged = _as_launched(merged, self._plan)
        text = config_yaml(merged, self._overrides.script, self._overrides.script_args)
        replace_text(run.path / "config.yaml", text)

    def _lock(self, directory: RunDirectory) -> None:
        """Lock a directory. In a trial it is unlocked when the trial ends.

        Otherwise the first trainer keeps the lock until this process ends, and later trainers as long as they exist.
        """
        directory.lock()
        if (trial := current()) is not None:  # another process, or this one, may continue the trial later
            trial.at_end.append(directory.unlock)
        elif self._directory != _Taken.first:  # otherwise a thousand fits would hold a thousand file descriptors
            weakref.finalize(self, directory.unlock).atexit = False

    def _claim_objects(
        self, objects: Objects | None, store: CheckpointStore, merged: MergedConfig, run: RunDirectory
    ) -> None:
        """Prove that the storage can be used, and that it has no checkpoints of another run. Called on the main process."""
        # At a restart, the run can continue although the storage does not answer.
        if objects is None or self._restart_count:
            return
        objects.probe("checkpoint_dir", lambda text: self._on_event({"kind": "notice", "text": text}))
        if not self.wants_resume(merged) and store.stored_elsewhere():
            raise ConfigError(
                f"checkpoint_dir={objects.address!r} holds checkpoints of an earlier run: set resume_from_checkpoint=true"
                " (or --resume) to continue from them, or name another address"
            )
        record_checkpoints(run.path, objects.address, keep_latest_k=store.keep_latest_k, keep_best=store.keep_best)

    def _claim(self, directory: Path, merged: MergedConfig) -> None:
        """Lock the user's checkpoint directory for this run alone. Called on the main process."""
        shared = RunDirectory(directory, "checkpoint_dir", "--checkpoint-dir")
        shared.check(resume=True)
        self._lock(shared)
        if not self.wants_resume(merged) and list_checkpoints(directory):
            raise ConfigError(
                f"checkpoint_dir={str(directory)!r} holds checkpoints of an earlier run: set resume_from_checkpoint=true"
                " (or --resume) to continue from them, or name another directory"
            )


def _as_launched(merged: MergedConfig, plan: ProcessPlan) -> MergedConfig:
    """Return `merged` with the number of processes that another launcher started, unless the settings give one.

    config.yaml then makes our launcher start the same number of processes.
    """
    if any(merged.is_given(name) for name in ("nproc_per_node", "gpus_per_node", "num_gpus")):
        return merged
    processes: dict[str, Any] = {"num_nodes": plan.num_nodes, "nproc_per_node": plan.nproc_per_node}
    sources = {**merged.sources, **dict.fromkeys(processes, "launcher")}
    return dataclasses.replace(merged, config=dataclasses.replace(merged.config, **processes), sources=sources)


def _refuse_to_start_over(run: RunDirectory, directory: Path) -> None:
    saved = [event["checkpoint"] for event in run.read_events() if event["event"] == "checkpoint_saved"]
    if saved:
        raise ConfigError(
            f"the run {str(run.path)!r} saved {saved[-1]}, but there is no checkpoint in {str(directory)!r}: add"
            " the --checkpoint-dir of that run, copy its checkpoints there, or start a new run with another --run-dir"
        )
