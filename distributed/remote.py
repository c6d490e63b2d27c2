"""`fit` from a plain script or a notebook: workers are started, train, and the result comes back from their run directory."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.backends import backend_row
from distributed.checkpoint import read_state
from distributed.errors import ConfigError, DistributedError, ResourceError, TrainingError
from distributed.launcher import LaunchRequest, start_launcher
from distributed.run_dir import choose_run_dir
from distributed.settings import MergedConfig
from distributed.state import History

if TYPE_CHECKING:
    from distributed.trainer import Trainer


class _Parent:
    """What all trainers of this process share."""

    run_dir: Path | None = None
    num_trainers = 0


@dataclasses.dataclass
class Remote:
    """Where a trainer's fits in workers live, and the checkpoint that the last one left."""

    run_dir: Path
    checkpoint: Path | None = None

    def copy_checkpoint(self, target: Path) -> Path:
        """The last checkpoint under `target`. Raises ConfigError where there is none, or where it exists already."""
        if self.checkpoint is None:
            raise ConfigError("there is nothing to save: fit() has not finished")
        path = target / self.checkpoint.name
        if path.exists():
            raise ConfigError(f"{path} exists already: name another path")
        target.mkdir(parents=True, exist_ok=True)
        staged = target / f".tmp-{path.name}"
        shutil.copytree(self.checkpoint, staged)
        staged.rename(path)
        return path


@dataclasses.dataclass
class RemoteFit:
    """One fit as it travels to the workers by value. Called in every one of them."""

    trainer_class: type[Trainer]
    arguments: dict[str, Any]
    settings: dict[str, Any]
    train_data: Any
    val_data: Any

    def __call__(self) -> None:
        trainer = self.trainer_class(**self.arguments, **self.settings)
        trainer.fit(self.train_data, self.val_data)


def fit_in_workers(trainer: Trainer, merged: MergedConfig, train_data: Any, val_data: Any) -> History:
    """Train in workers of this machine; the model of `trainer` then has the trained weights."""
    if merged.config.num_nodes > 1:
        raise ConfigError(
            "fit() starts the workers of one machine only: for several, run the script on each"
            " with 'python -m distributed.cli train --num-nodes N --node-rank R --master-addr HOST'"
        )
    _check_here(trainer, merged, train_data, val_data)
    is_further = trainer._remote is not None and trainer._remote.checkpoint is not None
    if trainer._remote is None:
        trainer._remote = Remote(_new_run_dir())
    run_dir = trainer._remote.run_dir
    settings: dict[str, Any] = {**trainer._code, **_given(merged)}
    if is_further:
        settings["resume_from_checkpoint"] = True
        settings.update(_counted_from(trainer, merged))
    job = trainer.job
    arguments = {
        "model": job.model, "optimizer": job.optimizer, "scheduler": job.scheduler, "loss_fn": job.loss_fn,
        "training_step": job.training_step, "metrics": job.metrics, "callbacks": trainer.callbacks,
    }  # fmt: skip
    fit = RemoteFit(type(trainer), arguments, settings, _portable(train_data), _portable(val_data))
    with tempfile.TemporaryDirectory(prefix="distributed-") as directory:
        payload = Path(directory) / "job"
        payload.write_bytes(_pickled(fit))
        code = start_launcher(_request(trainer, merged, run_dir, payload, is_further))
    if code != 0:
        raise _failure(code, run_dir)
    return _take_back(trainer, run_dir, merged)


def _new_run_dir() -> Path:
    from distributed.session import _script_name

    _Parent.num_trainers += 1
    if _Parent.run_dir is None:
        _Parent.run_dir = choose_run_dir(_script_name())
        return _Parent.run_dir
    return _Parent.run_dir / f"fit-{_Parent.num_trainers}"


