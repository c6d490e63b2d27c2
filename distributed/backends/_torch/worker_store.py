"""Provide the store in which the workers of one node find each other: a file that only this user can open.

Workaround (torch 2.13, pytorch/pytorch#173909; may go when a TCPStore listens only at the address that it is given and checks who
connects): torch's usual store, a TCPStore, listens on all interfaces of the machine and trusts everyone who connects. A file needs
no open port.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

from distributed.launching.exposure import script_warnings
from distributed.launching.listening import is_loopback, listen_at

# A rendezvous handler of torch: (url, timeout=) -> iterator of (store, rank, world size).
_Method = Callable[..., Iterator[Any]]
_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass
class _StoreFile:
    path: str | None = None


_store_file = _StoreFile()


def use(path: str | None) -> None:
    """Use the file `path` as the store of this worker, also for `init_process_group()` in its script. Call once, before the script.

    If `path` is None, as on several nodes, the script gets a TCPStore of torch. Such a store listens only on the interface of
    the address that it is given. Without an installed torch there is nothing to do.
    """
    _store_file.path = path
    if importlib.util.find_spec("torch") is None:
        return
    _serve_torchs_methods()


def worker_store(timeout_s: float) -> Any:
    """Return the FileStore that the workers of this attempt share, or None if they share no file. Not a collective.

    `get` and `wait` of the store wait `timeout_s` seconds for a key.
    """
    import torch.distributed as dist

    if _store_file.path is None:
        return None
    store = dist.FileStore(_store_file.path, -1)  # -1: keep the file when the first worker ends
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _serve_torchs_methods() -> None:
    """Replace torch's handlers of `env://` and `tcp://`.

    Workaround (torch 2.13, no upstream issue known; may go when torch has a public function for this):
    `register_rendezvous_handler` refuses a scheme that has a handler.
    """
    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    for scheme in ("env", "tcp"):
        handlers[scheme] = _on_one_interface(handlers[scheme])
    if _store_file.path is not None:
        handlers["env"] = _by_file(handlers["env"])


def _by_file(by_port: _Method) -> _Method:
    """Return a handler that uses the file, or calls `by_port` if the script has changed the variables that the launcher set."""
    import torch.distributed as dist

    here = _ranks_here()
    numbers = itertools.count()

    def rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Iterator[Any]:
        if _store_file.path is None or _ranks_here() != here or not _is_of(url, here):
            yield from by_port(url, timeout=timeout, **options)
            return
        # A later process group must not read the keys of an earlier one.
        store = dist.PrefixStore(f"env/{next(numbers)}", worker_store(timeout.total_seconds()))
        yield store, int(here["RANK"]), int(here["WORLD_SIZE"])
        raise RuntimeError("env:// rendezvous: processes cannot join a second time")

    return rendezvous


def _on_one_interface(by_port: _Method) -> _Method:
    """Return a handler that does the same as `by_port`, but whose store listens on one interface instead of all.

    Workaround (torch 2.13, pytorch/pytorch#173909; may go when a TCPStore listens only at the address that it is
    given): the store is opened here first. Torch then uses it, because it shares a store that the process already hosts
    at a port.
    """

    def rendezvous(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Iterator[Any]:
        hosted = _hosted(url, timeout)
        found = by_port(url, timeout=timeout, **options)
        first = next(found)
        del hosted  # torch's store in `first` keeps the server alive
        yield first
        yield from found

    return rendezvous


def _hosted(url: str, timeout: timedelta) -> Any:
    """Open and return the store of `url` if this process is its host, else None.

    Also return None for a wrong address or a port in use, so that torch raises the error.
    """
    import torch.distributed as dist

    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    parts = urllib.parse.urlparse(url)
    try:
        rank = dict(urllib.parse.parse_qsl(parts.query)).get("rank") or os.environ["RANK"]
        host, port = parts.hostname, parts.port
        if host is None:  # `env://` has no host
            host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        if rank != "0" or not port:
            return None
        is_alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        listener = listen_at(host, port, is_alone=is_alone)
    except (KeyError, ValueError, OSError):
        return None
    address = listener.getsockname()[0]
    for text in script_warnings(host, port) if not is_loopback(address) else ():
        sys.stderr.write(f"warning: {text}\n")
    own = "localhost" if address in ("0.0.0.0", "::") else address
    return dist.TCPStore(
        own, port, None, True, timeout, wait_for_workers=False, multi_tenant=True, master_listen_fd=listener.detach()
    )


def _ranks_here() -> dict[str, str]:
    return {name: os.environ.get(name, "") for name in _RANK_VARIABLES}


def _is_of(url: str, here: dict[str, str]) -> bool:
    """Return whether the rank and the world size in `url` are those of this worker, or are not given."""
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
    return query.get("rank", here["RANK"]) == here["RANK"] and (
        query.get("world_size", here["WORLD_SIZE"]) == here["WORLD_SIZE"]
    )
