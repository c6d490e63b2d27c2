"""`distributed runs` and `distributed status`: list the runs of a directory, and follow one of them."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from distributed.checkpoints.durable import size_text
from distributed.cli.run_argument import run_path
from distributed.config.addresses import refuse_address
from distributed.config.kinds import COUNT, SECONDS, check_kinds, optional
from distributed.config.reading import open_regular, parse_json
from distributed.errors import ConfigError, shown
from distributed.loggers.wording import duration, epoch_line, middle_cut, number, progress_parts
from distributed.runs.deleting import check_deletable, delete_run, kept_elsewhere, size_of
from distributed.runs.directory import RunDirectory
from distributed.runs.listing import UNREADABLE, RunState, list_runs, read_state_of
from distributed.runs.selecting import RunFilter, in_order, select

_WIDTH = 80
_NAME = 14  # columns of the names in `status`, with the indentation
_SHORTEST_NAME = 12
_LOOK_EVERY_S = 0.5
_READ_BYTES = 4 << 20  # of metrics.jsonl at once
_ROW = {"time": SECONDS, "step": COUNT, "epoch": COUNT, "samples_per_second": optional(SECONDS)}
_NOT_METRICS = ("time", "split", "step", "epoch", "samples_per_second")  # of a line of metrics.jsonl
_SHOWN = (  # events
    "worker_failed", "node_failed", "node_lost", "node_joined", "restarted", "regrouped", "resumed", "checkpoint_saved", "preempted",
    "finished", "not_started", "save_failed", "checkpoints_deleted",
)  # fmt: skip


def runs(
    directories: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[DIR...]", help="runs, or directories that hold runs (default: runs)"),
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help="only runs that meet the condition NAME=VALUE, or one with != < <= > >=; may be repeated",
            rich_help_panel="Select",
        ),
    ] = None,
    sort: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="started, duration, a metric, or any NAME of --where; the newest, best or smallest first",
            rich_help_panel="Select",
        ),
    ] = "started",
    is_reversed: Annotated[bool, typer.Option("--reverse", help="reverse the order", rich_help_panel="Select")] = False,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="only the first N runs", rich_help_panel="Select")
    ] = None,
    delete: Annotated[
        bool,
        typer.Option(
            "--delete", help="list these runs, ask, and delete them with checkpoints", rich_help_panel="Delete"
        ),
    ] = False,
    is_sure: Annotated[bool, typer.Option("--yes", help="delete without asking", rich_help_panel="Delete")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print everything as one JSON list")] = False,
) -> None:
    """List runs: status, backend, nodes x processes of each, step, best metric, and when they began.

    A condition names a column (name, status, backend, num_nodes, world_size, step, epoch, restarts, samples_per_second, age,
    duration), a metric (its best value), a setting or a hyperparameter. A text may be a pattern such as digits-*. A time is
    written as 15min, 3h or 7d.
    """
    if is_sure and not delete:
        raise ConfigError("--yes has no effect without --delete: add --delete, or drop --yes")
    if delete and as_json:
        raise ConfigError("--delete and --json exclude each other: list with --json first, then delete")
    if delete and is_sure and not (directories or where or limit):
        raise ConfigError(
            "--delete --yes would delete every run in ./runs: name runs, or choose some with --where or --limit"
        )
    chosen = _chosen(
        directories or [Path("runs")], [RunFilter.of(text) for text in where or ()], sort, is_reversed, limit
    )
    if as_json:
        print(json.dumps([_as_json(run) for run in chosen], indent=1))
        return
    if not chosen:
        kind = "such runs" if where else "runs"
        print(f"no {kind} in {', '.join(map(str, directories or [Path('runs')]))}")
    elif delete:
        _delete(chosen, is_sure)
    else:
        _print_table(chosen, sort)


def list_directory(directory: Path) -> None:
    """Print the table of the runs in `directory`."""
    found = list_runs(directory)
    if not found:
        print(f"no runs in {directory}")
    _print_table(found)


def _print_table(found: Sequence[RunState], metric: str = "") -> None:
    """Print the table of the runs. The column of the best metric shows `metric`, if a run has it."""
    for line in _table(found, shutil.get_terminal_size((_WIDTH, 24)).columns, metric):
        print(line)
    for run in found:
        if run.status == UNREADABLE:
            print(shown(str(run.error)))


def _chosen(
    directories: Sequence[Path], conditions: Sequence[RunFilter], sort: str, is_reversed: bool, limit: int | None
) -> list[RunState]:
    found: dict[Path, RunState] = {}
    for directory in directories:
        refuse_address(directory, "'distributed runs'")
        if directory.exists() or directory != Path("runs"):
            found |= {run.path.absolute(): run for run in list_runs(directory)}
    return in_order(select(list(found.values()), conditions), sort, is_reversed)[:limit]


def _delete(chosen: Sequence[RunState], is_sure: bool) -> None:
    """List the runs with whole paths, ask, and delete them. If one of them may not be deleted, delete none."""
    for run in chosen:
        check_deletable(run)
    sizes = [size_of(run.path) for run in chosen]
    for run, bytes_ in zip(chosen, sizes, strict=True):
        about = f"{run.status}, step {run.step}, {_age(time.time() - run.began)} old, {size_text(bytes_)}"
        print(shown(f"{run.path}  ({about})"))
    size = size_text(sum(sizes))
    for address in dict.fromkeys(address for run in chosen for address in kept_elsewhere(run.path)):
        print(shown(f"not deleted: {address}"))
    if not is_sure:
        if not sys.stdin.isatty():
            raise ConfigError("--delete asks before it deletes, and there is no terminal: add --yes")
        typer.confirm(f"delete {_runs_text(chosen)} ({size})?", abort=True)
    for run in chosen:
        delete_run(run)
    print(f"deleted {_runs_text(chosen)} ({size})")


def _runs_text(chosen: Sequence[RunState]) -> str:
    return f"{len(chosen)} run{'s' * (len(chosen) > 1)}"


def status(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="a run directory", callback=run_path)],
    once: Annotated[bool, typer.Option("--once", help="print the state and exit, even during the run")] = False,
) -> None:
    """Show the state of a run and follow it to its end, on any machine that sees its directory. Ctrl-C stops following.

    On a node that does not share the directory of node 0, show what this node knows: its workers, failures and saves.
    """
    refuse_address(run, "'distributed status'")
    state = read_state_of(run)
    for line in _lines_of(state, shutil.get_terminal_size((_WIDTH, 24)).columns):
        print(line, flush=True)
    if not once and not state.is_over:
        _follow(run)


def _as_json(run: RunState) -> dict[str, Any]:
    return {
        "run": str(run.path), "status": run.status, "backend": run.backend, "num_nodes": run.num_nodes, "world_size": run.world_size,
        "step": run.step, "epoch": run.epoch, "best_metrics": dict(run.best), "began": run.began, "changed": run.changed,
        "checkpoint": run.checkpoint, "error": run.error, "restarts": run.restarts, "final_metrics": dict(run.final),
        "total_time": run.total_time, "samples_per_second": run.samples_per_second,
    }  # fmt: skip


def _table(found: Sequence[RunState], width: int, metric: str) -> list[str]:
    """Return the lines of the table. If it is too wide, the gaps shrink first, then the name of the best metric moves into the heading
    if it is the same in all rows, then it is left out, then the names of runs lose their middle."""

    def named(run: RunState) -> str:
        name = _best_name(run, metric)
        return f"{name} {number(run.best[name])}" if name else ""

    def value(run: RunState) -> str:
        name = _best_name(run, metric)
        return number(run.best[name]) if name else ""

    lines: list[str] = []
    names = {_best_name(run, metric) for run in found if run.best}
    is_one = len(names) == 1
    shortest, head = value if is_one else named, next(iter(names)) if is_one else "best"
    for gap, best, title in (
        ("  ", named, "best"),
        (" ", named, "best"),
        (" ", shortest, head),
        (" ", shortest, "best"),
    ):
        lines = _aligned([_cells(run, best) for run in found], gap, title)
        if max(map(len, lines), default=0) <= width:
            return lines
    rows = [_cells(run, shortest) for run in found]
    longest = max(len(name) for name, *_ in rows)
    room = max(longest - max(map(len, lines)) + width, _SHORTEST_NAME)
    return _aligned([[middle_cut(name, room), *rest] for name, *rest in rows], " ", "best")


def _aligned(rows: list[list[str]], gap: str, best: str) -> list[str]:
    if not rows:
        return []
    rows = [["run", "status", "backend", "nodes", "step", best, "age"], *rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [gap.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _cells(run: RunState, best: Callable[[RunState], str]) -> list[str]:
    nodes = f"{run.num_nodes}x{run.world_size // run.num_nodes}" if run.world_size else ""
    cells = [run.path.name, run.status, run.backend, nodes, str(run.step), best(run), _age(time.time() - run.began)]
    return [shown(cell) for cell in cells]


def _best_name(run: RunState, metric: str) -> str:
    """Return the metric to show: `metric`, else the loss of the validation, else any other metric of it, else the first one."""

    def by_value(name: str) -> tuple[bool | str, ...]:
        return name != metric, name != "val_loss", not name.startswith("val_"), name != "loss", name

    return min(run.best, key=by_value, default="")


def _age(seconds: float) -> str:
    """Return `12 s`, `5 min`, `3 h` or `4 d`."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _lines_of(run: RunState, width: int) -> list[str]:
    """Return the facts about a run in lines of at most `width` columns, apart from long paths."""
    where = f" on {run.host}" if run.host and not run.is_over else ""
    ranks = ", ".join(map(str, run.ranks)) or "none yet"
    facts = {
        "part": run.part_of and f"{run.part_of}: node 0 has the metrics, the checkpoints and the events of all nodes",
        "status": run.status + where,
        "backend": run.backend,
        "processes": f"{run.world_size} on {run.num_nodes} node{'s' * (run.num_nodes > 1)}" if run.world_size else "",
        "logs": f"rank {ranks}, in {run.path / 'logs'}" if run.part_of else "",
        "step": f"{run.step}, when this node last saved or ended" if run.part_of else f"{run.step}, epoch {run.epoch}",
        "best": ", ".join(f"{name} {number(value)}" for name, value in run.best.items()),
        "checkpoint": run.checkpoint or ("" if run.part_of else "none"),
        "restarts": str(run.restarts) if run.restarts else "",
        "began": f"{duration(time.time() - run.began)} ago",
        "changed": f"{duration(time.time() - run.changed)} ago",
        "error": run.error or "",
    }
    lines = [line for name, value in facts.items() if value for line in _wrapped(name, value, width)]
    return [shown(str(run.path)), *lines]


