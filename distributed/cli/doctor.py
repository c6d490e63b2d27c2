"""`distributed doctor`: check what this machine can run, and name the commands that fix the rest."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from distributed.config.gpus import visible_gpus
from distributed.config.registry import REGISTRY, BackendRow, missing_libraries
from distributed.runs.temporary import temporary_directory

OK, BAD, MISSING, INFO = "ok", "bad", "missing", "info"
PROBE_LIMIT_S = 120.0
# Run by each of two processes: join over gloo, add up a tensor whose sum is known, print the time for 1 MB.
_PROBE = """
import datetime, os, sys, time
import torch
import torch.distributed as dist
rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group(
    "gloo", init_method="file://" + store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
times = []
for _ in range(11):
    tensor = torch.full((262144,), float(rank + 1))
    begin = time.perf_counter()
    dist.all_reduce(tensor)
    times.append(time.perf_counter() - begin)
    assert tensor.eq(3.0).all(), "all-reduce gave a wrong sum"
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(sorted(times)[5])
"""


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the result. `BAD` prevents the default backends from working; `MISSING` is optional."""

    subject: str
    status: str
    detail: str


def doctor() -> None:
    """Check this machine: versions, devices, backends, network, a two-process all-reduce.

    Exits with 0 when the default backends work, with 3 otherwise.
    """
    import typer

    checks = []
    for check in examine():
        checks.append(check)
        if not sys.stdout.isatty():
            print(f"{check.status:<8}{check.subject:<20}{check.detail}", flush=True)
    if sys.stdout.isatty():
        _show_table(checks)
    bad = [check.subject for check in checks if check.status == BAD]
    print(f"not usable: {', '.join(bad)}" if bad else "the default backends work on this machine")
    if bad:
        raise typer.Exit(3)


def examine() -> Iterator[Check]:
    """Yield the result of every check, the quick ones first. Works without torch."""
    yield Check("python", OK, f"{platform.python_version()} at {sys.executable}")
    yield _library("distributed-trainer", needed=False)
    yield _library("numpy", needed=True)
    yield Check("machine", OK, f"{len(os.sched_getaffinity(0))} cores, {_memory()}")
    gpus = visible_gpus()
    yield Check("GPUs", INFO, f"{gpus} visible" if gpus else "none: runs use CPU processes over gloo")
    for row in REGISTRY.values():
        yield check_backend(row, is_default=row.is_default)
    yield check_dask()
    yield check_port()
    yield check_run_directory(Path("runs"))
    if importlib.util.find_spec("torch") is None:
        yield Check("all-reduce", BAD, "not tried: torch is not installed")
    else:
        yield check_all_reduce()


def check_backend(row: BackendRow, is_default: bool) -> Check:
    """Check that the libraries of a backend are installed; otherwise name the command that installs them."""
    absent = missing_libraries(row)
    if absent:
        return Check(row.name, BAD if is_default else MISSING, f"no {', '.join(absent)}: run {row.install}")
    if row.compiled is not None and (reason := _load_error(row.compiled)):
        return Check(
            row.name, BAD if is_default else MISSING, f"{row.compiled} does not load ({reason}): run {row.install}"
        )
    versions = ", ".join(f"{name} {_version(name) or '(version unknown)'}" for name in row.requires)
    return Check(row.name, OK, f"usable with {versions}")


def _load_error(module: str) -> str | None:
    """Import `module` in a separate process. Return the last line of its error, or None if it loads."""
    command = [sys.executable, "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"not finished after {PROBE_LIMIT_S:g} s"
    return (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1] if done.returncode else None


def check_dask() -> Check:
    """Check that Dask's project `distributed` is not installed. Its package has the same name as ours; each
    overwrites the other."""
    try:
        # the version of Dask's project; ours is called distributed-trainer
        version = importlib.metadata.version("distributed")
    except importlib.metadata.PackageNotFoundError:
        return Check("Dask", OK, "Dask's package 'distributed' is not in this environment")
    cure = "pip uninstall distributed, then install distributed-trainer again"
    return Check("Dask", BAD, f"Dask's package 'distributed' {version} overwrites this one: {cure}")


def check_port() -> Check:
    """Check that this process can listen on a free port of the loopback interface and connect to it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            socket.create_connection(("127.0.0.1", port), timeout=5).close()
    except OSError as error:
        return Check("loopback", BAD, f"no port of 127.0.0.1 can be used ({error}): check the firewall")
    return Check("loopback", OK, f"port {port} was free and answered")


def check_run_directory(path: Path) -> Check:
    """Check that a file can be written to `path`, or to its nearest existing parent."""
    nearest = next(directory for directory in (path, *path.resolve().parents) if directory.exists())
    try:
        with tempfile.TemporaryFile(dir=nearest) as file:
            file.write(b"\0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return Check("run directory", BAD, f"{nearest} cannot be written ({error.strerror}): use --run-dir DIR")
    return Check("run directory", OK, f"./{path} can be written, {shutil.disk_usage(nearest).free / 1e9:.1f} GB free")


def check_all_reduce() -> Check:
    """Run an all-reduce over gloo between two processes and check the sum."""
    begin = time.monotonic()
    with temporary_directory() as directory, contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_start_probe(rank, directory)) for rank in range(2)]
        try:
            results = [rank.communicate(timeout=begin + PROBE_LIMIT_S - time.monotonic()) for rank in ranks]
        except subprocess.TimeoutExpired:
            return Check("all-reduce", BAD, f"two gloo processes were not finished after {PROBE_LIMIT_S:g} s")
        finally:
            for rank in ranks:
                rank.kill()
    for number, (rank, (_, errors)) in enumerate(zip(ranks, results, strict=True)):
        if rank.returncode != 0:
            last = (errors.strip().splitlines() or ["no message"])[-1]
            return Check("all-reduce", BAD, f"rank {number} ended with {rank.returncode}: {last}")
    milliseconds = float(results[0][0]) * 1e3
    seconds = time.monotonic() - begin
    return Check("all-reduce", OK, f"two gloo processes: 1 MB in {milliseconds:.2f} ms, {seconds:.1f} s in all")


def _start_probe(rank: int, directory: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _PROBE, str(rank), str(directory / "store")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _library(name: str, needed: bool) -> Check:
    version = _version(name)
    if version is not None:
        return Check(name, OK, version)
    if needed:
        return Check(name, BAD, f"not installed: run pip install {name}")
    return Check(name, INFO, "used from a source tree, not installed")


def _version(name: str) -> str | None:
    """Return the version of the distribution `name`, or of one that contains a module of that name (such as
    tensorflow-cpu)."""
    for distribution in (name, *importlib.metadata.packages_distributions().get(name, ())):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution)
    return None


def _memory() -> str:
    sizes = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        sizes[name] = int(rest.split()[0]) / 1024**2  # kB to GiB
    return f"{sizes['MemTotal']:.1f} GiB memory, {sizes['MemAvailable']:.1f} GiB free"


def _show_table(checks: list[Check]) -> None:
    from rich.console import Console
    from rich.table import Table

    colours = {OK: "green", BAD: "red", MISSING: "yellow", INFO: "cyan"}
    table = Table(box=None, pad_edge=False)
    for title in ("check", "", "detail"):
        table.add_column(title, overflow="fold")
    for check in checks:
        table.add_row(check.subject, f"[{colours[check.status]}]{check.status}[/]", _escaped(check.detail))
    Console().print(table)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
