"""`distributed checkpoint`: list, verify and export checkpoints. Loads no framework."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from distributed.checkpoints.durable import replace_file, size_text
from distributed.checkpoints.manifest import CheckpointInfo, list_checkpoints, resolve, verify
from distributed.checkpoints.shards import read_weights
from distributed.checkpoints.tensor_file import write_tensors
from distributed.errors import CheckpointError, ConfigError

app = typer.Typer(add_completion=False)

_COLUMNS = ("step", "epoch", "size", "saved (UTC)", "backend x processes", "monitor", "best", "verified")


@app.callback(invoke_without_command=True)
def checkpoint_(context: typer.Context) -> None:
    """List, verify and export checkpoints."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command("list")
def list_(
    run: Annotated[Path, typer.Argument(help="a run directory, or a directory of checkpoints")],
) -> None:
    """Show the checkpoints of a run, oldest first, and whether each one verifies."""
    rows: list[tuple[str, ...]] = [_COLUMNS]
    problems = []
    for info in list_checkpoints(resolve(run).parent):
        problem = _problem(info.path)
        problems += [problem] if problem else []
        rows.append(_row(info, is_sound=not problem))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for problem in problems:
        typer.echo(problem)


def _row(info: CheckpointInfo, *, is_sound: bool) -> tuple[str, ...]:
    verdict = "yes" if is_sound else "no"
    if info.manifest is None:
        return (str(info.step), *["?"] * 5, "", verdict)
    m = info.manifest
    value = "" if m.monitor_value is None else f"{m.monitor} {m.monitor_value:.6g}"
    saved, engine = m.created[:19].replace("T", " "), f"{m.backend} x {m.world_size}"
    best = "best" if info.is_best else ""
    return (
        str(m.step),
        str(m.epoch + (m.samples_in_epoch > 0)),
        size_text(m.total_bytes),
        saved,
        engine,
        value,
        best,
        verdict,
    )


@app.command("verify")
def verify_(
    checkpoint: Annotated[
        Path, typer.Argument(help="a checkpoint, or a run directory, of which the newest checkpoint is used")
    ],
) -> None:
    """Read every byte of a checkpoint and compare it with its digests. Exits with 1 if it is damaged."""
    path = resolve(checkpoint)
    try:
        manifest = verify(path)
    except CheckpointError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1) from None
    size = size_text(manifest.total_bytes)
    typer.echo(f"{path}: step {manifest.step}, {len(manifest.files)} files, {size}, all verified")


@app.command("export")
def export(
    checkpoint: Annotated[
        Path, typer.Argument(help="a checkpoint, or a run directory, of which the newest checkpoint is used")
    ],
    out: Annotated[Path, typer.Argument(help="the file to write: OUT.safetensors")],
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> None:
    """Write the model's weights by name into one safetensors file; a tied weight appears under each of its names."""
    if out.is_dir():
        raise ConfigError(f"{out} is a directory: name a file, {out / 'model.safetensors'}")
    if out.suffix != ".safetensors":
        raise ConfigError(f"{out} does not end with .safetensors: name a file OUT.safetensors")
    if out.exists() and not force:
        raise ConfigError(f"{out} already exists: add --force to overwrite it")
    path = resolve(checkpoint)
    verify(path)
    tensors = read_weights(path)
    try:
        write_tensors(out, tensors, {"format": "pt"}, writer=replace_file)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror or error}") from None
    typer.echo(f"{out}: {len(tensors)} tensors, {size_text(out.stat().st_size)}, from {path}")


def _problem(path: Path) -> str:
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return ""
