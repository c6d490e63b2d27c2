"""The store in which the workers of one node find each other: a file that only this user can open, so that nothing listens.

Torch's own way, a TCPStore, listens on all interfaces of the machine and believes whoever connects.
"""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import os
import urllib.parse
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

_PLACE = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass
class _ThisProcess:
    path: str | None = None


_this = _ThisProcess()


def use(path: str | None) -> None:
    """Make the file `path` the store of this worker, also for `init_process_group()` of its script. Entry of a worker only.

    None, on several nodes, leaves torch's ways as they are.
    """
    _this.path = path
    if path is not None:
        _serve_env_method()


def worker_store(timeout_s: float) -> Any:
    """Return the FileStore that the workers of this attempt share, or None where they have none. No collective.

    `timeout_s` is how long `get` and `wait` of the store wait for a key.
    """
    import torch.distributed as dist

    if _this.path is None:
        return None
    store = dist.FileStore(_this.path, -1)  # -1: the file outlives the first worker that ends
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _serve_env_method() -> None:
    """Let torch's `env://` use the file where the environment is still the one that the launcher made.

    Torch has no public way to replace the method of a scheme (2.13: `register_rendezvous_handler` refuses a known one).
    """
    import torch.distributed as dist

    handlers = importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers
    by_port = handlers["env"]
    place = _place()
    numbers = itertools.count()

    def by_file(url: str, timeout: timedelta = timedelta(minutes=30), **options: Any) -> Iterator[Any]:
        if _this.path is None or _place() != place or not _is_of(url, place):
            yield from by_port(url, timeout=timeout, **options)
            return
        # A group that is made again must not read what an earlier one left.
        store = dist.PrefixStore(f"env/{next(numbers)}", worker_store(timeout.total_seconds()))
        yield store, int(place["RANK"]), int(place["WORLD_SIZE"])
        raise RuntimeError("env:// rendezvous: processes cannot join a second time")

    handlers["env"] = by_file


def _place() -> dict[str, str]:
    return {name: os.environ.get(name, "") for name in _PLACE}


def _is_of(url: str, place: dict[str, str]) -> bool:
    """Whether the rank and the world size in `url`, where there are any, are this worker's."""
    query = dict(urllib.parse.parse_qsl(urllib.parse.urlparse(url).query))
    return query.get("rank", place["RANK"]) == place["RANK"] and (
        query.get("world_size", place["WORLD_SIZE"]) == place["WORLD_SIZE"]
    )
