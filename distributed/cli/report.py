"""`distributed report`: write the curves of one run, several runs, or a sweep into one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed.cli.run_argument import run_paths
from distributed.config.addresses import refuse_address
from distributed.errors import ConfigError, shown


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="run directories, or the directory of a sweep", callback=run_paths),
    ],
    compare: Annotated[bool, typer.Option("--compare", help="write all runs side by side into one file")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the file to write (default: RUN/report.html, or compare.html)")
    ] = None,
) -> None:
    """Write report.html of each run. A run may still be going on, or may have been killed. The file can be read
    offline."""
    from distributed.report import FILE, write_report

    for run in runs:
        refuse_address(run, "'distributed report'")
    if compare and len(runs) == 1:
        raise ConfigError("--compare needs two or more runs: name another one, or drop the flag")
    if output is not None and len(runs) > 1 and not compare:
        raise ConfigError(f"--output is one file and {len(runs)} runs are named: add --compare, or drop --output")
    if output is not None and output.is_dir():
        raise ConfigError(f"--output {str(output)!r} is a directory: name a file, {str(output / FILE)!r}")
    if compare:
        print(shown(str(write_report(runs, output or Path("compare.html")))))
        return
    for run in runs:
        print(shown(str(write_report([run], output or run / FILE))))
