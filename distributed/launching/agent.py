"""The agent: torch's elastic agent, for workers that the launcher process forks. The agent runs in a separate process."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import socket
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    SimpleElasticAgent,
    Worker,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)

from distributed.errors import DistributedError
from distributed.launching.causes import signal_name
from distributed.launching.elastic import WorkerCount
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.epochs import Epochs, write_line
from distributed.launching.fetched_logs import fetch_logs, send_logs
from distributed.launching.heartbeat import STACKS_SIGNAL, Board
from distributed.launching.listening import loopback_environ
from distributed.launching.node_link import NodesEndedError
from distributed.launching.node_server import LOST_AFTER_S
from distributed.launching.nodes import Node, interface_environ, names_of, numbered
from distributed.launching.output import WorkerOutput, display_of
from distributed.launching.progress_check import ProgressCheck
from distributed.launching.rendezvous import OneNode, engine_rendezvous, nodes_of, rendezvous_of
from distributed.launching.request import LaunchRequest
from distributed.launching.verdicts import Verdict, Verdicts, in_words
from distributed.loggers.console import Display
from distributed.loggers.registry import end_elsewhere
from distributed.runs.directory import RunDirectory
from distributed.runs.processes import REGROUP_SIGNAL
from distributed.runs.shared_memory import remove_shared_memory
from distributed.runs.summary import close_results, is_training
from distributed.runs.temporary import temporary_directory

_CAUSE_S = 3.0  # seconds to wait until another node reports the cause of a failure that is a consequence here


class ForkAgent(SimpleElasticAgent):
    """Torch's agent loop (rendezvous, start, watch, restart) over workers that the launcher forks."""

    def __init__(
        self, spec: WorkerSpec, request: LaunchRequest, run: RunDirectory, channel: socket.socket, display: Display,
        directory: Path, board: Board,
    ) -> None:  # fmt: skip
        super().__init__(spec, exit_barrier_timeout=request.timeout_s)
        self._directory = directory  # temporary, with mode 0700
        self._request, self._run, self._channel = request, run, channel
        self._display, self._board = display, board
        self._count = WorkerCount(request)
        self.verdicts = Verdicts(request, run, display, self._count)
        self.verdicts.node = request.node_rank if request.num_nodes > 1 else None
        epochs = Epochs(functools.partial(write_line, request.epochs_fd))
        self.output = WorkerOutput(run, display, channel, self._take, epochs)
        self._progress = ProgressCheck(
            request, run, display, board, self.verdicts, cast(OneNode, spec.rdzv_handler), self._ask_for_stacks, self._node_of
        )  # fmt: skip
        self.verdicts.find_hang = self._progress.find_late
        self._master: tuple[str, int] = ("127.0.0.1", 0)
        self._of_engine = engine_rendezvous(request.rendezvous)
        self._node_index, self._num_nodes = 0, 1  # this node's index among the nodes of this attempt, and their number
        self._rank_of: dict[int, int] = {}  # local rank -> rank, in this attempt
        self._world_size = 0  # number of workers of this attempt; while an attempt begins, still of the one before
        self._nodes: list[Node] = []  # nodes of this attempt; empty if there is only one
        self._names: dict[int, str] = {}  # host names by node rank, as last shown on the console
        self._rendezvous_of_nodes = cast(OneNode, spec.rdzv_handler)
        self._rendezvous_of_nodes.offer = self._offer
        self._rendezvous_of_nodes.is_stopped = lambda: bool(self.verdicts.stop_signal)
        self._ranks_before: list[int] = []  # the node ranks of the attempt before
        self._is_elastic = (request.min_nodes or request.num_nodes) < request.num_nodes  # whether nodes may come and go
        self._is_restart = False  # whether the next attempt is a restart after a failure
        self._is_regroup = False  # whether this attempt has other nodes than the one before
        self._rendezvous_of_nodes.failure = lambda: self.verdicts.failure
        self._rendezvous_of_nodes.has_regrouped = lambda: self.verdicts.has_regrouped
        self._opened: Any = None  # what `EngineRendezvous.open` returned on node 0 in this attempt

    def _take(self, message: Mapping[str, Any]) -> None:
        """Handle a message from the launcher or from a worker. May be called from any thread."""
        if message.get("kind") == "chose backend":
            self._channel.send(json.dumps({"op": "warm up", "backend": message["backend"]}).encode())
            return
        if message["op"] == "exit":
            log = functools.partial(self.output.log, self._rank_of[message["local_rank"]])
            self.verdicts.add_end(message, self._board, log)
            return
        self.verdicts.add(message)

    # methods that torch's SimpleElasticAgent calls

    def _assign_worker_ranks(
        self, store: Any, group_rank: int, group_world_size: int, spec: WorkerSpec
    ) -> list[Worker]:
        """Assign the ranks in the order of the node ranks, and read the value of `_offer` that node 0 sent for this round."""
        self._node_index, self._num_nodes = group_rank, group_world_size
        local = self._count.begin()
        try:
            begun = self._rendezvous_of_nodes.round
            self._nodes = nodes_of(begun)
            by_rank = numbered(dict(zip(begun.ranks, self._nodes, strict=True)))
            addr, port, self._opened = begun.offer
        except (ValueError, TypeError, AttributeError):
            raise NodesEndedError(
                "the answer of node 0 is not a valid message: another program answers at its address, check master_addr and master_port"
            ) from None
        if self._of_engine is not None and self._nodes:
            self._of_engine.check(by_rank)  # the same error on every node
        if self._is_restart and begun.has_lost:
            self._remaining_restarts += 1  # a restart after the loss of a node does not count
        self._is_regroup = self._is_elastic and (begun.has_lost or begun.ranks != self._ranks_before)
        self._is_restart, self._ranks_before = False, begun.ranks
        is_local = addr == "localhost" or self._request.num_nodes == 1
        self._master = ("127.0.0.1" if is_local else addr, port)
        world_size = group_world_size * local
        if self._request.node_rank == 0 and (
            world_size > self._world_size > 0 or (self._nodes and world_size < self._world_size)
        ):
            text = f"going on with {world_size} process{'es' * (world_size > 1)}"
            self._display.handle({"kind": "notice", "text": text})
        self._world_size = world_size
        names = {rank: node.name for rank, node in zip(begun.ranks, self._nodes, strict=True)} if self._nodes else {}
        if self._request.node_rank == 0 and names not in ({}, self._names):
            self._display.handle({"kind": "notice", "text": names_of(names)})
        self._names = names
        return [Worker(i, group_rank * local + i, group_rank * local + i, world_size, world_size) for i in range(local)]

    def _offer(self) -> list[Any]:
        """Return what node 0 sends to all nodes for the next round: master address, master port, and the engine's rendezvous."""
        # With several nodes, `NodeServer` listens at `master_port`, so the workers need another port.
        asked = self._request.master_port if self._request.num_nodes == 1 else None
        return [self._request.master_addr, asked or _free_port(), self._open_of_engine()]

    def _open_of_engine(self) -> Any:
        if self._of_engine is None:
            return None
        is_alone = self._request.num_nodes == 1
        return self._of_engine.open("127.0.0.1" if is_alone else self._request.master_addr, is_alone=is_alone)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        attempt = self._rendezvous_of_nodes.round.number - 1
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        remove_shared_memory(self._directory)  # of the attempt before
        self.verdicts.begin(ranks, attempt, dict.fromkeys(ranks, self._node_name()), is_regroup=self._is_regroup)
        self._board.clear()
        self._rank_of = ranks
        self._progress.begin(ranks)
        for worker in worker_group.workers:
            self._start_worker(worker, worker_group, attempt)
        return {worker.local_rank: worker.local_rank for worker in worker_group.workers}

    def _start_worker(self, worker: Worker, group: WorkerGroup, attempt: int) -> None:
        pipes = [os.pipe() for _ in range(3)]
        self.output.attach(worker.local_rank, worker.global_rank, *(read for read, _ in pipes))
        command = {
            "op": "fork", "local_rank": worker.local_rank, "local_world_size": len(group.workers), "restart_count": attempt,
            "environ": self._environ(worker, group, attempt), "store": self._store_file(attempt),
            "run_dir": self._request.run_dir, "resume": self._request.resume, "node_rank": self._request.node_rank,
            "temporary": str(self._directory),
        }  # fmt: skip
        socket.send_fds(self._channel, [json.dumps(command).encode()], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)

    def _store_file(self, attempt: int) -> str | None:
        """Return the file with the store of this attempt's workers.

        Return None with several nodes: the workers then use a store at a port of node 0.
        """
        return str(self._directory / f"store-{attempt}") if self._request.num_nodes == 1 else None

    def _environ(self, worker: Worker, group: WorkerGroup, attempt: int) -> dict[str, str]:
        error_file = self._run.logs / f"rank-{worker.global_rank}.error.json"
        error_file.unlink(missing_ok=True)
        found = WorkerEnvironment(
            worker.global_rank, worker.local_rank, worker.world_size, len(group.workers), self._node_index, *self._master,
            attempt, "environment",
        )  # fmt: skip
        more = self._of_engine.environ(found, self._opened) if self._of_engine is not None else {}
        environ = found.to_torchrun_environ(
            num_nodes=self._num_nodes, max_restarts=group.spec.max_restarts,
            run_id=group.spec.rdzv_handler.get_run_id(), error_file=error_file,
        )  # fmt: skip
        return {**environ, **self._interface_environ(), **more, **self.verdicts.environ}

    def _interface_environ(self) -> dict[str, str]:
        return interface_environ(self._nodes, self._node_index) if self._nodes else loopback_environ()

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """Kill the workers immediately.

        If all ranks agreed on a failure, the workers that survived it have already saved their state.
        """
        if self.verdicts.is_any_at_work():
            self._channel.send(b'{"op": "kill"}')
        self.verdicts.wait_for_ends()

    def _signal_workers(self, signum: int) -> None:
        self._channel.send(json.dumps({"op": "signal", "signum": signum}).encode())

    def _ask_for_stacks(self) -> None:
        self._signal_workers(STACKS_SIGNAL)

    def _shutdown(self, death_sig: Any = None, timeout: int = 30) -> None:
        self._stop_workers(self._worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Return the state of the workers.

        Wait up to `monitor_interval` for a message, so that the end of a worker is detected immediately.
        """
        verdict = self.verdicts.judge(self._remaining_restarts)
        if verdict is Verdict.AT_WORK:
            if self._rendezvous_of_nodes.is_regroup:
                self.verdicts.expect_regroup()
            self._end_with_another_node()
            self._let_new_ones_take_part()
            self._progress.look()
            return RunResult(WorkerState.HEALTHY)
        if verdict is Verdict.REGROUP:
            self._rendezvous_of_nodes.is_round_wanted = True
            return RunResult(WorkerState.HEALTHY)
        if verdict is Verdict.DONE:
            return RunResult(WorkerState.SUCCEEDED, {worker.global_rank: None for worker in worker_group.workers})
        self._is_restart = verdict is Verdict.RESTART and not self.verdicts.is_free
        self._remaining_restarts += verdict is Verdict.RESTART and self.verdicts.is_free  # torch counts every restart
        if verdict is Verdict.OVER:
            if self._is_round_wanted_elsewhere():
                return RunResult(WorkerState.HEALTHY)
            self._remaining_restarts = 0
        return RunResult(WorkerState.FAILED)

    def _let_new_ones_take_part(self) -> None:
        """Make the workers save and end if `WorkerCount.may_grow` allows more of them to be started."""
        newcomers = self._rendezvous_of_nodes.num_newcomers
        if self.verdicts.stop_signal or not self._count.may_grow(newcomers, has_saved=self.verdicts.has_saved):
            return
        if is_training(self._run):
            self._signal_workers(REGROUP_SIGNAL)
        elif not self.verdicts.trains:
            # A script without a Trainer saves nothing. It is started again, as torchrun does.
            self._rendezvous_of_nodes.is_round_wanted = True

    # nodes that end before the others

    def give_up(self) -> None:
        """Tell the other nodes that the workers of this node failed and are not restarted, or that a signal stopped them."""
        how = f"was stopped by {signal_name(self.verdicts.stop_signal)}"
        if self.verdicts.leaves:
            self._rendezvous_of_nodes.leave(how, is_regroup=self.verdicts.has_regrouped)
        elif self.verdicts.stop_signal:
            self._rendezvous_of_nodes.finish(how, self.verdicts.exit_code(), waits=False)
        elif not self.verdicts.is_done and self.verdicts.cause is not None:
            text, node = in_words(self.verdicts.cause), self._node_name()
            has_node = node in text or self.verdicts.cause.kind == "hang"
            cause = text if has_node else f"{text} on {node}"
            self._rendezvous_of_nodes.fail(cause, self.verdicts.exit_code())

    def _node_name(self) -> str:
        """Return the number and the host name of this node, or "" if there is only one node."""
        return f"node {self._request.node_rank} ({socket.gethostname()})" if self._request.num_nodes > 1 else ""

    def _node_of(self, rank: int) -> tuple[str, str]:
        """Return (the name of the node of a rank, or "" if there is only one node; its host name)."""
        if not self._nodes:
            return self._node_name(), socket.gethostname()
        index = rank // (self._world_size // self._num_nodes)
        name = self._nodes[index].name
        return f"node {self._ranks_before[index]} ({name})", name

    def _exit_barrier(self) -> None:
        """Wait for the workers of the other nodes. Raise NodesEndedError if they fail."""
        rendezvous, shared = self._rendezvous_of_nodes, self.verdicts.shared
        with self._warned("could not be copied for node 0"):
            send_logs(self._run, shared, rendezvous.get_run_id(), self._request.node_rank)
        rendezvous.finish("has finished", 1, waits=True, is_trained=self.verdicts.trains, meanwhile=self._progress.look)
        if self._request.node_rank == 0:
            with self._warned("of the other nodes could not be copied"):
                fetch_logs(self._run, shared, rendezvous.get_run_id())
        self._end_with_another_node()

    @contextlib.contextmanager
    def _warned(self, problem: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._display.handle({"kind": "warning", "text": f"the logs {problem}: {error}"})

    def _is_round_wanted_elsewhere(self) -> bool:
        """Return whether the run goes on with a new round after the failure of this node.

        If the failure is a consequence, wait for its cause on another node. The run goes on if the cause is a lost node. An elastic
        run goes on without that node, and any other run with its replacement. Raises NodesEndedError if another node reports the
        cause.
        """
        cause, deadline = self.verdicts.cause, time.monotonic() + _CAUSE_S + LOST_AFTER_S
        while self._nodes and cause is not None and cause.is_consequence and time.monotonic() < deadline:
            self._end_with_another_node()
            if self.verdicts.stop_signal:
                break
            others = self._rendezvous_of_nodes
            if others.num_nodes_waiting() or others.is_regroup:
                others.is_round_wanted = True
                return True
            time.sleep(0.05)
        return False

    def _end_with_another_node(self) -> None:
        """Raise NodesEndedError if another node has ended the run. The workers of this node are then killed.

        These workers could only wait for the workers of the other node, with gloo for half an hour. If all ranks agreed on a
        failure, the workers have already saved their state.
        """
        ended = self._rendezvous_of_nodes.ended
        if ended is not None and not self.verdicts.stop_signal:
            raise ended


def run_agent(request: LaunchRequest, channel: socket.socket, board: Board) -> int:
    """Run the workers of this node until they have ended, and show what happened.

    The workers share `board` with this process. Return the exit code, which is also sent to the launcher.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.ERROR)
    display = display_of(request)
    code = 1
    try:
        with temporary_directory() as directory:
            code = _run_to_the_end(request, channel, display, directory, board)
    except DistributedError as error:
        code = error.exit_code
        if request.node_rank == 0:
            run = RunDirectory(request.run_dir)
            run.event("node_failed", cause=str(error))
            close_results(run, code, str(error), end_elsewhere)
        display.close()
        is_late = not code  # the run had ended before this node took part
        display.handle({"kind": "notice" if is_late else "error", "text": f"{error}" if is_late else f"error: {error}"})
    finally:
        display.close()
        channel.send(json.dumps({"op": "done", "code": code}).encode())
    return code


