"""`distributed export`: write the weights or the model of a run in a format that other programs read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from distributed.backends.exporting import FORMATS, backend_for, check_format
from distributed.checkpoints.durable import replace_file, size_text
from distributed.checkpoints.manifest import MANIFEST, read_manifest
from distributed.checkpoints.mirror import fetch_newest
from distributed.checkpoints.shards import read_weights
from distributed.checkpoints.tensor_file import write_tensors
from distributed.checkpoints.verifying import verify
from distributed.checkpoints.weights import find_weights
from distributed.cli.run_argument import run_path
from distributed.config.addresses import address_in, check_address, check_library
from distributed.config.merging import Overrides, read_config_file
from distributed.config.registry import backend_entry, default_backend
from distributed.errors import ConfigError
from distributed.launching.request import calling
from distributed.launching.variables import set_missing
from distributed.runs.temporary import temporary_directory

if TYPE_CHECKING:
    from distributed.training.capture import Captured

_SCRIPT = "the training script, from which the model and a batch are taken; its own arguments follow after --"


def export(
    source: Annotated[
        Path, typer.Argument(help="a run directory, whose best checkpoint is used, or a checkpoint", callback=run_path)
    ],
    out: Annotated[Path | None, typer.Argument(help="the file or directory to write (default: in RUN/export)")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="[-- SCRIPT ARGUMENTS]", show_default=False)] = None,
    format_: Annotated[str, typer.Option("--format", help=", ".join(FORMATS))] = "safetensors",
    script: Annotated[Path | None, typer.Option(metavar="FILE", help=_SCRIPT)] = None,
    force: Annotated[bool, typer.Option("--force", help="overwrite an existing file")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="only try to export the untrained model of the script")
    ] = False,
) -> None:
    """Write the model of a run, and check the file by running the model and the file on the same batch.

    safetensors holds the weights by name and needs no script. Every other format needs --script. The script runs up to
    Trainer.fit(), from which the model and the first batch are taken. With --dry-run, SOURCE is the script.
    """
    if dry_run:
        if out is not None:
            raise ConfigError(
                f"nothing is written with --dry-run: drop {out}, or write arguments of the script after --"
            )
        if script is None and source.is_dir():
            raise ConfigError(f"with --dry-run, SOURCE is the script, and {source} is a directory: name the script")
        _try(source if script is None else script, format_, list(arguments or ()))
        return
    address = given_address(source)
    path = _out(source, out, format_, is_address=address is not None)
    check_format(format_, path, force=force)
    if out is None:
        path.parent.mkdir(exist_ok=True)
    found = None if address is not None else find_weights(source)
    with copied(found, address) as local:
        if (local / MANIFEST).exists():
            verify(local)
        of = f"from {found or address}{_step(local)}"
        if format_ == "safetensors" and script is None:
            _write_weights(path, local, of)
            return
        if script is None:
            raise ConfigError(f"format {format_!r} needs the model: add --script train.py{_recorded(source)}")
        _write(script, arguments or (), format_, _settings_of(source).value("backend"), local, path, of, force=force)


def _write_weights(path: Path, checkpoint: Path, of: str) -> None:
    if checkpoint.is_file():
        raise ConfigError(f"{checkpoint} is a safetensors file already: name another --format, or a run")
    if read_manifest(checkpoint).is_trainable_only:
        raise ConfigError(
            f"{checkpoint} has the trainable parameters only: add --script train.py, whose model has the frozen ones"
        )
    tensors = read_weights(checkpoint)
    try:
        write_tensors(path, tensors, {"format": "pt"}, writer=replace_file)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from None
    typer.echo(f"{path}: {len(tensors)} tensors, {size_text(path.stat().st_size)}, {of}")


def _write(
    script: Path, arguments: Any, form: str, recorded: str | None, source: Path, path: Path, of: str, *, force: bool
) -> None:
    from distributed.backends.exporting import export as export_model

    with _model_and_inputs(script, arguments, form, recorded) as (model, inputs, processing):
        done = export_model(model, source, path, format=form, example=inputs, force=force, processing_class=processing)
    size = sum(each.stat().st_size for each in (path.rglob("*") if path.is_dir() else [path]) if each.is_file())
    checked = "" if done.difference is None else f", outputs differ by {done.difference:.1e}"
    fixed = "" if done.takes_any_batch_size else ", for batches of the example's size only"
    typer.echo(f"{path}: {form}, {size_text(size)}, {of}{checked}{fixed}")


def _try(script: Path, form: str, arguments: list[str]) -> None:
    """Export the untrained model of `script` to a temporary directory."""
    from distributed.backends.exporting import export as export_model

    if form in FORMATS:
        check_format(form, Path(FORMATS[form].default), force=True)
    with temporary_directory() as directory, _model_and_inputs(script, arguments, form) as (model, inputs, _):
        path = directory / (FORMATS[form].default if form in FORMATS else form)
        done = export_model(model, None, path, format=form, example=inputs)
    checked = "" if done.difference is None else f": outputs differ by {done.difference:.1e}"
    typer.echo(f"{script}: the format {form} can hold its model{checked}; nothing was written (--dry-run)")


@contextlib.contextmanager
def _model_and_inputs(
    script: Path, arguments: Any, form: str, recorded: str | None = None
) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the model of the script, the inputs of its first batch, and its tokenizer. `recorded` is the backend of the run."""
    from distributed.backends.exporting import inputs_of
    from distributed.training.capture import captured_fit

    backend = backend_for(form, recorded, script)
    set_missing(backend_entry(backend or default_backend(1)).environ)
    with contextlib.ExitStack() as stack:
        if backend is not None:
            stack.enter_context(calling(Overrides(flag={"backend": backend})))
        found: Captured = captured_fit(str(script), arguments)
        session = found.fits.open_session()
        batch = session.first_batch(found.train_data)
        model = stack.enter_context(session.whole_model())
        yield model, inputs_of(model, batch), found.fits.setup.job.processing_class


def _out(source: Path, out: Path | None, form: str, *, is_address: bool) -> Path:
    if out is not None:
        return out
    if not is_address and not source.exists():
        raise ConfigError(f"{source} does not exist: name a run directory or a checkpoint")
    if is_address or not (source / "checkpoints").is_dir():
        raise ConfigError(f"no file to write: name one after {source}")
    return source / "export" / (FORMATS[form].default if form in FORMATS else "model")


def _step(local: Path) -> str:
    return f" (step {read_manifest(local).step})" if (local / MANIFEST).exists() else ""


def _recorded(source: Path) -> str:
    """Return a hint with the script that the run's config.yaml names."""
    script = _settings_of(source).script
    return "" if script is None else f" (this run's was {script})"


def _settings_of(source: Path) -> Overrides:
    """Return the settings of a run, from its config.yaml, or none if `source` is not a run directory."""
    file = source / "config.yaml"
    return read_config_file(file) if file.is_file() else Overrides()


def given_address(path: Path) -> str | None:
    """Return the checked address that was given in place of a path, or None."""
    given = address_in(path)
    if given is None:
        return None
    check_library("the checkpoint", given)
    return check_address("the checkpoint", given)


@contextlib.contextmanager
def copied(path: Path | None, address: str | None) -> Iterator[Path]:
    """Yield `path`, or a copy of the checkpoint at `address` that is removed afterwards."""
    if path is not None:
        yield path
        return
    with temporary_directory() as directory:
        yield fetch_newest(str(address), directory)
