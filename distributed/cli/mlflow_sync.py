"""`distributed mlflow-sync`: send to MLflow what a run could not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed.runs.directory import RunDirectory

_LOGGED = ("", "fit-*/", "trials/*/", "trials/*/fit-*/")  # a sweep before its trials, whose runs stand below its own


def mlflow_sync(
    run: Annotated[Path, typer.Argument(help="a run directory, or that of a sweep")],
) -> None:
    """Send to MLflow what a run logged while no server answered. May be repeated: nothing is there twice."""
    from distributed.loggers.mlflow import send_rest

    directory = RunDirectory(run)
    directory.check_idle()
    logged = [file.parent for pattern in _LOGGED for file in sorted(run.glob(f"{pattern}mlflow.json"))]
    for each in logged or [run]:
        uri = send_rest(each, lambda text: typer.echo(f"warning: {text}", err=True))
    typer.echo(f"{run}: all is at {uri}")
