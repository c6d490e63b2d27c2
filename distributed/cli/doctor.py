"""`distributed doctor`: check what this machine can run, and name the commands that fix the rest."""

from __future__ import annotations

import contextlib
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
from typing import Annotated, Any

from typer import Option

from distributed.cli.checks import BAD, INFO, MISSING, OK, Check, show
from distributed.config.cores import num_cores
from distributed.config.gpus import visible_gpus
from distributed.config.memory import available_bytes
from distributed.config.registry import REGISTRY, BackendEntry, installed_version, missing_libraries
from distributed.errors import ConfigError
from distributed.runs.temporary import temporary_directory

PROBE_LIMIT_S = 120.0
_NODES = "The nodes of a job"  # heading of flags
# Code for each of two processes: join over gloo, all-reduce a tensor whose sum is known, print the time for 1 MB.
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


def doctor(
    num_nodes: Annotated[
        str | None,
        Option(metavar="N", help="number of nodes to check against each other", rich_help_panel=_NODES),
    ] = None,
    node_rank: Annotated[
        int | None, Option(metavar="N", help="the number of this node, from 0", rich_help_panel=_NODES)
    ] = None,
    master_addr: Annotated[str | None, Option(metavar="HOST", help="host of node 0", rich_help_panel=_NODES)] = None,
    master_port: Annotated[int | None, Option(metavar="PORT", help="port of node 0", rich_help_panel=_NODES)] = None,
    start_timeout: Annotated[
        float | None, Option(metavar="S", help="seconds all nodes may take to join", rich_help_panel=_NODES)
    ] = None,
) -> None:
    """Check this machine: versions, devices, backends, network, a two-process all-reduce.

    With --num-nodes, check the nodes of a job instead. Run the command on each of them. It checks which nodes can reach each
    other, versions, interfaces, clocks, and the bandwidth of an all-reduce between each pair.

    Exits with 0 if the default backends work, or if the nodes agree, and otherwise with 3.
    """
    given = {
        "num_nodes": num_nodes, "node_rank": node_rank, "master_addr": master_addr, "master_port": master_port,
        "start_timeout": start_timeout,
    }  # fmt: skip
    settings: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    if not settings:
        show(examine(), "the default backends work on this machine", "not usable")
        return
    if num_nodes is None or not num_nodes.isdigit() or int(num_nodes) < 2:
        what = "" if num_nodes is None else f", not with --num-nodes {num_nodes}"
        raise ConfigError(
            f"doctor compares the nodes of a job with --num-nodes 2 or more{what}: give their number, or drop the other flags"
        )
    settings["num_nodes"] = int(num_nodes)
    from distributed.cli.doctor_nodes import examine_nodes

    show(examine_nodes(settings), "the nodes agree", "wrong")


def examine() -> Iterator[Check]:
    """Yield the result of every check, the quick ones first. Works without torch."""
    yield Check("python", OK, f"{platform.python_version()} at {sys.executable}")
    yield _library("distributed-trainer", needed=False)
    yield _library("numpy", needed=True)
    yield Check("machine", OK, f"{num_cores()} cores, {_memory()}")
    gpus = visible_gpus()
    yield Check("GPUs", INFO, f"{gpus} visible" if gpus else "none: runs use CPU processes over gloo")
    for entry in REGISTRY.values():
        yield check_backend(entry, is_default=entry.is_default)
    yield check_dask()
    yield check_port()
    yield check_run_directory(Path("runs"))
    if importlib.util.find_spec("torch") is None:
        yield Check("all-reduce", BAD, "not tried: torch is not installed")
    else:
        yield check_all_reduce()


def check_backend(entry: BackendEntry, is_default: bool) -> Check:
    """Check that the libraries of a backend are installed; otherwise name the command that installs them."""
    absent = missing_libraries(entry)
    if absent:
        return Check(entry.name, BAD if is_default else MISSING, f"no {', '.join(absent)}: run {entry.install}")
    if entry.compiled is not None and (reason := _load_error(entry.compiled)):
        return Check(
            entry.name,
            BAD if is_default else MISSING,
            f"{entry.compiled} does not load ({reason}): run {entry.install}",
        )
    versions = ", ".join(f"{name} {installed_version(name) or '(version unknown)'}" for name in entry.requires)
    return Check(entry.name, OK, f"usable with {versions}")


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
    version = installed_version(name)
    if version is not None:
        return Check(name, OK, version)
    if needed:
        return Check(name, BAD, f"not installed: run pip install {name}")
    return Check(name, INFO, "used from a source tree, not installed")


def _memory() -> str:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return f"{total / 2**30:.1f} GiB memory, {(available_bytes() or 0) / 2**30:.1f} GiB free"
