"""The fork server: forks the agent, imports the framework once, then forks every worker that the agent asks for.

The fork server is the launcher process. It stays single-threaded, so that its children start from a clean state. It is the parent
of the agent and of all workers: they share its memory, die with it, and only this process reaps them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import importlib
import importlib.abc
import json
import os
import pkgutil
import selectors
import signal
import socket
import sys
import tempfile
import time
from typing import Any

from distributed.checkpoints.mirror import UPLOAD_FAILED
from distributed.config.registry import backend_entry
from distributed.errors import TrainingError
from distributed.launching.forking import fork, shared_imports
from distributed.launching.heartbeat import Board
from distributed.launching.output import display_of
from distributed.launching.request import LaunchRequest
from distributed.launching.script import check_script
from distributed.launching.stopping import Signals, Stop
from distributed.launching.variables import crowding, set_missing, set_thread_variables
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import STOP_SIGNALS
from distributed.runs.remote import push_at_end, upload_rest
from distributed.runs.shared_memory import MEMORY
from distributed.runs.temporary import memory_of, release, remove_leftovers

_AGENT_GRACE_S = 10.0  # time for the agent to print and exit once every worker has ended
_JOINING_GRACE_S = 1.0  # time for the agent to exit if no worker has been started
_MESSAGE_BYTES = 256 * 1024


def launch(request: LaunchRequest) -> int:
    """Run the workers of `request` with the launcher that it names, until they have ended. Return the exit code.

    The caller must have a single thread. Raises ConfigError or ResourceError for mistakes that can be found before a framework
    is imported.
    """
    remove_leftovers(tempfile.gettempdir())
    remove_leftovers(MEMORY)  # snapshots of launches that were killed
    run = RunDirectory(request.run_dir) if request.run_dir and request.node_rank == 0 else None
    begin = 0 if run is None else run.events_size()
    try:
        code: int = importlib.import_module(request.launcher).serve(request)
    finally:
        if run is not None:
            # Does nothing after a refused launch, because the running launch owns the snapshots.
            release(memory_of(run.path))
    return code if run is None else _copied(run, code, begin)


def _copied(run: RunDirectory, code: int, begin: int) -> int:
    """Complete the copies in object storage, if there are any, of a run that ended with `code`. Return the exit code.

    `begin` is the size that events.jsonl had before this launch.
    """
    problems = [push_at_end(run.path)]
    failure = run.last_failure(begin) if code else None
    if failure is None or UPLOAD_FAILED not in failure["cause"]:  # otherwise the workers have tried it a moment ago
        problems.append(upload_rest(run.path) if code else "")
    for problem in filter(None, problems):
        sys.stderr.write(f"error: {problem}\n")
    return code or (TrainingError.exit_code if any(problems) else 0)


def serve(request: LaunchRequest) -> int:
    """Run the job of `request` from this single-threaded process. Return the exit code."""
    run = RunDirectory(request.run_dir)
    _check(request, run)
    _show_start(request)
    set_thread_variables(request.nproc_per_node)
    # Workaround (torch 2.13, pytorch/pytorch#135712; may go when restarts have been tried without it on a torch that
    # has pytorch/pytorch#135957): with a store that torch shares between attempts, a restart can read stale addresses.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    set_missing(request.launcher_environ)
    with Signals() as signals:
        with shared_imports():
            importlib.import_module("torch")  # the agent and the workers inherit it
            server, side = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            board = Board(request.nproc_per_node)  # the agent and the workers inherit it
            agent = fork(lambda: _agent(request, side, server, signals, board))
            side.close()
            _import_for_workers(request, signals, agent)
        return ForkServer(request, server, agent, signals, board).serve()


def _check(request: LaunchRequest, run: RunDirectory) -> None:
    if request.script is not None and request.payload is None:  # with a payload, the script is only a name in argv
        check_script(request.script)
    if request.node_rank == 0:  # the other nodes write into the run directory after they have joined node 0
        run.check(resume=request.resume)
        run.lock()


def _show_start(request: LaunchRequest) -> None:
    """Show the lines about the start, before the first import that takes long."""
    display = display_of(request)
    if request.started_lines:
        display.handle({"kind": "started", "lines": list(request.started_lines)})
    if text := crowding(request.nproc_per_node):
        display.handle({"kind": "warning", "text": text})


def _import_for_workers(request: LaunchRequest, signals: Signals, agent: int) -> None:
    """Import what all workers need, until a stop signal arrives or the agent ends."""
    watch = _Watch(signals, agent)
    sys.meta_path.insert(0, watch)
    try:
        for name in request.preload:
            importlib.import_module(name)
        if request.warm_up:
            pkgutil.resolve_name(request.warm_up)(request)
    except _Stopped:
        pass
    finally:
        sys.meta_path.remove(watch)
        signals.unread(watch.taken)


class _Stopped(BaseException):
    """End the imports of the launcher."""


class _Watch(importlib.abc.MetaPathFinder):
    """Raise `_Stopped` at the next import after a stop signal or the end of the agent, because the imports take seconds.

    A SIGCHLD does not always mean that the agent has ended, because imported libraries may start programs of their own.
    """

    def __init__(self, signals: Signals, agent: int) -> None:
        self._signals, self._agent = signals, agent
        self.taken: list[int] = []  # signals that arrived so far

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        if new := self._signals.read():
            self.taken += new
            is_stop = any(number in STOP_SIGNALS for number in new)
            if is_stop or os.waitid(os.P_PID, self._agent, os.WEXITED | os.WNOHANG | os.WNOWAIT):
                raise _Stopped


def _agent(request: LaunchRequest, side: socket.socket, server: socket.socket, signals: Signals, board: Board) -> int:
    server.close()
    signals.ignore()  # the launcher handles them
    gc.enable()
    from distributed.launching.agent import run_agent

    return run_agent(request, side, board)


class ForkServer:
    """The loop of the launcher process. It handles commands of the agent, signals, and the ends of its children."""

    def __init__(
        self, request: LaunchRequest, channel: socket.socket, agent: int, signals: Signals, board: Board
    ) -> None:
        self._board = board
        self._request, self._channel, self._agent, self._signals = request, channel, agent, signals
        self._workers: dict[int, int] = {}  # process id -> local rank
        self._num_begun = 0  # number of workers started in all attempts
        self._num_to_begin = 0  # number of workers of this attempt that have not started
        self._stop = Stop(request.timeout_s)
        self._code: int | None = None  # the exit code of the run, from the agent
        self._agent_status: int | None = None
        self._agent_deadline: float | None = None

    def serve(self) -> int:
        """Serve until the agent has ended and no worker is left. Return the exit code of the run."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while self._agent_status is None:
                ready = [key.fileobj for key, _ in selector.select(self._patience())]
                # Handle signals before the agent's commands, because no worker may start after a stop signal.
                for number in self._signals.read():
                    self._take_signal(number)
                if self._channel in ready and not self._take_order():
                    selector.unregister(self._channel)  # the agent closed its end; a SIGCHLD follows
                self._reap()
                self._run_out_of_patience()
        self._read_rest_of_channel()
        self._kill_workers()
        while self._workers:
            self._reap(block=True)
        return self._exit_code()

    def _read_rest_of_channel(self) -> None:
        """Read the messages that the agent sent right before it ended, for the exit code in them."""
        self._channel.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while data := self._channel.recv(_MESSAGE_BYTES):
                command = json.loads(data)
                if command["op"] == "done":
                    self._code = command["code"]

    def _exit_code(self) -> int:
        if self._code is not None:
            return self._code
        if self._stop.signum:
            return self._stop.exit_code
        status = self._agent_status or 0
        how = f"was killed by signal {-status}" if status < 0 else f"ended with code {status}"
        sys.stderr.write(f"error: the agent of this run (process {self._agent}) {how}: all workers were stopped\n")
        return 1

    # commands of the agent

    def _take_order(self) -> bool:
        """Carry out one message of the agent. Return False if it has closed its end."""
        try:
            data, fds, _, _ = socket.recv_fds(self._channel, _MESSAGE_BYTES, 3)
        except ConnectionError:  # the agent was killed before it read all messages
            return False
        if not data:
            return False
        command = json.loads(data)
        if command["op"] == "fork":
            self._start_worker(command, fds)
        elif command["op"] == "warm up":
            self._warm_up(command["backend"])
        elif command["op"] == "kill":
            self._kill_workers()
        elif command["op"] == "signal" and not self._stop.signum:
            self._signal_workers(command["signum"])
        elif command["op"] == "done":
            self._code = command["code"]
            self._agent_deadline = time.monotonic() + _AGENT_GRACE_S
        return True

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(OSError):  # the agent has ended; `_reap` handles that
            self._channel.send(json.dumps(message).encode())

    def _start_worker(self, command: dict[str, Any], fds: list[int]) -> None:
        if self._stop.signum:  # no worker may start after a stop signal
            self._send(op="exit", local_rank=command["local_rank"], status=-self._stop.signum, time=time.time())
        else:
            pid = fork(lambda: self._worker(command, fds))
            with contextlib.suppress(OSError):  # the child does the same; the first one succeeds
                os.setpgid(pid, pid)
            self._workers[pid] = command["local_rank"]
            self._num_begun += 1
            self._num_to_begin = command["local_world_size"] - command["local_rank"] - 1
        for fd in fds:
            os.close(fd)

    def _warm_up(self, backend: str) -> None:
        """Import what the workers of a restart need for a backend that their script has chosen.

        The workers train during this import, which takes seconds. If a worker ends, the agent is told immediately. Otherwise the
        agent would only know of the workers that then lose a connection. Commands of the agent wait until the import is done.
        """
        entry = backend_entry(backend)
        if self._stop.signum:
            return
        wanted = dataclasses.replace(self._request, preload=entry.preload, warm_up=entry.warm_up)
        before = signal.signal(signal.SIGCHLD, lambda *_: self._reap_workers())
        try:
            self._reap_workers()
            _import_for_workers(wanted, self._signals, self._agent)
        finally:
            signal.signal(signal.SIGCHLD, before)
        gc.freeze()

    def _worker(self, command: dict[str, Any], fds: list[int]) -> int:
        os.setpgid(0, 0)  # so that the terminal's Ctrl-C reaches the launcher only
        self._signals.restore()
        self._channel.close()
        # Only the launcher may hold these descriptors: when they close, the caller sees that the launcher has ended.
        for fd in (self._request.epochs_fd, self._request.bar_fd, self._request.run_dir_fd):
            if fd is not None:
                os.close(fd)
        gc.enable()
        from distributed.launching.worker import run_worker

        # The nodes have agreed on these.
        agreed = {name: command[name] for name in ("run_dir", "resume", "node_rank")}
        self._board.join(command["local_rank"])
        return run_worker(dataclasses.replace(self._request, **agreed), command, fds)

    # ends of children

    def _reap(self, *, block: bool = False) -> None:
        """Collect the children that have ended, and tell the agent which workers have ended. With `block`, wait for all of them."""
        while self._workers or self._agent_status is None:
            try:
                pid, raw = os.waitpid(-1, 0 if block else os.WNOHANG)
            except ChildProcessError:
                self._workers.clear()
                return
            if pid == 0:
                return
            status = os.waitstatus_to_exitcode(raw)
            if pid == self._agent:
                self._agent_status = status
            else:
                self._report_end(pid, status)

    def _reap_workers(self) -> None:
        """Collect the workers that have ended, but no other children, because a library may wait for its own children."""
        for pid in list(self._workers):
            with contextlib.suppress(ChildProcessError):
                found, raw = os.waitpid(pid, os.WNOHANG)
                if found:
                    self._report_end(pid, os.waitstatus_to_exitcode(raw))

    def _report_end(self, pid: int, status: int) -> None:
        if (local_rank := self._workers.pop(pid, None)) is not None:
            self._send(op="exit", local_rank=local_rank, status=status, time=time.time())

    def _kill_workers(self) -> None:
        self._signal_workers(signal.SIGKILL)

    def _signal_workers(self, number: int) -> None:
        for pid in self._workers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # signals to the launcher

    def _take_signal(self, number: int) -> None:
        """Pass the first stop signal on to the workers, and tell the agent of stop signals. Ignore other signals."""
        if number not in STOP_SIGNALS:
            return
        is_starting = not self._num_begun or self._num_to_begin > 0
        if is_first := self._stop.add(number):
            # Until all workers have started, none has trained. There is nothing to save, so kill them: a normal exit takes long.
            self._signal_workers(signal.SIGKILL if is_starting else self._stop.signum)
        if is_first or number == signal.SIGINT:
            self._send(
                op="stop", signum=self._stop.signum, is_first=is_first, interrupts=self._stop.interrupts,
                is_starting=is_starting,
            )  # fmt: skip

    def _patience(self) -> float | None:
        """Return the seconds until the workers or the agent must be killed, or None if there is no such deadline."""
        ends = [self._agent_deadline] if self._agent_deadline is not None else []
        if self._stop.kill_at is not None and self._workers:
            ends.append(self._stop.kill_at)
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def _run_out_of_patience(self) -> None:
        now = time.monotonic()
        if self._stop.signum and not self._workers and self._agent_deadline is None:
            # An agent that waits for other nodes before its first worker does not read the signal.
            self._agent_deadline = now + (_AGENT_GRACE_S if self._num_begun else _JOINING_GRACE_S)
        if self._stop.is_due():
            self._kill_workers()
        if self._agent_deadline is not None and now >= self._agent_deadline and self._agent_status is None:
            os.kill(self._agent, signal.SIGKILL)
            self._agent_deadline = now + _AGENT_GRACE_S
