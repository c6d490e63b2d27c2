"""The agent: torch's elastic agent over workers that the launcher process forks. It runs in a process of its own."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError, RendezvousStateError
from torch.distributed.elastic.utils.store import barrier

from distributed.errors import ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.epochs import Epochs, write_row
from distributed.launching.listening import loopback_environ
from distributed.launching.nodes import Node, gloo_environ, this_node
from distributed.launching.output import WorkerOutput, display_of
from distributed.launching.rendezvous import StoreLostError, engine_rendezvous, foreign_content, rendezvous_of
from distributed.launching.request import LaunchRequest
from distributed.launching.secret import messages
from distributed.launching.verdicts import Verdict, Verdicts
from distributed.loggers.console import Display
from distributed.loggers.registry import end_elsewhere
from distributed.runs.directory import RunDirectory
from distributed.runs.summary import close_results
from distributed.runs.temporary import temporary_directory

_LOOK_EVERY_S = 1.0
_GRACE_S = 10.0  # for the other nodes to read the store before node 0 ends with it


class ForkAgent(SimpleElasticAgent):
    """Torch's agent loop (rendezvous, start, watch, restart) over workers that the launcher forks."""

    def __init__(
        self, spec: WorkerSpec, request: LaunchRequest, run: RunDirectory, channel: socket.socket, display: Display,
        directory: Path,
    ) -> None:  # fmt: skip
        super().__init__(spec, exit_barrier_timeout=request.timeout_s)
        self._directory = directory  # with mode 0700
        self._request, self._run, self._channel = request, run, channel
        self._display = display
        self.verdicts = Verdicts(request, run, display)
        epochs = Epochs(functools.partial(write_row, request.epochs_fd))
        self.output = WorkerOutput(run, display, channel, self.verdicts.add, epochs)
        self._master: tuple[str, int] = ("127.0.0.1", 0)
        self._of_engine = engine_rendezvous(request.rendezvous)
        self._nodes: list[Node] = []  # of this attempt; empty if there is only one
        self._next_look = 0.0  # when to ask whether another node gave up
        self._deadline: float | None = None  # for the workers of this node after another one gave up
        self._opened: Any = None  # what the rendezvous of this attempt returned on node 0

    # torch's hooks

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Number the ranks by `node_rank`, and agree on the port of node 0 at which the workers of this attempt join each other."""
        node, local = self._request.node_rank, spec.local_world_size
        world, store = store, messages(store, "distributed")
        self._nodes = self._learn_nodes(store)
        self._check_nodes(world)
        if node == 0:
            # With several nodes `master_port` is that of the nodes' store; the workers need another one.
            asked = self._request.master_port if self._request.num_nodes == 1 else None
            opened = self._open_of_engine()
            store.set("rendezvous", json.dumps([self._request.master_addr, asked or _free_port(), opened]))
        addr, port, self._opened = json.loads(store.get("rendezvous"))
        is_local = addr == "localhost" or self._request.num_nodes == 1
        self._master = ("127.0.0.1" if is_local else addr, port)
        world_size = group_world_size * local
        return [Worker(i, node * local + i, node * local + i, world_size, world_size) for i in range(local)]

    def _learn_nodes(self, store: Any) -> list[Node]:
        """Return what each node says of its addresses. Every node must call it.

        Raises RendezvousStateError if what stands in the store has another form.
        """
        if self._request.num_nodes == 1:
            return []
        store.set(f"node/{self._request.node_rank}", this_node(self._request.master_addr).to_json())
        contents = [store.get(f"node/{rank}") for rank in range(self._request.num_nodes)]
        try:
            return [Node.from_json(content) for content in contents]
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise foreign_content() from None

    def _check_nodes(self, store: Any) -> None:
        """Raise ResourceError on every node if the engine's workers on them could not reach each other."""
        if self._of_engine is None or not self._nodes:
            return
        try:
            self._of_engine.check(self._nodes)
        except ResourceError:
            with contextlib.suppress(RuntimeError):  # node 0 ends with the store that the others still read
                barrier(store, len(self._nodes), "distributed/refused", _GRACE_S)
            raise

    def _open_of_engine(self) -> Any:
        if self._of_engine is None:
            return None
        is_alone = self._request.num_nodes == 1
        return self._of_engine.open("127.0.0.1" if is_alone else self._request.master_addr, is_alone=is_alone)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = worker_group.spec.max_restarts - self._remaining_restarts
        self.verdicts.begin({worker.local_rank: worker.global_rank for worker in worker_group.workers}, attempt)
        for worker in worker_group.workers:
            self._start_worker(worker, worker_group, attempt)
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _start_worker(self, worker: Worker, group: WorkerGroup, attempt: int) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.output.attach(worker.local_rank, worker.global_rank, *(read for read, _ in pipes))
        order = {
            "op": "fork", "local_rank": worker.local_rank, "restart_count": attempt,
            "environ": self._environ(worker, group, attempt), "store": self._store_file(attempt),
        }  # fmt: skip
        socket.send_fds(self._channel, [json.dumps(order).encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)

    def _store_file(self, attempt: int) -> str | None:
        """Return the file with the store of this attempt's workers.

        Return None on several nodes, where the workers use a port of node 0.
        """
        return str(self._directory / f"store-{attempt}") if self._request.num_nodes == 1 else None

    def _environ(self, worker: Worker, group: WorkerGroup, attempt: int) -> dict[str, str]:
        error_file = self._run.logs / f"rank-{worker.global_rank}.error.json"
        error_file.unlink(missing_ok=True)
        found = WorkerEnvironment(
            worker.global_rank, worker.local_rank, worker.world_size, group.spec.local_world_size,
            self._request.node_rank, *self._master, attempt, "environment",
        )  # fmt: skip
        more = self._of_engine.environ(found, self._opened) if self._of_engine is not None else {}
        environ = found.to_torchrun_environ(
            num_nodes=self._request.num_nodes, max_restarts=group.spec.max_restarts,
            run_id=group.spec.rdzv_handler.get_run_id(), error_file=error_file,
        )  # fmt: skip
        return {**environ, **self._gloo_environ(), **more}

    def _gloo_environ(self) -> dict[str, str]:
        return gloo_environ(self._nodes, self._request.node_rank) if self._nodes else loopback_environ()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kill the workers immediately.

        Survivors of a failure have already saved what they can: they do that when the failure is agreed on.
        """
        if self.verdicts.is_any_at_work():
            self._channel.send(b'{"op": "kill"}')
        self.verdicts.wait_for_ends()

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        self._stop_workers(self._worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers.

        Wait up to `monitor_interval` for news, so that an end is seen immediately.
        """
        verdict = self.verdicts.judge(self._remaining_restarts)
        if verdict is Verdict.AT_WORK:
            self._end_after_another_node()
            return RunResult(WorkerState.HEALTHY)
        if verdict is Verdict.DONE:
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})
        if verdict is Verdict.OVER:
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    # nodes that end before the others

    def give_up(self) -> None:
        """Tell the other nodes that the workers of this node failed and are not restarted."""
        if self._nodes and not self.verdicts.is_done and not self.verdicts.stop_signal:
            with contextlib.suppress(RuntimeError, ValueError):  # node 0 has ended
                messages(self._store, "distributed").set("given-up", str(self._request.node_rank))

    def _end_after_another_node(self) -> None:
        """Raise RendezvousClosedError if another node gave up and the workers of this node have not ended `timeout_s` later.

        They may wait for workers of that node for as long as their engine's own timeout, which is half an hour for torch's gloo.
        """
        now = time.monotonic()
        if not self._nodes or self.verdicts.stop_signal or now < self._next_look:
            return
        self._next_look = now + _LOOK_EVERY_S
        if self._deadline is None and (rank := self._node_that_gave_up()) is not None:
            self._deadline = now + self._request.timeout_s
            limit = f"the workers of this node get {self._request.timeout_s:g} s (timeout_s) to end"
            text = f"node {rank} has failed, and its console and RUN/logs show why: {limit}"
            self._display.handle({"kind": "warning", "text": text})
        if self._deadline is not None and now > self._deadline:
            raise RendezvousClosedError

    def _node_that_gave_up(self) -> int | None:
        with contextlib.suppress(RuntimeError, ValueError):  # torch's loop handles a store that is lost
            store = messages(self._store, "distributed")
            return int(store.get("given-up")) if store.check(["given-up"]) else None
        return None


