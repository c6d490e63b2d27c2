"""Rendezvous: the agents of all nodes begin an attempt together, and the workers of an engine find each other.

Data that came over a socket is never unpickled. With a single node, there is no server and no open port.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import pkgutil
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from distributed.config.registry import versions_of
from distributed.errors import ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.listening import is_own_host, listen_at
from distributed.launching.node_link import NodeLink, NodesEndedError, Round
from distributed.launching.node_reports import NodeReports
from distributed.launching.node_rounds import Report
from distributed.launching.node_server import NodeServer
from distributed.launching.nodes import Node, numbered, this_node
from distributed.launching.request import LaunchRequest
from distributed.launching.secret import shared_secret
from distributed.runs.directory import RunDirectory
from distributed.state import OnEvent

_GRACE_S = 3.0  # for the other nodes to take the last message before node 0 ends


class EngineRendezvous(Protocol):
    """Rendezvous of an engine whose workers need more than torchrun's variables to find each other.

    The agent of each node creates one instance.
    """

    def open(self, host: str, *, is_alone: bool) -> Any:
        """Open a rendezvous for the next attempt and return what the workers need to join it. Called on node 0 only.

        Args:
            host: the host at which the workers look for the rendezvous.
            is_alone: whether there is no other node.

        Returns:
            A JSON-able value, which is sent to the other nodes.
        """

    def check(self, nodes: Sequence[Node]) -> None:
        """Raise ResourceError if the workers of `nodes` cannot reach each other.

        With several nodes, called on every node with the same list, and on node 0 before a node joins a run that has begun. Not
        called on a single node. The index in the list is the node rank.
        """

    def environ(self, environment: WorkerEnvironment, opened: Any) -> dict[str, str]:
        """Return the variables of the worker in `environment`. `opened` is what `open` returned on node 0."""


def engine_rendezvous(name: str | None) -> EngineRendezvous | None:
    """Return an instance of the class `name`, which a registry entry gives as "module:Class", or None if `name` is None."""
    return None if name is None else cast(EngineRendezvous, pkgutil.resolve_name(name)())


class OneNode(RendezvousHandler):
    """The rendezvous of a single node: every round begins immediately."""

    def __init__(self, request: LaunchRequest) -> None:
        self.request = request
        # Set by the agent. They return what all nodes must know of the next round, and whether a signal ends the run.
        self.offer: Callable[[], Any] = lambda: None
        self.is_stopped: Callable[[], bool] = lambda: False
        self.round = Round(0, [], [], None)
        self.is_round_wanted = False  # whether this node wants another round
        self.failure: Callable[[], Any] = lambda: None  # the newest failure of a worker of this node, for the others
        self.has_regrouped: Callable[[], bool] = lambda: (
            False
        )  # whether the workers of this node ended for the next round
        self._run_id = uuid.uuid4().hex
        self._is_closed = False

    def get_backend(self) -> str:
        return "distributed"

    def next_rendezvous(self) -> RendezvousInfo:
        self.round, self.is_round_wanted = self._next_round(), False
        index, nodes = self.round.index_of(self.request.node_rank), max(1, len(self.round.nodes))
        return RendezvousInfo(dist.HashStore(), index, nodes, RendezvousStoreInfo("127.0.0.1", 0))

    def _next_round(self) -> Round:
        return Round(self.round.number + 1, [], [], self.offer())

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return int(self.is_round_wanted)

    @property
    def num_newcomers(self) -> int:
        """Number of nodes that wait until the workers have saved, to take part in the next round."""
        return 0

    @property
    def is_regroup(self) -> bool:
        """Return whether the workers of this node are about to end for the next round, as those of another node have."""
        return False

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        return True

    @property
    def ended(self) -> NodesEndedError | None:
        """Why another node ended the run, or None."""
        return None

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended, see `NodeLink.is_over`."""
        return False

    def fail(self, cause: str, code: int) -> None:
        """Tell the other nodes that this one has failed and is not restarted."""

    def leave(self, how: str, *, is_regroup: bool) -> None:
        """Tell the other nodes that this one leaves the run and that they go on, as `NodeLink.leave` does."""

    def exchange(self, reports: NodeReports) -> None:
        """Let `reports` take the messages that it sends on other nodes with `send`."""

    def send(self, op: str, patience_s: float = 0.0, **message: Any) -> None:
        """Send a message of `NodeReports`, see `Send`."""

    def finish(
        self, how: str, code: int, *, waits: bool, is_trained: bool = False, meanwhile: Callable[[], None] = lambda: None
    ) -> None:  # fmt: skip
        """Tell the other nodes how the workers of this one ended, and wait for theirs if `waits`, as `NodeLink.finish` does."""


def _warn_of_another_host(host: str, on_event: OnEvent) -> None:
    """Show a warning if `host`, at which the other nodes look for node 0, is not this machine, which is node 0."""
    with contextlib.suppress(OSError):
        if not is_own_host(host):
            text = f"this is node 0, and {host} (master_addr) is no address of this machine: the other nodes wait there, unless it leads here"
            on_event({"kind": "warning", "text": text})


