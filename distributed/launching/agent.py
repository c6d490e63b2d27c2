"""The agent: torch's elastic agent over workers that the launcher process forks. It runs in a process of its own."""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import os
import socket
import threading
import time
import uuid
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from distributed.launcher import LaunchRequest
from distributed.launching.causes import Failure, root_cause, signal_name
from distributed.launching.output import Message, WorkerOutput
from distributed.loggers.console import Display
from distributed.run_dir import RunDirectory
from distributed.summary import close_results

# After the first sign of a failure: how long a better explanation is waited for. A lost connection is a consequence
# of something that another rank, or the kernel, is about to report.
_SETTLE_S = {0: 0.1, 1: 0.5, 2: 1.0}
_ORPHANED_STOP_S = 5.0  # for the others to end, once a rank died during a stop: no common save can come


@dataclasses.dataclass
class _Rank:
    """What is known of one worker."""

    worker: Worker
    report: Failure | None = None
    interrupted: int = 0  # the signal it saved for
    status: int | None = None  # exit code, or minus the signal; None while it runs
    ended: float = 0.0

    def failure(self) -> Failure | None:
        """How it failed, or None."""
        if self.interrupted:
            return None
        if self.report is not None:
            return self.report
        if self.status is None or self.status == 0:
            return None
        return self.left()

    def left(self) -> Failure:
        """Its end as a failure, also one with code 0 while others still needed it."""
        assert self.status is not None
        rank = self.worker.global_rank
        if self.status < 0:
            return Failure(rank, "signal", self.ended, signum=-self.status)
        return Failure(rank, "exit", self.ended, exit_code=self.status)


