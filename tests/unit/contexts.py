"""Make the context of a fit for tests of callbacks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distributed.callbacks import FitContext
from distributed.config.settings import DistributedConfig
from distributed.loggers.observer import Observer
from distributed.state import WorkerContext


def a_context(stop: Callable[[str], None] = print, config: DistributedConfig | None = None, **given: Any) -> FitContext:
    """Return a context in which everything that is not given does nothing."""
    nothing = {
        "model": None, "optimizer": None, "config": config or DistributedConfig(), "run_dir": Path("/runs/one"), "stop": stop,
        "save": lambda: None, "evaluate": lambda data: {}, "notice": lambda text: None, "num_samples": None,
        "named_parameters": list, "averaged_weights": None, "log": lambda *arguments, **named: None,
        "log_rate": lambda name, amount: None, "worker": WorkerContext(0, 1, 0, 1, 0, "cpu"), "observer": Observer(1),
        "updates_per_epoch": None, "means_of_epoch": dict,
    }  # fmt: skip
    return FitContext(**{**nothing, **given})
