"""The lines that a run shows at its start and end, and its result.json."""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.checkpoints.durable import replace_text
from distributed.config.kinds import COUNT, NUMBER, SECONDS, TEXT, Kind, check_kinds, list_of, object_of, optional
from distributed.config.plan import BatchPlan, ProcessPlan
from distributed.config.reading import MAX_RECORD_BYTES, LimitError, parse_json, read_bytes
from distributed.errors import ConfigError, DistributedError
from distributed.runs.directory import LEARNING_RATE, RunDirectory
from distributed.state import TrainState, WorkerContext

# What is kept of a result that would be too large to be read.
_MOST_TEXT, _MOST_WARNINGS, _MOST_METRICS = 10_000, 10, 1000
MAX_METRICS = 20_000  # of a result that is read


def was_interrupted(state: TrainState) -> bool:
    """Return whether a signal ended the run."""
    return state.stop_reason is not None and state.stop_reason.startswith("signal ")


def is_stopped_by_callback(state: TrainState) -> bool:
    """Return whether a callback ended the run."""
    return state.stop_reason not in (None, "max_steps") and not was_interrupted(state)


def resume_lines(how: str) -> str:
    """Return the lines that say how to resume an interrupted run. The command has its own line, so that it can be copied."""
    return f"to continue it:\n  {how}"


def resume_setting(checkpoint: Path) -> str:
    """Return the Python code that resumes from `checkpoint`."""
    return f"Trainer(..., resume_from_checkpoint={str(checkpoint)!r})"


def started_lines(plan: ProcessPlan, context: WorkerContext, batch: BatchPlan, notices: Sequence[str]) -> list[str]:
    """Return the lines with backend and processes, the batch equation, and each notice once."""
    processes = f"{context.world_size} process{'es' * (context.world_size > 1)}"
    return [f"backend {plan.backend}, {processes} on {plan.device}", str(batch), *dict.fromkeys(notices)]


def finished_lines(run: RunDirectory, state: TrainState) -> list[str]:
    """Return the lines with the last step, the best value of each metric, and the run directory."""
    shown = {name: value for name, value in state.best.items() if name.startswith("val_") or "accuracy" in name}
    best = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
    done = "stopped" if was_interrupted(state) else "finished"
    if state.stop_reason == "early_stopping":
        done = "stopped early, because the monitored metric no longer improved,"
    elif is_stopped_by_callback(state):
        done = f"stopped ({state.stop_reason})"
    line = f"{done} at step {state.step}, epoch {state.epoch_in_words}, in {state.total_time:.1f} s"
    return [line, *([f"best of each metric: {best}"] if best else []), f"run directory: {run.path}"]