def _wrapped(name: str, value: str, width: int) -> list[str]:
    return textwrap.wrap(
        shown(value), width, initial_indent=f"  {name}".ljust(_NAME), subsequent_indent=" " * _NAME, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _follow(path: Path) -> None:
    """Print new rows and events of a run, in the order of their times, until it has ended."""
    run = RunDirectory(path)
    begin, rows = run.events_size(), _size(run.metrics)
    while True:
        is_over = read_state_of(path).is_over  # read before the lines, so that none is missed
        found, rows = _rows(run.metrics, rows)
        end = run.events_size()
        found += [
            (event["time"], _event_line(event)) for event in run.read_events(begin, end) if event["event"] in _SHOWN
        ]
        begin = end
        for _, line in sorted(found):
            print(shown(line), flush=True)
        if is_over:
            break
        time.sleep(_LOOK_EVERY_S)
    state = read_state_of(path)
    print(shown(f"{state.status} at step {state.step}" + (f": {state.error}" if state.error else "")), flush=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _rows(path: Path, begin: int) -> tuple[list[tuple[float, str]], int]:
    """Return (time, text) of the complete lines of metrics.jsonl from byte `begin` on, and where the next line begins."""
    begin = begin if begin <= _size(path) else 0  # a resume removes what came after its checkpoint
    data = b""
    with contextlib.suppress(FileNotFoundError), open_regular(path) as file:
        file.seek(begin)
        data = file.read(_READ_BYTES)
    whole = data[: data.rfind(b"\n") + 1]
    found: list[tuple[float, str]] = []
    for line in whole.splitlines():
        with contextlib.suppress(ValueError):  # the rest of a line that was removed
            check_kinds(row := parse_json(line), _ROW)
            if row.keys() >= {"time", "step", "epoch"}:
                found.append((row["time"], _row_line(row)))
    return found, begin + len(whole)


def _row_line(row: dict[str, Any]) -> str:
    metrics = {name: value for name, value in row.items() if name not in _NOT_METRICS}
    epoch = row["epoch"] + 1
    if row.get("split") == "val":
        return epoch_line({"epoch": epoch, **{f"val_{name}": value for name, value in metrics.items()}})
    position = {"step": row["step"], "epoch": epoch, "samples_per_second": row.get("samples_per_second")}
    return "  ".join(progress_parts({**position, "metrics": metrics}))


def _event_line(event: dict[str, Any]) -> str:
    detail = "  ".join(str(event[name]) for name in ("checkpoint", "path", "cause") if event.get(name))
    when = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    step = "" if event.get("step") is None else f" at step {event['step']}"
    return f"{when}  {event['event'].replace('_', ' ')}{step}  {detail}".rstrip()
