"""What a run says of itself: the lines at its start and end, and result.json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.errors import DistributedError
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.runs.directory import SEARCH, RunDirectory
from distributed.state import TrainState, WorkerContext
from distributed.checkpoints.durable import replace_text


def was_interrupted(state: TrainState) -> bool:
    """Whether a signal ended the run."""
    return state.stop_reason is not None and state.stop_reason.startswith("signal ")


def is_stopped_by_callback(state: TrainState) -> bool:
    """Whether a callback ended the run."""
    return state.stop_reason not in (None, "max_steps") and not was_interrupted(state)


def resume_lines(how: str) -> str:
    """How to go on with a run that was interrupted, on a line of its own that no terminal breaks: it is to be copied."""
    return f"to go on with it:\n  {how}"


def resume_setting(checkpoint: Path) -> str:
    """The same for a `fit` in code."""
    return f"Trainer(..., resume_from_checkpoint={str(checkpoint)!r})"


def started_lines(plan: ProcessPlan, context: WorkerContext, batch: BatchPlan, notices: Sequence[str]) -> list[str]:
    """Backend and processes, the batch equation, and each notice once."""
    processes = f"{context.world_size} process{'es' * (context.world_size > 1)}"
    return [f"backend {plan.backend}, {processes} on {plan.device}", str(batch), *dict.fromkeys(notices)]


def finished_lines(run: RunDirectory, state: TrainState) -> list[str]:
    """How far it came, the best metrics, and where everything is."""
    shown = {name: value for name, value in state.best.items() if name.startswith("val_") or "accuracy" in name}
    best = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
    done = "stopped" if was_interrupted(state) else "finished"
    if state.stop_reason == "early_stopping":
        done = "stopped early, because the monitored metric no longer improved,"
    elif is_stopped_by_callback(state):
        done = f"stopped ({state.stop_reason})"
    line = f"{done} at step {state.step}, epoch {state.epoch_in_words}, in {state.total_time:.1f} s"
    return [f"{line}; best: {best}" if best else line, f"run directory: {run.path}"]


class Result:
    """RUN/result.json, written by the main process: `running` from the start on, so that an earlier end is not taken for
    this one's, and with the figures of the newest checkpoint should nobody be left to say how it ended."""

    def __init__(self, run: RunDirectory, plan: ProcessPlan, context: WorkerContext) -> None:
        self._run, self._plan, self._context = run, plan, context

    def write(self, status: str, state: TrainState, checkpoint: Path | None, error: str | None = None) -> None:
        """Replace the file, whole or not at all."""
        if not self._context.is_main_process:
            return
        content = {
            "status": status,
            "backend": self._plan.backend,
            "world_size": self._context.world_size,
            "steps": state.step,
            "epochs": state.epoch,
            "total_time": state.total_time,
            "final_metrics": _without_nan(state.rows[-1] if state.rows else state.metrics),
            "best_metrics": _without_nan(state.best),
            "samples_per_second": state.samples_seen / state.train_time_s if state.train_time_s else 0.0,
            "checkpoint": None if checkpoint is None else os.path.relpath(checkpoint, self._run.path),
            "stop_reason": state.stop_reason,
        }
        write_result(self._run.path / "result.json", content | ({} if error is None else {"error": error}))

    def write_failed(self, state: TrainState, checkpoint: Path | None, error: BaseException) -> None:
        """The run ended with `error`."""
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
        self.write(status, state, checkpoint, _one_line(error))


def close_results(run: RunDirectory, code: int, error: str | None, tell: Callable[[RunDirectory, int], None]) -> None:
    """Give results that no worker closed their end, once the launcher leaves with `code`: nobody is left to do it.

    `tell` is called with each run directory and `code`: what else must know of the end.
    """
    end = {"status": "interrupted" if code in (130, 143) else "failed"} | ({} if error is None else {"error": error})
    for path in _result_files(run):
        content = read_result(path) or {}
        is_open = content.get("status") in (("running",) if code == 0 else (None, "running", "failed"))
        if is_open:
            write_result(path, content | end)
        tell(RunDirectory(path.parent), code)


def is_training(run: RunDirectory) -> bool:
    """Return whether a fit of the run has begun and not ended, as its result.json says."""
    return any((read_result(path) or {}).get("status") == "running" for path in _result_files(run))


def _result_files(run: RunDirectory) -> list[Path]:
    """Those of the run itself and of its further fits and searches. The first may not exist."""
    below = (path for part in ("fit-*", f"{SEARCH}*") for path in run.path.glob(f"{part}/result.json"))
    return [run.path / "result.json", *below]


def add_warning(run: RunDirectory, text: str, world_size: int) -> None:
    """Add a warning to the result.json of a run that ended well, and write one where no Trainer did."""
    path = run.path / "result.json"
    content = {"status": "finished", "world_size": world_size, **(read_result(path) or {})}
    write_result(path, content | {"warnings": [*content.get("warnings", ()), text]})


def read_result(path: Path) -> dict[str, Any] | None:
    """What a result.json says; None where there is none that can be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path`. A full disk costs the file, not the run."""
    replace_text(path, json.dumps(content, indent=1))


def _one_line(error: BaseException) -> str:
    """As the launcher says it on the screen."""
    text = " ".join(str(error).split())
    return text if isinstance(error, DistributedError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null stands for both."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
