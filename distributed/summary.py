"""What a run says of itself: the lines at its start and end, and result.json."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from distributed.plan import BatchPlan, ProcessPlan
from distributed.run_dir import RunDirectory
from distributed.state import TrainState, WorkerContext


def was_interrupted(state: TrainState) -> bool:
    """Whether a signal ended the run."""
    return state.stop_reason is not None and state.stop_reason.startswith("signal ")


def started_lines(plan: ProcessPlan, context: WorkerContext, batch: BatchPlan, notices: Sequence[str]) -> list[str]:
    """Backend and processes, the batch equation, and each notice once."""
    processes = f"{context.world_size} process{'es' * (context.world_size > 1)}"
    return [f"backend {plan.backend}, {processes} on {plan.device}", str(batch), *dict.fromkeys(notices)]


def finished_lines(run: RunDirectory, state: TrainState) -> list[str]:
    """How far it came, the best metrics, and where everything is."""
    shown = {name: value for name, value in state.best.items() if name.startswith("val_") or "accuracy" in name}
    best = "  ".join(f"{name} {value:.4g}" for name, value in shown.items())
    done = "stopped" if was_interrupted(state) else "finished"
    line = f"{done} at step {state.step}, epoch {state.epoch}, in {state.total_time:.1f} s"
    return [f"{line}; best: {best}" if best else line, f"run directory: {run.path}"]


def _without_nan(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN and no infinity: null stands for both."""
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def write_result(
    run: RunDirectory, state: TrainState, plan: ProcessPlan, context: WorkerContext, checkpoint: Path | None
) -> None:
    """RUN/result.json, whole or not at all. Main process only."""
    result = {
        "status": "interrupted" if was_interrupted(state) else "finished",
        "backend": plan.backend,
        "world_size": context.world_size,
        "steps": state.step,
        "epochs": state.epoch,
        "total_time": state.total_time,
        "final_metrics": _without_nan(state.metrics),
        "best_metrics": _without_nan(state.best),
        "samples_per_second": state.samples_seen / state.train_time_s if state.train_time_s else 0.0,
        "checkpoint": None if checkpoint is None else os.path.relpath(checkpoint, run.path),
        "stop_reason": state.stop_reason,
    }
    path = run.path / "result.json"
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    temporary.replace(path)
