"""Rendezvous: how the agents of all nodes find each other, and what an engine opens so that its workers do.

Nothing that came over a socket is unpickled.

One node needs no store, and nothing listens. Several nodes use torch's dynamic rendezvous over a store on node 0. Torch keeps the
state of a rendezvous in that store as a pickle, which anyone who reaches the port could replace. This package keeps the state as
JSON instead, with a signature if the nodes share a secret.
"""

from __future__ import annotations

import datetime
import hmac
import json
import pickle
import pkgutil
import socket
import uuid
from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousStateError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    _NodeDesc,
    _RendezvousState,
)

from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.listening import listen_at
from distributed.launching.nodes import Node
from distributed.launching.request import LaunchRequest
from distributed.launching.secret import shared_secret, signature

_KEY = "distributed/rendezvous"
_NOTHING = "nothing"  # the first value of the key: `get` of a store waits for a key that does not exist


class EngineRendezvous(Protocol):
    """What an engine needs beside torchrun's variables so that its workers find each other. Created once in the agent of each node."""

    def open(self, host: str, *, is_alone: bool) -> Any:
        """Open a rendezvous for the next attempt and return what the workers must know of it. On node 0 only.

        Args:
            host: the host at which the workers look for it.
            is_alone: whether there is no other node.

        Returns:
            A JSON-able value, which reaches the other nodes.
        """

    def check(self, nodes: Sequence[Node]) -> None:
        """Raise ResourceError if the workers of `nodes` cannot reach each other. Called on every node of several with the same list."""

    def environ(self, environment: WorkerEnvironment, opened: Any) -> dict[str, str]:
        """Return the variables of the worker in `environment`. `opened` is what `open` returned on node 0."""


def engine_rendezvous(name: str | None) -> EngineRendezvous | None:
    """Return an instance of the class that a backend's registry row names as "module:Class"."""
    return None if name is None else cast(EngineRendezvous, pkgutil.resolve_name(name)())


def rendezvous_of(request: LaunchRequest) -> RendezvousHandler:
    """Return the rendezvous through which this node's agent finds the agents of the other nodes.

    Raises RendezvousConnectionError if node 0 does not answer within `start_timeout`, or within a minute if that is less.
    """
    if request.num_nodes == 1:
        return OneNode()
    secret = shared_secret()
    store = _open_store(request)
    run_id = f"distributed-{request.master_port}"
    backend = JsonBackend(store, secret)
    handler: DynamicRendezvousHandler = DynamicRendezvousHandler.from_backend(
        run_id, store, backend, request.num_nodes, request.num_nodes, local_addr=socket.gethostname(),
        timeout=RendezvousTimeout(join=datetime.timedelta(seconds=request.start_timeout)),
    )  # fmt: skip
    return handler


class StoreLostError(RendezvousConnectionError):
    """The store of node 0 was there and does not answer any more."""


class OneNode(RendezvousHandler):
    """The rendezvous of a single node: complete immediately, with a store in the memory of this process."""

    def __init__(self) -> None:
        self._run_id = uuid.uuid4().hex
        self._is_closed = False

    def get_backend(self) -> str:
        return "one-node"

    def next_rendezvous(self) -> RendezvousInfo:
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return self._is_closed

    def set_closed(self) -> None:
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self.set_closed()
        return True


