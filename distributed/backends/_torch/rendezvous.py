"""Run the rendezvous of the ranks: a store that all of them have reached, under a name that belongs to this attempt."""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from distributed.backends._torch.worker_store import worker_store
from distributed.errors import ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.exposure import store_warnings
from distributed.launching.listening import listen_at
from distributed.launching.nodes import Node, interface_environ, this_node
from distributed.launching.secret import bind, messages

_POLL_S = 0.002
_RETRY_S = 0.05  # between checks whether rank 0 listens
_WARN_AFTER_S = 5.0  # before a warning names the missing ranks
_GRACE_S = 5.0  # for rank 0's result to reach the others


def rendezvous(found: WorkerEnvironment, start_timeout: float, warn: Callable[[str], None], call: str = "fit()") -> Any:
    """Return a store shared by all ranks of this attempt, once each of them has joined. Every rank must call it.

    torchrun keeps one store across restarts, so an attempt could read addresses of the previous one, and its restart
    count differs between nodes. Rank 0 therefore draws a name and sends it to each rank in reply to a token that the
    rank has just drawn. Replies to tokens of an earlier attempt are never read.

    `call` names the call that brings a rank here, for messages. Raises ResourceError with the ranks that did not join
    within `start_timeout` seconds.
    """
    own = worker_store(start_timeout)
    store = own or _connect(found, start_timeout, warn, call)
    bind("")  # end an earlier rendezvous of this process
    shared = messages(store, "trainer")
    deadline = time.monotonic() + start_timeout
    if found.rank == 0:
        name, missing = _wait_for_ranks(shared, found.world_size, deadline, start_timeout, warn, call)
    else:
        name, missing = _announce(shared, found.rank, deadline + _GRACE_S)
    if missing:
        raise ResourceError(_missing_message(missing, start_timeout, call))
    bind(name)
    if own is None:
        choose_interface(messages(store, f"nodes/{name}"), found)
    return dist.PrefixStore(f"trainer/{name}", store)


def choose_interface(store: Any, found: WorkerEnvironment) -> None:
    """Make gloo and NCCL listen at an address that the other nodes reach, if the host name does not resolve to one.

    Every rank must call it. Our own launcher has set the variables before; torchrun, mpirun and srun do not. `store` is a view
    of a store that holds nothing yet. Rank 0 collects the addresses of all ranks, so that each of the others reads one value.
    """
    own = this_node(os.environ.get("MASTER_ADDR") or found.master_addr)
    if found.rank == 0:
        others = [json.loads(store.get(str(rank))) for rank in range(1, found.world_size)]
        nodes = list(dict.fromkeys([own, *map(Node.of, others)]))
        store.set("all", json.dumps([node.to_dict() for node in nodes]))
    else:
        store.set(str(found.rank), json.dumps(own.to_dict()))
        nodes = list(map(Node.of, json.loads(store.get("all"))))
    os.environ.update(interface_environ(nodes, nodes.index(own)))


def _connect(found: WorkerEnvironment, start_timeout: float, warn: Callable[[str], None], call: str) -> Any:
    """Return the store on rank 0's port. Rank 0 hosts the store unless torchrun's agent does."""
    host = os.environ.get("MASTER_ADDR") or found.master_addr
    port = int(os.environ.get("MASTER_PORT") or found.master_port)
    is_host = found.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    if not is_host:
        _await_listener(host, port, start_timeout, warn, call)
    for text in store_warnings(host, port) if is_host else ():
        warn(text)
    try:
        return dist.TCPStore(
            host, port, found.world_size, is_host, timedelta(seconds=start_timeout), wait_for_workers=False, multi_tenant=True,
            master_listen_fd=_listener(host, port, found) if is_host else None,
        )  # fmt: skip
    except dist.DistNetworkError as error:
        if found.rank == 0:
            raise
        raise ResourceError(f"{_missing_message('0', start_timeout, call)} ({str(error).splitlines()[0]})") from None


def _listener(host: str, port: int, found: WorkerEnvironment) -> int | None:
    """Return a descriptor bound to the port on the interface of `host`, or None.

    With None, torch shares the store that this process already hosts, or reports why the port is not available.
    """
    try:
        return listen_at(host, port, is_alone=found.local_world_size == found.world_size).detach()
    except OSError:
        return None


def _await_listener(
    host: str, port: int, start_timeout: float, warn: Callable[[str], None], call: str = "fit()"
) -> None:
    """Return once rank 0 listens. Raises ResourceError after `start_timeout` seconds.

    Workaround (torch 2.13, no upstream issue known; may go when TCPStore keeps its time limit and prints nothing):
    torch would wait up to twice as long and print its C++ stack each time. An unknown host name is retried too, because
    the name of a pod appears only with the pod.
    """
    deadline, warn_at = time.monotonic() + start_timeout, time.monotonic() + _WARN_AFTER_S
    while True:
        left = deadline - time.monotonic()
        try:
            return socket.create_connection((host, port), timeout=max(_RETRY_S, left)).close()
        except OSError as error:
            reason = f"{host}:{port}: {error.strerror or error}"
        if left <= 0:
            raise ResourceError(f"{_missing_message('0', start_timeout, call)} ({reason})")
        if time.monotonic() >= warn_at:
            warn(f"waiting for rank 0 at {reason} (at most {start_timeout:g} s)")
            warn_at = math.inf
        time.sleep(_RETRY_S)


def _wait_for_ranks(
    store: Any, world_size: int, deadline: float, start_timeout: float, warn: Callable[[str], None], call: str = "fit()"
) -> tuple[str, str]:
    """Return the name and the ranks that are missing at the deadline. Called on rank 0."""
    name = secrets.token_hex(8)
    missing, answered = set(range(1, world_size)), set()
    warn_at = time.monotonic() + _WARN_AFTER_S
    while missing and (now := time.monotonic()) < deadline:
        for rank in sorted(missing):
            if store.check([f"{name}/{rank}"]):
                missing.discard(rank)
            elif store.check([f"here/{rank}"]) and (token := store.get(f"here/{rank}").decode()) not in answered:
                store.set(f"answer/{token}", name)
                answered.add(token)
        if missing and now >= warn_at:
            warn(
                f"waiting for {_ranks(_listed(missing))} to call {call}, as every rank must (at most {start_timeout:g} s)"
            )
            warn_at = math.inf
        time.sleep(_POLL_S)
    store.set(f"{name}/missing", _listed(missing))
    return name, _listed(missing)


def _announce(store: Any, rank: int, deadline: float) -> tuple[str, str]:
    """Announce this rank. Return the name and the missing ranks that rank 0 published. Called on the other ranks."""
    token = secrets.token_hex(8)
    store.set(f"here/{rank}", token)
    name = _read(store, f"answer/{token}", deadline)
    if name is not None:
        store.set(f"{name}/{rank}", "")
    missing = None if name is None else _read(store, f"{name}/missing", deadline)
    return name or "", "0" if missing is None else missing


def _read(store: Any, key: str, deadline: float) -> str | None:
    """Return the value of `key` once it is set, or None at the deadline."""
    while not store.check([key]):
        if time.monotonic() >= deadline:
            return None
        time.sleep(_POLL_S)
    return str(store.get(key).decode())


def _listed(ranks: set[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))


def _ranks(listed: str) -> str:
    return f"rank{'s' * (',' in listed)} {listed}"


def _missing_message(listed: str, start_timeout: float, call: str = "fit()") -> str:
    return f"{_ranks(listed)} did not join within start_timeout={start_timeout:g} s: every rank must call {call}"