class Result:
    """RUN/result.json, written by the main process.

    The status is `running` from the start on, so that nobody takes the result of an earlier attempt for that of this attempt. The
    file has the figures of the newest checkpoint, in case no process is left to write the final ones.
    """

    def __init__(self, run: RunDirectory, plan: ProcessPlan, context: WorkerContext) -> None:
        self._run, self._plan, self._context = run, plan, context

    def write(self, status: str, state: TrainState, checkpoint: Path | None, error: str | None = None) -> None:
        """Replace the file atomically."""
        if not self._context.is_main_process:
            return
        content = {
            "status": status,
            "backend": self._plan.backend,
            "world_size": self._context.world_size,
            "num_nodes": self._plan.num_nodes,
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

    def write_failed(
        self, state: TrainState, checkpoint: Path | None, error: BaseException, *, is_decided: bool = True
    ) -> None:
        """Write the result of a run that ended with `error`. Unless `is_decided`, the launcher decides whether it goes on."""
        status = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed" if is_decided else "running"
        self.write(status, state, checkpoint, one_line(error))


def close_results(run: RunDirectory, code: int, error: str | None, on_end: Callable[[RunDirectory, int], None]) -> None:
    """Write the end of the run into each result that no worker has completed. Called by the launcher before it exits with `code`.

    Args:
        run: the run directory.
        code: the exit code of the run.
        error: the cause in one line, or None.
        on_end: called with each run directory and `code`, for example to tell the loggers.
    """
    end = {"status": "interrupted" if code in (130, 143) else "failed"} | ({} if error is None else {"error": error})
    for path in _result_files(run):
        content = readable_result(path) or {}
        is_open = content.get("status") in (("running",) if code == 0 else (None, "running", "failed"))
        if is_open:
            write_result(path, content | end)
        on_end(RunDirectory(path.parent), code)


def is_training(run: RunDirectory) -> bool:
    """Return whether a fit of the run has begun and not ended, as its result.json says."""
    return any((readable_result(path) or {}).get("status") == "running" for path in _result_files(run))


def _result_files(run: RunDirectory) -> list[Path]:
    """Return the result files of the run, of its further fits and of its learning-rate finders. The first one may not exist."""
    below = (path for part in ("fit-*", f"{LEARNING_RATE}*") for path in run.path.glob(f"{part}/result.json"))
    return [run.path / "result.json", *below]


def add_warning(run: RunDirectory, text: str, world_size: int) -> None:
    """Add a warning to the result.json of a run that succeeded. Create the file if no Trainer has created it."""
    path = run.path / "result.json"
    content = {"status": "finished", "world_size": world_size, **(readable_result(path) or {})}
    write_result(path, content | {"warnings": [*content.get("warnings", ()), text]})


def read_result(path: Path) -> dict[str, Any] | None:
    """Return the content of a result.json, or None if the file is missing, cannot be opened or does not hold a JSON object.

    Raises ConfigError if the file is beyond a limit, or has a value that no run writes.
    """
    try:
        content = parse_json(read_bytes(path, MAX_RECORD_BYTES))
    except LimitError as error:
        raise _wrong(path, error) from None
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    try:
        check_kinds(content, _KINDS)
    except ValueError as error:
        raise _wrong(path, error) from None
    return content


_NUMBERS = object_of(optional(NUMBER))
_METRICS = optional(
    Kind(f"an object of up to {MAX_METRICS} numbers", lambda value: _NUMBERS.holds(value) and len(value) <= MAX_METRICS)
)
_KINDS = {
    "status": TEXT, "backend": optional(TEXT), "world_size": optional(COUNT), "num_nodes": optional(COUNT), "steps": optional(COUNT),
    "epochs": optional(COUNT), "total_time": optional(SECONDS), "final_metrics": _METRICS, "best_metrics": _METRICS,
    "samples_per_second": optional(SECONDS), "checkpoint": optional(TEXT), "stop_reason": optional(TEXT), "error": optional(TEXT),
    "warnings": list_of(TEXT),
}  # fmt: skip


def _wrong(path: Path, why: ValueError) -> ConfigError:
    return ConfigError(f"{str(path)!r} {why}: remove it")


def readable_result(path: Path) -> dict[str, Any] | None:
    """Return the result of `read_result`, or None if it raises ConfigError, so that the file can be replaced."""
    try:
        return read_result(path)
    except ConfigError:
        return None


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Replace `path` atomically. If the disk is full, the file is not written, but the run goes on.

    If `read_result` could not read the content because it is too large, long texts and further metrics are left out.
    """
    text = json.dumps(content, indent=1)
    if len(text) > MAX_RECORD_BYTES or any(len(content.get(name) or ()) > MAX_METRICS for name in ("final_metrics", "best_metrics")):
        text = json.dumps({name: _shortened(value) for name, value in content.items()}, indent=1)
    replace_text(path, text)


def _shortened(value: Any) -> Any:
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else f"{value[:_MOST_TEXT]}..."
    if isinstance(value, Mapping):
        return dict(itertools.islice(value.items(), _MOST_METRICS))
    return [_shortened(each) for each in value[-_MOST_WARNINGS:]] if isinstance(value, list) else value


def one_line(error: BaseException) -> str:
    """Return an error in one line, as the launcher shows it on the screen."""
    text = " ".join(str(error).split())
    return text if isinstance(error, DistributedError) and text else f"{type(error).__name__}: {text}".rstrip(": ")


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """Return `values` with None for NaN and infinity, which JSON does not have."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}
