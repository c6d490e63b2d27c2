"""Where the course of a run is shown and written: the display, files, TensorBoard, MLflow. The page drawn of it belongs to `report`."""

from __future__ import annotations

import os
from pathlib import Path


def mlflow_run_id(run_dir: str | os.PathLike[str]) -> str | None:
    """Return the id of the MLflow run that the run at `run_dir` is logged to.

    Return None if it is not logged to MLflow, or MLflow has not answered yet.
    """
    from distributed.loggers._mlflow.spool import RunRecord

    record = RunRecord.read(Path(run_dir))
    return None if record is None else record.run_id