class ManyNodes(OneNode):
    """The rendezvous of several nodes, through the server on node 0.

    Raises NodesEndedError if this node cannot join, ResourceError if node 0 cannot listen.
    """

    def __init__(self, request: LaunchRequest, on_event: OnEvent) -> None:
        super().__init__(request)
        self._server: NodeServer | None = None
        self._take_report: Report = lambda node, message: None
        secret = (shared_secret() or b"").decode()
        about = _about(request)
        own = None
        if request.node_rank == 0:
            _warn_of_another_host(request.master_addr, on_event)
            welcome: dict[str, Any] = {"run_dir": request.run_dir, "resume": request.resume, "run_id": self._run_id}
            self._server = NodeServer(
                _listener(request), secret, about, welcome, start_timeout=request.start_timeout,
                node_timeout=request.node_timeout, min_nodes=request.min_nodes, on_event=on_event,
                check=functools.partial(_objection, engine_rendezvous(request.rendezvous)),
                record=functools.partial(_record, RunDirectory(request.run_dir)),
                report=lambda node, message: self._take_report(node, message),
            )  # fmt: skip
            own = self._server.start()
        where = (request.master_addr, request.master_port or 0)
        self._link = NodeLink(
            where,
            secret,
            None if request.asks_for_rank else request.node_rank,
            about,
            node_timeout=request.node_timeout,
            on_event=on_event,
            own=own,
        )
        welcome = self._link.connect(request.start_timeout)
        self._run_id = str(welcome["run_id"])
        if request.node_rank > 0:
            run_dir = request.run_dir or str(welcome["run_dir"])
            self.request = dataclasses.replace(
                request, run_dir=run_dir, resume=bool(welcome["resume"]), node_rank=int(welcome["rank"])
            )

    def _next_round(self) -> Round:
        offer = self.offer() if self.request.node_rank == 0 else None
        found = self._link.join(offer, self.is_stopped, self.failure(), is_regroup=self.has_regrouped())
        if found is None:
            raise RendezvousGracefulExitError
        return found

    def num_nodes_waiting(self) -> int:
        return int(self._link.is_round_wanted or self.is_round_wanted)

    @property
    def num_newcomers(self) -> int:
        return self._link.num_newcomers

    @property
    def ended(self) -> NodesEndedError | None:
        return self._link.ended

    @property
    def is_over(self) -> bool:
        return self._link.is_over

    def exchange(self, reports: NodeReports) -> None:
        self._link.on_request, self._take_report = reports.obey, reports.add

    def send(self, op: str, patience_s: float = 0.0, **message: Any) -> None:
        self._link.send(op, patience_s, **message)

    def fail(self, cause: str, code: int) -> None:
        self._link.fail(cause, code)

    @property
    def is_regroup(self) -> bool:
        return self._link.is_regroup

    def leave(self, how: str, *, is_regroup: bool) -> None:
        self._link.leave(how, is_regroup=is_regroup)

    def finish(self, how: str, code: int, **more: Any) -> None:
        self._link.finish(how, code, **more)

    def shutdown(self) -> bool:
        self._link.close()
        if self._server is not None:
            self._server.close(_GRACE_S)
        return super().shutdown()


def rendezvous_of(request: LaunchRequest, on_event: OnEvent) -> OneNode:
    """Return the rendezvous through which the agent of this node begins attempts together with the agents of the other nodes.

    `on_event` shows a notice or a warning on the console of this node; any thread may call it. Raises NodesEndedError if this node
    cannot join the others, ResourceError if node 0 cannot listen.
    """
    return OneNode(request) if request.num_nodes == 1 else ManyNodes(request, on_event)


def nodes_of(begun: Round) -> list[Node]:
    """Return the nodes of a round in the order of their ranks. Raises TypeError if the facts about a node have another form."""
    return [Node.of(about) for about in begun.nodes]


def _objection(engine: EngineRendezvous | None, nodes: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Return why the engine cannot connect the workers of `nodes`, or None. `nodes` maps node ranks to facts about the nodes."""
    if engine is None:
        return None
    try:
        engine.check(numbered({rank: Node.of(about) for rank, about in nodes.items()}))
    except ResourceError as error:
        return str(error)
    return None


def _identity(request: LaunchRequest) -> str:
    """Return the name of the script and, if the launcher was given the script, a part of its SHA-256."""
    path = Path(request.script or "none")
    is_given = (
        request.payload is None and path.is_file()
    )  # with a payload, the file may be a command of another environment
    return f"{path.name} ({hashlib.sha256(path.read_bytes()).hexdigest()[:8]})" if is_given else path.name


def _about(request: LaunchRequest) -> dict[str, Any]:
    """Return the facts that this node sends about itself. The facts in `same` must be equal on all nodes."""
    same: dict[str, Any] = {
        "num_nodes": request.num_nodes,
        "min_nodes": request.min_nodes or request.num_nodes,
        "nproc_per_node": request.nproc_per_node,
        "script": _identity(request),
        **versions_of(("distributed-trainer", *request.libraries)),
        "torch": str(torch.__version__),
    }
    return {**this_node(request.master_addr).to_dict(), "same": same}


def _record(run: RunDirectory, event: str, written_at: float | None = None, **detail: Any) -> None:
    """Write what happened on another node into the journal of node 0, unless that node has written it there at `written_at`."""
    known = () if written_at is None else ((each["event"], each["time"]) for each in run.read_events())
    if (event, written_at) not in known:
        run.event(event, **detail)


def _listener(request: LaunchRequest) -> socket.socket:
    where = f"{request.master_addr}:{request.master_port}"
    try:
        return listen_at(request.master_addr, request.master_port or 0)
    except OSError as error:
        raise ResourceError(
            f"node 0 cannot listen at {where} ({error.strerror or error}): name another port with --master-port"
        ) from None
