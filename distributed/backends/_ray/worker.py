"""What runs inside a Ray worker: it starts one process of ours and stands by it until the launcher's verdict.

The training is a process of its own, as Ray calls a train function in a thread: there no signal handler works, a script
cannot be `__main__`, and what it prints goes through Ray's own logs.
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

from distributed.backends._ray.hub import STREAMS, Seat, connect
from distributed.launching.listening import reachable_address
from distributed.launching.secret import VARIABLE
from distributed.runs.temporary import temporary_directory

_READ_S = 10.0  # for the launcher to read a process' last output


class Restart(RuntimeError):
    """Raised out of the train function for Ray to start all workers again."""


def train(order: Mapping[str, Any]) -> None:
    """The train function of Ray Train. `order` says where the launcher is and what the process is to do."""
    import ray.train

    rank = ray.train.get_context().get_world_rank()
    work(order, rank, lambda metrics: _report(metrics, rank))


def _report(metrics: Mapping[str, Any], rank: int) -> None:
    """An epoch's metrics to Ray Train. Every rank calls it; Ray keeps metrics only with a checkpoint, so rank 0 gives it one,
    which holds the metrics alone: what can be trained on is in the run directory."""
    import ray.train

    if rank:
        ray.train.report(dict(metrics))
        return
    with temporary_directory() as temporary:
        (temporary / "metrics.json").write_text(json.dumps(metrics))
        ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(str(temporary)))


def work(order: Mapping[str, Any], rank: int, report: Callable[[Mapping[str, Any]], None] | None = None) -> None:
    """Run the process of rank `rank` to its end. Raises Restart where the launcher wants all of them again.

    `report` gets the metrics of each epoch, in a thread of its own: it may wait for the other ranks.
    """
    import ray

    hello = {
        "rank": rank, "node": ray.get_runtime_context().get_node_id(), "host": socket.gethostname(),
        "address": reachable_address(order["address"]), "port": _free_port(),
        "gpus": ray.get_runtime_context().get_accelerator_ids().get("GPU", []),
        "sees_run": Path(order["cwd"], order["run_dir"], ".lock").exists(),
    }  # fmt: skip
    seat = connect(order["address"], order["port"], order["token"], hello)
    orders = seat.read()
    start = next(orders, {"op": "end", "restart": False})
    if start["op"] != "start":
        return
    process = _start(order, start, [seat.sockets[kind] for kind in STREAMS])
    verdict = _Verdict(process)
    threads = [threading.Thread(target=verdict.listen, args=(orders,), daemon=True)]
    if report is not None:
        threads.append(threading.Thread(target=verdict.pass_on, args=(report,), daemon=True))
    for thread in threads:
        thread.start()
    _hand_in(seat, process.wait())
    for thread in threads:
        thread.join()
    for each in seat.sockets.values():
        each.close()
    if verdict.is_restart:
        raise Restart(f"rank {rank} starts again")


def _hand_in(seat: Seat, status: int) -> None:
    """Say how the process ended, once the launcher has read all of its output: connections overtake each other."""
    for kind in STREAMS:
        seat.sockets[kind].shutdown(socket.SHUT_WR)  # its end, also where a process of its own still holds it
    for kind in STREAMS:
        seat.sockets[kind].settimeout(_READ_S)
        with contextlib.suppress(OSError):
            seat.sockets[kind].recv(1)  # the launcher closes what it has read to the end
    seat.send(status=status)


class _Verdict:
    """Carries out the launcher's orders until its last one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self._metrics: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self.is_restart = False

    def listen(self, orders: Iterable[Mapping[str, Any]]) -> None:
        """Until the process is to end. A launcher that has gone wants that too."""
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
        """Give `report` what the launcher sends of it, until its last order."""
        while (metrics := self._metrics.get()) is not None:
            report(metrics)


def _start(order: Mapping[str, Any], start: Mapping[str, Any], streams: list[socket.socket]) -> subprocess.Popen[bytes]:
    """The process, born with `streams` and told the rest on its standard input."""
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
        }  # with which the workers sign what they write into their store
        process.stdin.write(json.dumps({"request": request, "fds": fds, **start, "environ": environ}).encode())
    return process


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
