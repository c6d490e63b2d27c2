"""`distributed checkpoint`: list, verify, export and convert checkpoints. Loads no framework."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from distributed.backends.converting import convert
from distributed.checkpoints.durable import size_text
from distributed.checkpoints.manifest import CheckpointInfo, best_of, list_checkpoints, resolve
from distributed.checkpoints.mirror import stored_checkpoints
from distributed.checkpoints.objects import Objects, unusable
from distributed.checkpoints.verifying import verify
from distributed.cli.export import copied, export, given_address
from distributed.cli.run_argument import run_path
from distributed.cli.typer_help import Command, Group
from distributed.errors import CheckpointError, shown

app = typer.Typer(add_completion=False, cls=Group)

_COLUMNS = ("step", "epoch", "size", "saved (UTC)", "saved by")


@app.callback(invoke_without_command=True)
def checkpoint_(context: typer.Context) -> None:
    """List, verify, export and convert checkpoints."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


@app.command("list", cls=Command)
def list_(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="a run directory, or a directory of checkpoints", callback=run_path)
    ],
) -> None:
    """Show the checkpoints of a run, oldest first, and whether each one is intact.

    At an address of object storage, only names and sizes are compared.
    """
    problems: list[str] = []
    address = given_address(run)
    infos = list_checkpoints(resolve(run).parent) if address is None else _stored(address)
    names = {info.manifest.monitor for info in infos if info.manifest and info.manifest.monitor_value is not None}
    monitor = names.pop() if len(names) == 1 else ""  # stands above the values, so that the table fits into 80 columns
    rows: list[tuple[str, ...]] = [(*_COLUMNS, shown(monitor) or "monitor", "verified")]
    for info in infos:
        problem = _problem(info.path) if address is None else info.problem
        problems += [problem] if problem else []
        rows.append(tuple(map(shown, _row(info, monitor, "no" if problem else "yes" if address is None else "sizes"))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    for problem in problems:
        typer.echo(shown(problem))


def _row(info: CheckpointInfo, monitor: str, verdict: str) -> tuple[str, ...]:
    """Return the cells of a checkpoint. `monitor` is the metric that is named above its value, or ""."""
    if info.manifest is None:
        return (str(info.step), *["?"] * 5, verdict)
    m = info.manifest
    value = "" if m.monitor_value is None else f"{m.monitor_value:.6g}{' best' if info.is_best else ''}"
    value = f"{m.monitor} {value}" if value and not monitor else value
    saved, engine = m.created[:16].replace("T", " "), f"{m.backend} x {m.world_size}"
    return (
        str(m.step),
        str(m.epoch + (m.samples_in_epoch > 0)),
        size_text(m.total_bytes) + (" (trainable only)" if m.is_trainable_only else ""),
        saved,
        engine,
        value,
        verdict,
    )


@app.command("verify", cls=Command)
def verify_(
    checkpoint: Annotated[
        Path,
        typer.Argument(help="a checkpoint, or a run directory, whose newest checkpoint is used", callback=run_path),
    ],
) -> None:
    """Read every byte of a checkpoint and compare it with its digests. Exits with 1 if it is damaged."""
    address = given_address(checkpoint)
    path = resolve(checkpoint) if address is None else None
    try:
        with copied(path, address) as local:
            manifest = verify(local)
    except CheckpointError as error:
        typer.echo(shown(str(error)), err=True)
        raise typer.Exit(1) from None
    size = size_text(manifest.total_bytes)
    partial = ", trainable parameters only" if manifest.is_trainable_only else ""
    where = shown(str(path or address))
    typer.echo(f"{where}: step {manifest.step}, {len(manifest.files)} files, {size}{partial}, all verified")


app.command("export", cls=Command)(export)  # the same command as `distributed export`


@app.command("convert", cls=Command)
def convert_(
    source: Annotated[
        Path,
        typer.Argument(
            help="a file of torch.save, or a directory of torch.distributed.checkpoint, DeepSpeed, Lightning, Accelerate or transformers"
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT.safetensors", help="the file to write")],
    trust: Annotated[
        bool,
        typer.Option(
            "--trust", help="let the checkpoint run code, in a process without network where the system allows it"
        ),
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="where the weights are in the saved object, such as app.model (default: detected)"
        ),
    ] = None,
    prefix: Annotated[
        str,
        typer.Option(help="use only tensors with this prefix, and remove it: model. for Lightning's self.model"),
    ] = "",
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
) -> None:
    """Write the weights of another program's checkpoint to a file that `--init-from` and `load_weights` take.

    Only weights are converted. Directories of torch.distributed.checkpoint and DeepSpeed, and pickles that hold more than tensors,
    need --trust, because reading them can run code.
    """
    done = convert(source, out, trust=trust, key=key, prefix=prefix, force=force)
    skipped = f", without {', '.join(map(shown, done.skipped[:3]))} (no tensors)" if done.skipped else ""
    network = (
        ""
        if done.is_isolated or not trust
        else ", read by a process with network access, because this system cannot take that from a process"
    )
    typer.echo(
        f"{out}: {done.num_tensors} tensors, {size_text(done.num_bytes)}, from {shown(str(source))} ({done.format}){skipped}{network}"
    )


def _stored(address: str) -> list[CheckpointInfo]:
    objects = Objects(address)
    try:
        infos = stored_checkpoints(objects) or stored_checkpoints(objects, "checkpoints")
    except OSError as error:
        raise unusable(f"{address} cannot be read: {error}", error, CheckpointError) from None
    if not infos:
        raise CheckpointError(
            f"{address} holds no checkpoint: give the address of a run, or of a directory of step-... ones"
        )
    best = best_of(infos)
    return [dataclasses.replace(info, is_best=info is best) for info in infos]


def _problem(path: Path) -> str:
    try:
        verify(path)
    except CheckpointError as error:
        return str(error)
    return ""
