"""Displays and loggers of a run while it lasts: the console, files, TensorBoard, MLflow; the page drawn from the files belongs in `report`."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distributed.callbacks.media import Audio, Figure, Image, Table, Text

__all__ = ["Audio", "Figure", "Image", "Table", "Text", "mlflow_run_id"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'distributed.loggers' has no attribute {name!r}")
    return getattr(importlib.import_module("distributed.callbacks.media"), name)


def mlflow_run_id(run_dir: str | os.PathLike[str]) -> str | None:
    """Return the id of the MLflow run to which a run is logged. Any process may call it.

    Args:
        run_dir: the run directory, such as `history.run_dir`.

    Returns:
        The id. None if the run is not logged to MLflow, or if MLflow has not answered yet.
    """
    from distributed.loggers._mlflow.spool import RunRecord

    record = RunRecord.read(Path(run_dir))
    return None if record is None else record.run_id
