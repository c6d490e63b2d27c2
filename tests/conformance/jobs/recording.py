"""Write what the trainers of a job did, on every rank, for the test that started it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from distributed import Callback, Trainer
from distributed.testing.jobs.cases import freeze

RANK, WORLD = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class Seen(Callback):
    """Keep every log line."""

    def __init__(self) -> None:
        self.logged: list[list[Any]] = []

    def on_log(self, state: Any, split: str, metrics: Mapping[str, float]) -> None:
        self.logged.append([state.step, split, dict(metrics)])


def train(model: Any, data: Any, val: Any = None, **settings: Any) -> dict[str, Any]:
    """Fit, and return the results, JSON-able."""
    trainer = settings.pop("trainer", Trainer)
    seen = Seen()
    fitted = trainer(model, callbacks=[seen, *settings.pop("callbacks", ())], **settings)
    history = fitted.fit(data, val)
    return {**facts(fitted, history), "logged": seen.logged}


def facts(trainer: Trainer, history: Any) -> dict[str, Any]:
    directory = Path(trainer.merged.config.checkpoint_dir or Path(history.run_dir) / "checkpoints")
    return {
        "weights": [v.tolist() for v in torch.nn.utils.parameters_to_vector(trainer.model.parameters()).double()],
        "dtypes": sorted({str(p.dtype) for p in trainer.model.parameters()}),
        "steps": history.steps,
        "stop_reason": history.stop_reason,
        "rows": history.rows,
        "run_dir": str(history.run_dir),
        "checkpoints": sorted(path.name for path in directory.rglob("step-*")),
    }


def run_cases(cases: Mapping[str, Callable[[], dict[str, Any]]], out: Path) -> None:
    """Run every case in turn. An error that all ranks raise is recorded as the result of the case."""
    freeze()
    for number, (name, case) in enumerate(cases.items()):
        try:
            content = case()
        except Exception as error:  # recorded for the test, which knows whether to expect it
            content = {"error": f"{type(error).__name__}: {error}"}
        (out / f"{name}-{RANK}.json").write_text(json.dumps(content, default=_plain))
        if number == 0:
            freeze()  # do not collect what the first fit imported


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else repr(value)


def read(out: Path, world: int) -> dict[str, list[dict[str, Any]]]:
    """Return case -> what each rank wrote."""
    names = {path.stem.rpartition("-")[0] for path in out.glob("*.json")}
    return {name: [json.loads((out / f"{name}-{r}.json").read_text()) for r in range(world)] for name in names}


def distance(one: dict[str, Any], other: dict[str, Any] | list[float]) -> float:
    """Return the largest difference between two sets of final weights. It is infinite if a weight is not finite."""
    assert "error" not in one, one["error"]
    weights = other if isinstance(other, list) else other["weights"]
    assert len(weights) == len(one["weights"])
    largest = max(abs(a - b) for a, b in zip(one["weights"], weights, strict=True))
    return largest if math.isfinite(largest) else math.inf
