"""`distributed parity`: train one script on every backend, and compare the numbers with those of one process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from distributed.cli.train import read_overrides
from distributed.config.registry import REGISTRY, backend_entry
from distributed.config.settings import DistributedConfig
from distributed.errors import ConfigError
from distributed.launching.script import check_script
from distributed.parity.comparison import FIRST_LOSS, FLOORS, Compared, ParityResult, measure
from distributed.parity.runs import Cell, ParityOptions, is_for
from distributed.runs.temporary import temporary_directory

_WIDTH = 80
_RUNS = "What is run"  # heading of flags
_HEADS = ("backend", "procs", "weights64", "loss64", "weights32", "loss32", "ms/step", "")


def parity(
    script: Annotated[
        Path, typer.Option(metavar="FILE", help="the script; its own arguments follow after --", rich_help_panel=_RUNS)
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS]", help="arguments of the script")
    ] = None,
    backends: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="names separated by commas, or all: every installed backend", rich_help_panel=_RUNS
        ),
    ] = "all",
    world_sizes: Annotated[
        str, typer.Option(metavar="N,N", help="numbers of processes, separated by commas", rich_help_panel=_RUNS)
    ] = "1,2,3",
    steps: Annotated[
        int, typer.Option(metavar="N", min=1, help="optimizer updates of each run", rich_help_panel=_RUNS)
    ] = 50,
    tolerance: Annotated[
        float, typer.Option(metavar="NUMBER", min=0.0, help="largest allowed difference of a weight or loss in float64")
    ] = 1e-9,
    global_batch_size: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="samples per update (default: the script's)", rich_help_panel=_RUNS),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="a setting for every run, or an option of one backend; may be repeated",
            rich_help_panel=_RUNS,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as one JSON object")] = False,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="keep the run directories and logs in DIR")] = None,
) -> None:
    """Train a script on every backend and number of processes, with the same global batches, and compare each with one
    process.

    Exits with 1 if a run failed or its numbers differ too much.
    """
    check_script(str(script))
    names = tuple(REGISTRY) if backends == "all" else tuple(_backend(name) for name in _words(backends, "backends"))
    given = read_overrides(None, {}, settings or (), None, ()).flag
    with _directory(keep) as directory:
        options = ParityOptions(
            str(script), tuple(arguments or ()), names, backends == "all", _worlds(world_sizes), steps, tolerance,
            global_batch_size, tuple(settings or ()), DistributedConfig(**given), directory,
        )  # fmt: skip
        _refuse_unused(options)
        result = measure(options, _print_run)
    if as_json:
        print(json.dumps(_plain(dataclasses.asdict(result) | {"is_good": result.is_good}), indent=1))
    else:
        print("\n".join(_lines(result)))
    if not result.is_good:
        raise typer.Exit(1)


def _refuse_unused(options: ParityOptions) -> None:
    for setting in options.settings:
        if not any(is_for(options, setting, backend) for backend in options.backends):
            raise ConfigError(
                f"--set {setting} has no effect on {', '.join(options.backends)}: drop it, or add its backend"
            )


def _words(text: str, flag: str) -> list[str]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    if not words:
        raise ConfigError(f"{flag}={text!r} contains no name: write {flag}=all, or names separated by commas")
    return list(dict.fromkeys(words))


def _backend(name: str) -> str:
    return backend_entry(name).name


def _worlds(text: str) -> tuple[int, ...]:
    words = _words(text, "world_sizes")
    if not all(word.isdecimal() and int(word) > 0 for word in words):
        raise ConfigError(f"world_sizes={text!r} are not numbers of processes: write --world-sizes 1,2,3")
    return tuple(dict.fromkeys(map(int, words)))


@contextlib.contextmanager
def _directory(keep: Path | None) -> Iterator[Path]:
    """Yield the directory for the runs: a temporary one, or `keep`, which must be empty and remains."""
    if keep is None:
        with temporary_directory() as directory:
            yield directory
        return
    if keep.exists() and not (keep.is_dir() and not any(keep.iterdir())):
        raise ConfigError(f"{keep} is not an empty directory: name another with --keep")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep


def _print_run(cell: Cell) -> None:
    print(f"running {cell}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------ the table


def _lines(result: ParityResult) -> Iterator[str]:
    assert result.batch is not None
    yield f"{result.script}: {result.steps} steps, global batch size {result.batch.global_batch_size}"
    tables = {name: [_HEADS, *_rows(result, name)] for name in result.floors}
    widths = [max(map(len, column)) for column in zip(*(row for rows in tables.values() for row in rows), strict=True)]
    for name, rows in tables.items():
        yield ""
        yield from _wrapped(f"largest differences from {name} in one process, and the median time of a step")
        yield ""
        for row in rows:
            cells = [
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            yield "  ".join([*cells[:-1], row[-1]]).rstrip()
        yield ""
        yield from _wrapped(
            f"ok: in float64 up to {result.tolerance:g} (--tolerance); in float32 weights up to {FLOORS} x the largest floor ="
            f" {FLOORS * result.floors[name]:.2g}, the first update's loss up to {FIRST_LOSS:g}"
        )
    yield ""
    yield from _wrapped(
        "A floor is the difference that rounding alone makes in one process: between float32 and float64, and between whole"
        " batches and the same batches in slices."
    )
    if result.batch_dependent:
        yield from _wrapped(
            f"results depend on the split of a batch because of {', '.join(result.batch_dependent)}: runs of several processes"
            " are shown but not judged"
        )
    for each in result.skipped:
        yield from _wrapped(f"{each.what} {'FAILED' if each.is_failure else 'not run'}: {each.reason}")
    yield "all agree" if result.is_good else "NOT all agree"


def _rows(result: ParityResult, reference: str) -> Iterator[tuple[str, ...]]:
    """Yield a row for each backend and number of processes, with both element types side by side."""
    cells: dict[tuple[str, int, int], dict[str, Compared]] = {}
    for each in result.compared:
        if each.reference == reference:
            cell = each.cell
            cells.setdefault((cell.backend, cell.world_size, cell.cut), {})[cell.dtype] = each
    for (backend, world, cut), found in sorted(cells.items(), key=lambda item: _order(*item[0])):
        verdicts = {each.verdict for each in found.values()}
        word = next(word for word in ("FAR", "floor", "reference", "split", "ok") if word in verdicts)
        numbers = [_text(found.get(dtype), name) for dtype in ("float64", "float32") for name in ("weights", "losses")]
        name = backend if cut == 1 else f"  in {cut} slices" if cut else "  in float64"
        timed = found.get("float32") or next(iter(found.values()))
        yield (name, str(world), *numbers, f"{timed.step_s * 1e3:.1f}", word)


def _order(backend: str, world: int, cut: int) -> tuple[int, int, int]:
    return list(REGISTRY).index(backend), world, cut if cut != 1 else -1


def _text(each: Compared | None, name: str) -> str:
    if each is None:
        return "-"
    value = getattr(each, name)
    return "0" if value == 0 else f"{value:.1e}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _plain(value: Any) -> Any:
    """Return `value` with None in place of NaN and infinity, which JSON cannot represent."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