class JsonBackend(RendezvousBackend):
    """Keep the state of torch's dynamic rendezvous in a store as JSON, with a signature if there is a secret.

    Torch (2.13) passes and expects pickles. This class only unpickles what torch pickled in the same process.
    """

    def __init__(self, store: Any, secret: bytes | None) -> None:
        self._store, self._secret = store, secret
        self._call("compare_set", _KEY, "", _NOTHING)

    @property
    def name(self) -> str:
        return "distributed"

    def get_state(self) -> tuple[bytes, Any] | None:
        return self._read(self._call("get", _KEY))

    def set_state(self, state: bytes, token: Any = None) -> tuple[bytes, Any, bool] | None:
        text = self._signed(state_to_json(pickle.loads(state)))  # torch has just made it in this process
        expected = token.decode() if token is not None else _NOTHING
        content = self._call("compare_set", _KEY, expected, text)
        found = self._read(content)
        return None if found is None else (*found, content == text.encode())

    def _read(self, content: bytes) -> tuple[bytes, Any] | None:
        if content == _NOTHING.encode():
            return None
        return pickle.dumps(state_from_json(self._checked(content))), content

    def _signed(self, text: str) -> str:
        if self._secret is None:
            return text
        return signature(self._secret, _KEY, text.encode()).decode() + text

    def _checked(self, content: bytes) -> bytes:
        if self._secret is None:
            return content
        found, text = content[:64], content[64:]
        if not hmac.compare_digest(found, signature(self._secret, _KEY, text)):
            raise RendezvousStateError(
                "the nodes do not have the same DISTRIBUTED_TOKEN, or somebody else wrote to the store"
            )
        return text

    def _call(self, verb: str, *arguments: str) -> bytes:
        try:
            content: bytes = getattr(self._store, verb)(*arguments)
        except (RuntimeError, ValueError, TimeoutError) as error:
            raise StoreLostError("the store of node 0 does not answer") from error
        return content


def state_to_json(state: _RendezvousState) -> str:
    """Return the state of a rendezvous as JSON. Nodes are [address, process id, local id], times are ISO 8601."""
    return json.dumps({
        "round": state.round, "complete": state.complete, "closed": state.closed, "deadline": _text(state.deadline),
        "participants": [[*_triple(node), rank] for node, rank in state.participants.items()],
        "wait_list": sorted(_triple(node) for node in state.wait_list),
        "redundancy_list": sorted(_triple(node) for node in state.redundancy_list),
        "last_heartbeats": [[*_triple(node), _text(time)] for node, time in state.last_heartbeats.items()],
    })  # fmt: skip


def state_from_json(content: bytes) -> _RendezvousState:
    """Return the state that `state_to_json` wrote. Raises RendezvousStateError if `content` is anything else."""
    try:
        found = json.loads(content)
        state = _RendezvousState()
        state.round, state.complete, state.closed = int(found["round"]), bool(found["complete"]), bool(found["closed"])
        state.deadline = _time(found["deadline"])
        state.participants = {_node(*node): int(rank) for *node, rank in found["participants"]}
        state.wait_list = {_node(*node) for node in found["wait_list"]}
        state.redundancy_list = {_node(*node) for node in found["redundancy_list"]}
        state.last_heartbeats = {_node(*node): _moment(text) for *node, text in found["last_heartbeats"]}
    except (ArithmeticError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise foreign_content() from None
    return state


def foreign_content() -> RendezvousStateError:
    """Return the error for content of the nodes' store that has another form than what the nodes write."""
    return RendezvousStateError(
        "the nodes' store contains a value that no node of this run wrote: somebody else wrote to the store"
    )


def _triple(node: _NodeDesc) -> tuple[str, int, int]:
    return node.addr, node.pid, node.local_id


def _node(addr: Any, pid: Any, local_id: Any) -> _NodeDesc:
    return _NodeDesc(str(addr), int(pid), int(local_id))


def _text(time: datetime.datetime | None) -> str | None:
    return None if time is None else time.isoformat()


def _time(text: str | None) -> datetime.datetime | None:
    return None if text is None else _moment(text)


def _moment(text: str) -> datetime.datetime:
    """Return a time with a time zone. Raises ValueError if it has none: torch compares it with times that have one."""
    time = datetime.datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError("a time without a time zone")
    return time


def _open_store(request: LaunchRequest) -> Any:
    is_host = request.node_rank == 0
    port = request.master_port or 0
    timeout = datetime.timedelta(seconds=min(60, int(request.start_timeout) + 1))
    try:
        if is_host:
            listener = listen_at(request.master_addr, port)
            return dist.TCPStore(
                request.master_addr, port, None, True, timeout, wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )  # fmt: skip
        return dist.TCPStore(request.master_addr, port, None, False, timeout)
    except (RuntimeError, ValueError, TimeoutError, OSError) as error:
        raise RendezvousConnectionError(str(error).splitlines()[0]) from error
