"""Run in a Ray worker: start one training process and supervise it until the launcher's last command.

Training needs a separate process, because Ray calls a train function in a thread. In a thread signal handlers do not
work, a script cannot be `__main__`, and output goes to Ray's own logs.
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
from distributed.backends._ray.reports import ProcessReporter
from distributed.config.registry import versions_of
from distributed.launching.heartbeat import Board
from distributed.launching.listening import reachable_address
from distributed.launching.nodes import Node, interface_environ, this_node
from distributed.launching.secret import VARIABLE
from distributed.runs.temporary import temporary_directory
from distributed.state import EpochMetrics

_READ_S = 10.0  # time for the launcher to read the last output of a process


class Restart(RuntimeError):
    """Raised by `work` if the launcher wants all processes to start again.

    Attributes:
        silent: the nodes that do not answer the launcher, by their Ray ids, with the ranks of this attempt there.
    """

    def __init__(self, text: str, silent: Mapping[str, list[int]] | None = None) -> None:
        super().__init__(text, silent)  # all arguments, because Ray pickles the error
        self.silent = dict(silent or {})

    def __str__(self) -> str:
        return str(self.args[0])


def train(worker_config: Mapping[str, Any]) -> None:
    """Train, as the train function of Ray Train. `worker_config` has the address of the launcher and the request for the process.

    If the launcher wants all processes to start again, the Ray workers stay and start new ones, because Ray needs many seconds to
    replace its workers. If a Ray worker itself has ended, the others wait here for it, and Ray replaces all of them.
    """
    import ray.train

    context = ray.train.get_context()
    rank = context.get_world_rank()
    while True:
        try:
            return work(worker_config, rank, context.get_world_size(), lambda metrics: _report(metrics, rank))
        except Restart:
            continue


def _report(metrics: EpochMetrics, rank: int) -> None:
    """Report the metrics of an epoch to Ray Train. A collective: every rank calls it.

    Workaround (Ray 2.60, ray-project/ray#51204; may go when Ray Train stores metrics that come without a checkpoint):
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


def work(
    worker_config: Mapping[str, Any], rank: int, world_size: int, on_epoch: Callable[[EpochMetrics], None] | None = None
) -> None:
    """Run the process of rank `rank` until it ends. Raises Restart if the launcher wants all processes to start again.

    Args:
        worker_config: address of the launcher, and the request for the process.
        rank: rank of the process.
        world_size: number of processes that Ray has started together with this one.
        on_epoch: called with the metrics of each epoch, in a thread of its own, because it may wait for other ranks.
    """
    import ray

    hello = {
        "rank": rank, "world_size": world_size, "attempt": worker_config.get("attempt"),
        "node": ray.get_runtime_context().get_node_id(), "host": socket.gethostname(),
        "address": reachable_address(worker_config["address"]), "port": _free_port(),
        "gpus": ray.get_runtime_context().get_accelerator_ids().get("GPU", []),
        "addresses": this_node(worker_config["address"]).to_dict(),
        "sees_run": Path(worker_config["cwd"], worker_config["run_dir"], ".lock").exists(),
        "versions": versions_of(("distributed-trainer", *worker_config["request"]["libraries"])),
    }  # fmt: skip
    launcher = connect(worker_config["address"], worker_config["port"], worker_config["token"], hello)
    commands = launcher.read()
    start = next(commands, {"op": "end", "restart": False})
    if start["op"] != "start":  # the run has ended, or another worker was lost before all had connected
        if start["restart"]:
            raise Restart(f"rank {rank} starts again")
        return
    with temporary_directory() as temporary, contextlib.closing(Board(1)) as board:
        start["temporary"] = str(temporary)
        process = _start(worker_config, start, [launcher.sockets[kind] for kind in STREAMS], board)
        reporter = ProcessReporter(launcher, process, board)
        verdict = _Commands(process, reporter)
        threads = [threading.Thread(target=verdict.listen, args=(commands,), daemon=True)]
        if on_epoch is not None:
            threads.append(threading.Thread(target=verdict.pass_on, args=(on_epoch,), daemon=True))
        reporter.start()
        for thread in threads:
            thread.start()
        status = process.wait()
        last = reporter.end()
    with contextlib.suppress(OSError):  # the connection broke
        _report_end(launcher, status, last)
    for thread in threads:
        thread.join()
    for each in launcher.sockets.values():
        each.close()
    if verdict.is_restart:
        raise Restart(f"rank {rank} starts again", verdict.silent)


def _report_end(launcher: LauncherConnections, status: int, last: Mapping[str, Any]) -> None:
    """Report the exit status of the process and its last report, after the launcher has read all of its output. Without the
    wait the status could arrive first, because it is sent on another connection."""
    streams = [launcher.sockets[kind] for kind in STREAMS]
    for stream in streams:
        with contextlib.suppress(OSError):  # the stream broke, which does not break the connection for commands
            stream.shutdown(socket.SHUT_WR)  # ends the stream, even if a child of the process still has it open
    for stream in streams:
        stream.settimeout(_READ_S)
        with contextlib.suppress(OSError):
            stream.recv(1)  # the launcher closes a stream after reading it to the end
    launcher.send(status=status, **last)


class _Commands:
    """Execute the launcher's commands until the last one."""

    def __init__(self, process: subprocess.Popen[bytes], reporter: ProcessReporter) -> None:
        self._process, self._reporter = process, reporter
        self._metrics: queue.SimpleQueue[EpochMetrics | None] = queue.SimpleQueue()
        # True if the connection breaks without the command "end". The launcher refuses workers that connect after the run.
        self.is_restart = True
        self.silent: Mapping[str, list[int]] = {}  # see Restart

    def listen(self, commands: Iterable[Mapping[str, Any]]) -> None:
        """Execute commands until the command "end" arrives or the launcher closes the connection. Then kill the
        training process."""
        for command in commands:
            if command["op"] == "signal":
                self._process.send_signal(command["signum"])
            elif command["op"] == "kill":
                self._process.kill()
            elif command["op"] == "seen":
                self._reporter.go_on()
            elif command["op"] == "stacks":
                self._reporter.send_stacks(command["number"])
            elif command["op"] == "report":
                self._metrics.put(command["metrics"])
            elif command["op"] == "end":
                self.is_restart, self.silent = command["restart"], command.get("silent", {})
                break
        self._metrics.put(None)
        self._process.kill()

    def pass_on(self, on_epoch: Callable[[EpochMetrics], None]) -> None:
        """Call `on_epoch` with the metrics that the launcher sends, until the launcher's last command."""
        while (metrics := self._metrics.get()) is not None:
            on_epoch(metrics)


def _start(
    worker_config: Mapping[str, Any], start: Mapping[str, Any], streams: list[socket.socket], board: Board
) -> subprocess.Popen[bytes]:
    """Start the training process.

    It inherits `streams` and the files of `board`, and reads everything else from its standard input.
    """
    # Put the numbers of nodes and processes of this attempt into the request, in place of those that were asked for.
    request, fds = {**worker_config["request"], **start["processes"]}, [stream.fileno() for stream in streams]
    with tempfile.TemporaryFile() as payload:
        if worker_config["payload"] is not None:
            payload.write(worker_config["payload"])
            payload.flush()
            request["payload"] = f"/proc/self/fd/{payload.fileno()}"
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("process.py")), str(os.getpid())],
            cwd=_working_dir(worker_config["cwd"]), stdin=subprocess.PIPE, pass_fds=[*fds, payload.fileno(), *board.files],
            start_new_session=True,
        )  # fmt: skip
    assert process.stdin is not None
    with process.stdin:
        environ = {
            **interface_environ([Node.of(each) for each in start["nodes"]], start["node_rank"]),
            **start["environ"],
            VARIABLE: worker_config["secret"],
        }  # the key with which workers sign messages in their store
        message = {"request": request, "fds": fds, "board": board.files, **start, "environ": environ}
        process.stdin.write(json.dumps(message).encode())
    return process


def _working_dir(of_launcher: str) -> str:
    """Return the directory of the training process: that of the launcher, or this node's copy if a job of Ray has uploaded it
    and the copies have different paths."""
    import ray

    is_uploaded = ray.get_runtime_context().runtime_env.get("working_dir") is not None
    return str(Path.cwd()) if is_uploaded and not Path(of_launcher).is_dir() else of_launcher


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
