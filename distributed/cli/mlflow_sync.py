"""`distributed mlflow-sync`: send to MLflow what a run could not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed.run_dir import RunDirectory


def mlflow_sync(
    run: Annotated[Path, typer.Argument(help="a run directory")],
) -> None:
    """Send to MLflow what a run logged while no server answered. May be repeated: nothing is there twice."""
    from distributed.loggers.mlflow import send_rest

    directory = RunDirectory(run)
    directory.check_idle()
    uri = send_rest(run, lambda text: typer.echo(f"warning: {text}", err=True))
    typer.echo(f"{run}: all is at {uri}")