class ForkAgent(SimpleElasticAgent):
    """torch's agent loop (rendezvous, start, watch, restart) with our workers, verdicts and messages."""

    def __init__(
        self, spec: WorkerSpec, request: LaunchRequest, run: RunDirectory, channel: socket.socket, display: Display
    ) -> None:
        super().__init__(spec, exit_barrier_timeout=request.timeout_s)
        self._request, self._run, self._channel, self._display = request, run, channel, display
        self.output = WorkerOutput(run, display, channel, self._note)
        self._changed = threading.Condition()
        self._ranks: dict[int, _Rank] = {}
        self.stop_signal = 0
        self.cause: Failure | None = None
        self._master: tuple[str, int] = ("127.0.0.1", 0)

    # what comes from the launcher and the workers; called in the reading thread

    def _note(self, message: Message) -> None:
        with self._changed:
            if message["op"] == "stop":
                self._note_stop(message["signum"], message["count"])
            elif message["op"] == "exit":
                rank = self._ranks[message["local_rank"]]
                rank.status, rank.ended = message["status"], message["time"]
            else:
                self._note_report(message)
            self._changed.notify_all()

    def _note_stop(self, signum: int, count: int) -> None:
        self.stop_signal = signum
        if count == 1:
            self._display.handle({"kind": "notice", "text": f"{signal_name(signum)}: stopping after this step"})
        elif count == 2:
            self._display.handle({"kind": "notice", "text": "still stopping; a third Ctrl-C kills the workers"})
        elif count == 3 and signum == 2:
            self._display.handle({"kind": "warning", "text": "killing the workers, what was not saved is lost"})

    def _note_report(self, message: Message) -> None:
        for rank in self._ranks.values():
            if rank.worker.global_rank != message["rank"]:
                continue
            if message["kind"] == "interrupted":
                rank.interrupted = message["signum"]
            elif rank.report is None:
                kind = "error" if message["is_message_enough"] else "exception"
                rank.report = Failure(
                    message["rank"], kind, message["time"], message["type"], message["message"], message["traceback"],
                    message["exit_code"],
                )  # fmt: skip

    # torch's hooks

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Ranks follow `node_rank`, and the workers meet at node 0 on a port of this attempt alone."""
        node, local = self._request.node_rank, spec.local_world_size
        if node == 0:
            # With several nodes `master_port` is where the nodes meet; the workers need another one.
            asked = self._request.master_port if self._request.num_nodes == 1 else None
            store.set("distributed/meet", json.dumps([self._request.master_addr, asked or _free_port()]))
        addr, port = json.loads(store.get("distributed/meet"))
        self._master = ("127.0.0.1" if addr == "localhost" else addr, port)
        world_size = group_world_size * local
        return [Worker(i, node * local + i, node * local + i, world_size, world_size) for i in range(local)]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        with self._changed:
            self._ranks = {worker.local_rank: _Rank(worker) for worker in worker_group.workers}
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        if attempt:
            self._run.event("restarted", restart_count=attempt)
        for worker in worker_group.workers:
            self._start_worker(worker, worker_group, attempt)
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _start_worker(self, worker: Worker, group: WorkerGroup, attempt: int) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.output.attach(worker.local_rank, worker.global_rank, *(read for read, _ in pipes))
        order = {
            "op": "fork", "local_rank": worker.local_rank, "restart_count": attempt,
            "environ": self._environ(worker, group, attempt),
        }  # fmt: skip
        socket.send_fds(self._channel, [json.dumps(order).encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)

    def _environ(self, worker: Worker, group: WorkerGroup, attempt: int) -> dict[str, str]:
        """What torchrun gives to its workers."""
        error_file = self._run.logs / f"rank-{worker.global_rank}.error.json"
        error_file.unlink(missing_ok=True)
        return {
            "RANK": str(worker.global_rank),
            "LOCAL_RANK": str(worker.local_rank),
            "WORLD_SIZE": str(worker.world_size),
            "LOCAL_WORLD_SIZE": str(group.spec.local_world_size),
            "GROUP_RANK": str(self._request.node_rank),
            "GROUP_WORLD_SIZE": str(self._request.num_nodes),
            "ROLE_RANK": str(worker.role_rank),
            "ROLE_WORLD_SIZE": str(worker.role_world_size),
            "ROLE_NAME": group.spec.role,
            "MASTER_ADDR": self._master[0],
            "MASTER_PORT": str(self._master[1]),
            "TORCHELASTIC_RESTART_COUNT": str(attempt),
            "TORCHELASTIC_MAX_RESTARTS": str(group.spec.max_restarts),
            "TORCHELASTIC_RUN_ID": group.spec.rdzv_handler.get_run_id(),
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
            "TORCHELASTIC_ERROR_FILE": str(error_file.absolute()),
        }

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kill at once: they are wounded, and what can be saved has been saved by themselves."""
        with self._changed:
            if any(rank.status is None for rank in self._ranks.values()):
                self._channel.send(b'{"op": "kill"}')
            self._changed.wait_for(lambda: all(rank.status is not None for rank in self._ranks.values()))

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        self._stop_workers(self._worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """The state of the group. Waits up to `monitor_interval` for news, so that an end is seen at once."""
        with self._changed:
            if not self._is_news():
                self._changed.wait(self._request.monitor_interval)
            if not self._is_news():
                return RunResult(WorkerState.HEALTHY)
            if all(rank.status is not None and rank.failure() is None for rank in self._ranks.values()):
                return self._ended()
            self._settle()
            failures = [failure for rank in self._ranks.values() if (failure := rank.failure())]
            if all(failure.is_consequence for failure in failures):  # nobody failed: did somebody leave?
                failures += [rank.left() for rank in self._ranks.values() if rank.status == 0]
        return self._failed(root_cause(failures))

    def _is_news(self) -> bool:
        """Whether the group has ended or must be ended."""
        ranks = self._ranks.values()
        if all(rank.status is not None for rank in ranks):
            return True
        failed = [rank for rank in ranks if rank.failure() is not None]
        if self.stop_signal or any(rank.interrupted for rank in ranks):
            since = min((rank.ended for rank in failed if rank.status is not None), default=None)
            return since is not None and time.time() - since > _ORPHANED_STOP_S
        return bool(failed)

    def _ended(self) -> RunResult:
        interrupted = next((rank.interrupted for rank in self._ranks.values() if rank.interrupted), 0)
        if interrupted:
            self.stop_signal = self.stop_signal or interrupted
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        return RunResult(WorkerState.SUCCEEDED, {rank.worker.global_rank: None for rank in self._ranks.values()})

    def _settle(self) -> None:
        """Wait shortly for a better explanation than the first one, and for the failing rank's last words."""
        if self.stop_signal:
            return
        deadline = time.monotonic() + _SETTLE_S[2]
        while True:
            failures = [rank for rank in self._ranks.values() if rank.failure() is not None]
            weight = min(failure.weight for rank in failures if (failure := rank.failure()))
            is_over = all(rank.status is not None for rank in failures)
            if any(rank.status is not None and rank.status < 0 for rank in failures) and weight == 0:
                return
            limit = deadline - _SETTLE_S[2] + _SETTLE_S[weight] + (0.0 if is_over else 0.4)
            left = limit - time.monotonic()
            if left <= 0 or all(rank.status is not None for rank in self._ranks.values()):
                return
            self._changed.wait(left)

    def _failed(self, cause: Failure) -> RunResult:
        self.cause = cause
        if self.stop_signal or not self._may_restart(cause):
            self._remaining_restarts = 0
        if not self.stop_signal:
            detail = {"traceback": cause.traceback} if cause.kind == "exception" and cause.traceback else {}
            self._run.event("worker_failed", rank=cause.rank, cause=_in_words(cause), **detail)
        if self._remaining_restarts:
            attempt = self._request.max_restarts - self._remaining_restarts + 1
            text = f"{_in_words(cause)}: restarting ({attempt} of {self._request.max_restarts})"
            self._display.handle({"kind": "warning", "text": text})
        return RunResult(WorkerState.FAILED)

    def _may_restart(self, cause: Failure) -> bool:
        if cause.kind == "signal":
            return True
        if cause.kind == "exception" and cause.is_consequence and self._request.num_nodes > 1:
            return True  # the cause is on another node, which restarts
        return cause.kind == "exception" and self._request.restart_on_exception


def run_agent(request: LaunchRequest, run: RunDirectory, channel: socket.socket) -> int:
    """Run the workers of this node to their end and show what happened; returns the exit code, told to the launcher."""
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    display = Display(live=request.live, verbose=request.verbose)
    if request.started_lines:
        display.handle({"kind": "started", "lines": list(request.started_lines)})
    code = 1
    try:
        code = _run_to_the_end(request, run, channel, display)
    except RendezvousClosedError:
        display.close()
        display.handle({"kind": "error", "text": "error: another node ended this run; its screen and RUN/logs say why"})
    except RendezvousError as error:
        display.close()
        where = f"{request.master_addr}:{request.master_port}"
        text = f"error: the {request.num_nodes} nodes did not join at {where} within {request.start_timeout:g} s ({str(error) or 'some are missing'})"
        display.handle({"kind": "error", "text": text})
    finally:
        display.close()
        channel.send(json.dumps({"op": "done", "code": code}).encode())
    return code


def _run_to_the_end(request: LaunchRequest, run: RunDirectory, channel: socket.socket, display: Display) -> int:
    handler = _rendezvous_handler(request)
    spec = WorkerSpec(
        role="default", local_world_size=request.nproc_per_node, rdzv_handler=handler,
        entrypoint=request.script or "job",
        max_restarts=request.max_restarts, monitor_interval=0.001,  # _monitor_workers itself waits
    )  # fmt: skip
    agent = ForkAgent(spec, request, run, channel, display)
    agent.output.start()
    try:
        code = _exit_code(agent, agent.run())
    finally:
        if request.num_nodes > 1:
            handler.shutdown()
    if request.node_rank == 0:
        close_results(run, code, _in_words(agent.cause) if agent.cause is not None else None)
    _show_end(agent, display, code)
    return code


def _rendezvous_handler(request: LaunchRequest) -> DynamicRendezvousHandler:
    """c10d's rendezvous: hosted by this process on node 0, one node or many."""
    is_host = request.node_rank == 0
    if request.num_nodes == 1:
        endpoint = f"127.0.0.1:{_free_port()}"
    else:
        endpoint = f"{request.master_addr}:{request.master_port}"
    run_id = uuid.uuid4().hex if request.num_nodes == 1 else f"distributed-{request.master_port}"
    parameters = RendezvousParameters(
        "c10d",
        endpoint,
        run_id,
        request.num_nodes,
        request.num_nodes,
        is_host=str(is_host),
        read_timeout=min(60, int(request.start_timeout) + 1),
    )
    backend, store = create_backend(parameters)
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        run_id, store, backend, request.num_nodes, request.num_nodes,
        local_addr="127.0.0.1" if request.num_nodes == 1 else socket.gethostname(),
        timeout=RendezvousTimeout(join=datetime.timedelta(seconds=request.start_timeout)),
    )  # fmt: skip
    return handler


def _exit_code(agent: ForkAgent, result: RunResult | None) -> int:
    cause = agent.cause
    if agent.stop_signal and not (cause is not None and cause.kind == "error"):
        return 130 if agent.stop_signal == 2 else 143
    if result is not None and not result.is_failed():
        return 0
    return cause.exit_code if cause is not None and cause.kind == "error" else 1


def _show_end(agent: ForkAgent, display: Display, code: int) -> None:
    """The cause as the last thing on the screen."""
    display.close()
    cause = agent.cause
    if code in (0, 130, 143) or cause is None or agent._request.payload is not None:  # who called `fit` raises it
        return
    text = f"error: {cause}"
    if cause.kind == "signal":
        budget = agent._request.max_restarts
        text += f"; no restarts left of {budget}" if budget else "; max_restarts=0"
    if cause.traceback and cause.kind == "exception":
        text += f" (whole log: {agent._run.logs / f'rank-{cause.rank}.log'})\n{cause.traceback}"
    display.handle({"kind": "error", "text": text})


def _in_words(cause: Failure) -> str:
    if cause.is_consequence:
        return f"rank {cause.rank} lost the connection to another rank"
    return f"{cause}: {cause.message}" if cause.kind == "exception" and cause.message else str(cause)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
