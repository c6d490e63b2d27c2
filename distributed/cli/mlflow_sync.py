"""`distributed mlflow-sync`: send to MLflow the records that a run could not send."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed.cli.run_argument import run_path
from distributed.runs.directory import RunDirectory

# A sweep comes before its trials, because the MLflow runs of trials are children of its run.
_LOGGED = ("", "fit-*/", "trials/*/", "trials/*/fit-*/")


def mlflow_sync(
    run: Annotated[Path, typer.Argument(help="the directory of a run or of a sweep", callback=run_path)],
) -> None:
    """Send to MLflow what a run logged while no server answered. Repeating the command sends nothing twice."""
    from distributed.loggers.mlflow import send_rest

    directory = RunDirectory(run)
    directory.check_idle()
    logged = [file.parent for pattern in _LOGGED for file in sorted(run.glob(f"{pattern}mlflow.json"))]
    for each in logged or [run]:
        uri = send_rest(each, lambda text: typer.echo(f"warning: {text}", err=True))
    typer.echo(f"{run}: MLflow at {uri} has all records")