def _check_here(trainer: Trainer, merged: MergedConfig, train_data: Any, val_data: Any) -> None:
    """What the workers would refuse a second later."""
    from distributed.backends._torch.loading import loader_batch_size
    from distributed.plan import plan_batch
    from distributed.session import _check_monitor

    plan_batch(merged, trainer.plan.world_size, loader_batch_size(train_data))
    _check_monitor(merged, val_data)


def _given(merged: MergedConfig) -> dict[str, Any]:
    return {name: value for name, value in merged.config.to_dict().items() if merged.is_typed(name)}


def _counted_from(trainer: Trainer, merged: MergedConfig) -> dict[str, Any]:
    """A further fit goes on for that many epochs or steps more."""
    rows = trainer.history.rows if trainer.history is not None else []
    more: dict[str, Any] = {"epochs": merged.config.epochs + len(rows)}
    if merged.config.max_steps is not None and trainer.history is not None:
        more["max_steps"] = merged.config.max_steps + trainer.history.steps
    return more


def _portable(data: Any) -> Any:
    """A DataLoader without its live worker pool, which does not pickle."""
    if getattr(data, "_iterator", None) is None:
        return data
    loader = copy.copy(data)
    loader._iterator = None
    return loader


def _pickled(fit: RemoteFit) -> bytes:
    import cloudpickle

    try:
        content: bytes = cloudpickle.dumps(fit)
    except (TypeError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"the trainer cannot be sent to its workers ({error}): pass factories instead of the objects that hold it,"
            " or run the script with 'python -m distributed.cli train --script'"
        ) from None
    return content


def _request(trainer: Trainer, merged: MergedConfig, run_dir: Path, payload: Path, resume: bool) -> LaunchRequest:
    import sys

    config, plan = merged.config, trainer.plan
    return LaunchRequest(
        run_dir=str(run_dir), payload=str(payload), script=sys.argv[0] if sys.argv else None, script_args=tuple(sys.argv[1:]),
        working_dir=str(Path.cwd()), sys_path=tuple(sys.path), resume=resume or config.resume_from_checkpoint is not False,
        nproc_per_node=plan.nproc_per_node, device=plan.device, preload=backend_row(plan.backend).preload,
        max_restarts=config.max_restarts, restart_on_exception=config.restart_on_exception, monitor_interval=config.monitor_interval,
        start_timeout=config.start_timeout, timeout_s=config.timeout_s, verbose=config.verbose,
    )  # fmt: skip


def _failure(code: int, run_dir: Path) -> DistributedError:
    """The error of a launcher that ended with `code`, with the cause it wrote down."""
    cause = f"exit code {code}"
    events = run_dir / "events.jsonl"
    if events.exists():
        failed = [
            event for line in events.read_text().splitlines() if (event := json.loads(line))["event"] == "worker_failed"
        ]
        if failed:
            cause = failed[-1].get("traceback") or failed[-1]["cause"]
    kind = {2: ConfigError, 3: ResourceError}.get(code, TrainingError)
    return kind(
        f"training in workers failed: {cause.strip()}" if code == 1 else f"the workers refused: {cause.strip()}"
    )


def _take_back(trainer: Trainer, run_dir: Path, merged: MergedConfig) -> History:
    """Load the last checkpoint's weights into this process' model, and its history."""
    import torch

    from distributed.backends._torch import tensors

    result = json.loads((run_dir / "result.json").read_text())
    checkpoint = run_dir / result["checkpoint"]
    state, _ = read_state(checkpoint)
    if not isinstance(trainer.job.model, torch.nn.Module):
        with torch.random.fork_rng():
            torch.manual_seed(merged.config.seed)
            trainer.job.model = trainer.job.model()
    if merged.config.dtype == "float64":
        trainer.job.model.double()
    tensors.load_model(trainer.job.model, checkpoint)
    trainer._session = None  # evaluate and predict start from these weights
    trainer._remote.checkpoint = checkpoint
    return History(state.rows, state.best, result["total_time"], state.step, str(run_dir), state.stop_reason)
