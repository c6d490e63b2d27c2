"""Code inside a Ray worker: start one training process and supervise it until the launcher's last order.

The training needs a process of its own, because Ray calls a train function in a thread. In a thread signal handlers do
not work, a script cannot be `__main__`, and output goes through Ray's own logs.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from distributed.backends._ray.rendezvous import STREAMS, LauncherConnections, connect
from distributed.launching.listening import reachable_address
from distributed.launching.secret import VARIABLE
from distributed.runs.temporary import temporary_directory

_READ_S = 10.0  # time for the launcher to read the last output of a process


class Restart(RuntimeError):
    """Raised by the train function to make Ray start all workers again."""


def train(order: Mapping[str, Any]) -> None:
    """Train function for Ray Train. `order` contains the address of the launcher and the request of the process."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    work(order, rank, lambda metrics: _report(metrics, rank))


def _report(metrics: Mapping[str, Any], rank: int) -> None:
    """Report the metrics of an epoch to Ray Train. A collective: every rank calls it.

    Ray stores metrics only together with a checkpoint. Rank 0 therefore reports a checkpoint that holds only the
    metrics; the real checkpoints are in the run directory.
    """
    import ray.train

    if rank:
        ray.train.report(dict(metrics))
        return
    with temporary_directory() as temporary:
        (temporary / "metrics.json").write_text(json.dumps(metrics))
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(str(temporary)))


def work(order: Mapping[str, Any], rank: int, report: Callable[[Mapping[str, Any]], None] | None = None) -> None:
    """Run the process of rank `rank` until it ends. Raises Restart if the launcher wants all processes to start again.

    Args:
        order: address of the launcher, and the request of the process.
        rank: rank of the process.
        report: called with the metrics of each epoch, in a thread of its own, because it may wait for other ranks.
    """
    import ray

    hello = {
        "rank": rank, "node": ray.get_runtime_context().get_node_id(), "host": socket.gethostname(),
        "address": reachable_address(order["address"]), "port": _free_port(),
        "gpus": ray.get_runtime_context().get_accelerator_ids().get("GPU", []),
        "sees_run": Path(order["cwd"], order["run_dir"], ".lock").exists(),
    }  # fmt: skip
    launcher = connect(order["address"], order["port"], order["token"], hello)
    orders = launcher.read()
    start = next(orders, {"op": "end", "restart": False})
    if start["op"] != "start":
        return
    process = _start(order, start, [launcher.sockets[kind] for kind in STREAMS])
    verdict = _Orders(process)
    threads = [threading.Thread(target=verdict.listen, args=(orders,), daemon=True)]
    if report is not None:
        threads.append(threading.Thread(target=verdict.pass_on, args=(report,), daemon=True))
    for thread in threads:
        thread.start()
    _report_end(launcher, process.wait())
    for thread in threads:
        thread.join()
    for each in launcher.sockets.values():
        each.close()
    if verdict.is_restart:
        raise Restart(f"rank {rank} starts again")


def _report_end(launcher: LauncherConnections, status: int) -> None:
    """Report how the process ended, after the launcher has read all of its output. Messages on different connections
    may overtake each other."""
    for kind in STREAMS:
        launcher.sockets[kind].shutdown(
            socket.SHUT_WR
        )  # end of the stream, even if a child of the process still holds it
    for kind in STREAMS:
        launcher.sockets[kind].settimeout(_READ_S)
        with contextlib.suppress(OSError):
            launcher.sockets[kind].recv(1)  # the launcher closes a stream after reading it to the end
    launcher.send(status=status)


class _Orders:
    """Execute the launcher's orders until the last one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._metrics: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self.is_restart = False

    def listen(self, orders: Iterable[Mapping[str, Any]]) -> None:
        """Execute orders until the process is to end. A closed connection ends it too."""
        for order in orders:
            if order["op"] == "signal":
                self._process.send_signal(order["signum"])
            elif order["op"] == "kill":
                self._process.kill()
            elif order["op"] == "report":
                self._metrics.put(order["metrics"])
            elif order["op"] == "end":
                self.is_restart = order["restart"]
                break
        self._metrics.put(None)
        self._process.kill()

    def pass_on(self, report: Callable[[Mapping[str, Any]], None]) -> None:
        """Call `report` with the metrics that the launcher sends, until its last order."""
        while (metrics := self._metrics.get()) is not None:
            report(metrics)


def _start(order: Mapping[str, Any], start: Mapping[str, Any], streams: list[socket.socket]) -> subprocess.Popen[bytes]:
    """Start the process. It inherits `streams` and reads the rest from its standard input."""
    request, fds = dict(order["request"]), [stream.fileno() for stream in streams]
    with tempfile.TemporaryFile() as payload:
        if order["payload"] is not None:
            payload.write(order["payload"])
            payload.flush()
            request["payload"] = f"/proc/self/fd/{payload.fileno()}"
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("process.py")), str(os.getpid())], cwd=order["cwd"], stdin=subprocess.PIPE,
            pass_fds=[*fds, payload.fileno()], start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    with process.stdin:
        environ = {
            **start["environ"],
            VARIABLE: order["secret"],
        }  # the key with which workers sign messages in their store
        process.stdin.write(json.dumps({"request": request, "fds": fds, **start, "environ": environ}).encode())
    return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