def _run_to_the_end(
    request: LaunchRequest, channel: socket.socket, display: Display, directory: Path, board: Board
) -> int:
    """Run all attempts of this node's workers, then end the run and return its exit code."""
    rendezvous = rendezvous_of(request, display.handle)
    try:
        request = rendezvous.request
        if request.node_rank > 0:
            RunDirectory(request.run_dir).prove_part(f"node {request.node_rank} of a run of {request.master_addr}")
            text = f"this is node {request.node_rank}: its part of the run is in {request.run_dir}, and node 0 shows the run"
            display.handle({"kind": "notice", "text": text})
        write_line(request.run_dir_fd, request.run_dir)
        spec = WorkerSpec(
            role="default", local_world_size=request.nproc_per_node, rdzv_handler=rendezvous,
            entrypoint=request.script or "job",
            max_restarts=request.max_restarts, monitor_interval=0.001,  # `_monitor_workers` does the waiting
        )  # fmt: skip
        agent = ForkAgent(spec, request, RunDirectory(request.run_dir), channel, display, directory, board)
        agent.output.start()
        agent.run()
        agent.give_up()
        return agent.verdicts.finish()
    except NodesEndedError as error:
        if error.exit_code and (run := RunDirectory(request.run_dir)).part_of:
            run.event("node_failed", cause=str(error))
        raise
    except (DistributedError, OSError) as error:
        code = error.exit_code if isinstance(error, DistributedError) else 1
        rendezvous.fail(f"{error} on node {request.node_rank} ({socket.gethostname()})", code)
        raise
    finally:
        rendezvous.shutdown()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port
