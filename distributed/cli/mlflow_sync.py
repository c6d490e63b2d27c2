"""`distributed mlflow-sync`: send to MLflow what a run could not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed.run_dir import RunDirectory


def mlflow_sync(
    run: Annotated[Path, typer.Argument(help="a run directory, or that of a sweep")],
) -> None:
    """Send to MLflow what a run logged while no server answered. May be repeated: nothing is there twice."""
    from distributed.loggers.mlflow import send_rest

    directory = RunDirectory(run)
    directory.check_idle()
    trials = sorted(file.parent for file in run.glob("trials/*/mlflow.json"))
    for each in (run, *trials):  # the sweep first: its trials stand below it
        uri = send_rest(each, lambda text: typer.echo(f"warning: {text}", err=True))
    typer.echo(f"{run}: all is at {uri}")