def run_agent(request: LaunchRequest, run: RunDirectory, channel: socket.socket) -> int:
    """Run the workers of this node to their end and show what happened.

    Return the exit code, which the launcher gets too.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    display = display_of(request)
    code = 1
    try:
        with temporary_directory() as directory:
            code = _run_to_the_end(request, run, channel, display, directory)
    except RendezvousClosedError:
        if request.node_rank == 0:
            close_results(run, code, "another node ended this run", end_elsewhere)
        display.close()
        display.handle(
            {"kind": "error", "text": "error: another node ended this run; its console and RUN/logs show why"}
        )
    except RendezvousStateError as error:
        display.close()
        text = (
            f"error: the nodes cannot continue with the store at {request.master_addr}:{request.master_port}: {error}"
        )
        display.handle({"kind": "error", "text": text})
    except StoreLostError:
        display.close()
        where = f"{request.master_addr}:{request.master_port}"
        text = f"error: node 0 has ended, or its store at {where} can no longer be reached: its console shows why"
        display.handle({"kind": "error", "text": text})
    except ResourceError as error:
        display.close()
        display.handle({"kind": "error", "text": f"error: {error}"})
        code = error.exit_code
    except RendezvousError as error:
        display.close()
        where = f"{request.master_addr}:{request.master_port}"
        text = f"error: the {request.num_nodes} nodes did not join at {where} within {request.start_timeout:g} s ({str(error) or 'some are missing'})"
        display.handle({"kind": "error", "text": text})
    finally:
        display.close()
        channel.send(json.dumps({"op": "done", "code": code}).encode())
    return code


def _run_to_the_end(
    request: LaunchRequest, run: RunDirectory, channel: socket.socket, display: Display, directory: Path
) -> int:
    handler = rendezvous_of(request)
    spec = WorkerSpec(
        role="default", local_world_size=request.nproc_per_node, rdzv_handler=handler,
        entrypoint=request.script or "job",
        max_restarts=request.max_restarts, monitor_interval=0.001,  # `_monitor_workers` waits by itself
    )  # fmt: skip
    agent = ForkAgent(spec, request, run, channel, display, directory)
    agent.output.start()
    try:
        agent.run()
        agent.give_up()
    finally:
        if request.num_nodes > 1:
            handler.shutdown()
    return agent.verdicts.finish()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
