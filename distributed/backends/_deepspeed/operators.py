"""Compile DeepSpeed's C++ operators once, under a lock that is released when a build is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from distributed.errors import ResourceError
from distributed.runs.private import cache_home, own_directory, stranger

_POLL_S = 0.1
_FOREIGN_LOCK_S = 600.0  # in a directory that the user chose, a younger lock may belong to a build of another program


def directory() -> tuple[Path, bool]:
    """Return the directory of compiled operators, and whether it is ours. The user's TORCH_EXTENSIONS_DIR takes
    precedence."""
    from_environ = os.environ.get("TORCH_EXTENSIONS_DIR")
    if from_environ and not from_environ.endswith(_own_name()):
        return Path(from_environ), False
    return cache_home() / _own_name(), True


def _own_name() -> str:
    """Return a directory name for this version of torch and Python and this kind of processor, for which operators
    are compiled."""
    return f"extensions-torch{torch.__version__}-py{sys.version_info[0]}{sys.version_info[1]}-{platform.machine()}"


def load(name: str, make: Callable[[], Any], limit_s: float, notice: Callable[[str], None]) -> Any:
    """Return the operator that `make` compiles, or loads if it was compiled before.

    Every rank calls it, but it is not a collective. One rank compiles, and the others on its machine wait.

    Workaround (torch 2.13, pytorch/pytorch#189245; may go when the oldest supported torch has pytorch/pytorch#190543):
    torch guards a build with a file that outlives a killed build, and every later process waits for it for ever
    (`FileBaton`). Our lock ends with its process, so its holder may remove such files.
    """
    where, is_ours = directory()
    _keep_private(where, is_ours, notice)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(where)
    with _held(where / "building.lock", limit_s, name):
        remove_stale_locks(where, is_ours)
        is_built = any((where / name).glob(f"{name}*.so"))
        if not is_built:
            notice(f"compiling DeepSpeed's {name} (C++, once, one to three minutes) in {where}")
        began = time.monotonic()
        operator = _made(name, make)
        if not is_built:
            notice(f"compiled {name} in {time.monotonic() - began:.0f} s")
    return operator


def _keep_private(where: Path, is_ours: bool, notice: Callable[[str], None]) -> None:
    """Create the directory for this user alone, because other users could put code there that this process loads. If
    others can write to it, raise ResourceError for our own directory, and show a notice for one that the user chose."""
    reason = own_directory(where) if is_ours or not where.exists() else stranger(where)
    if reason is None:
        return
    text = f"DeepSpeed's operators are loaded from {where}, and {reason}"
    if is_ours:
        raise ResourceError(f"{text}: remove it, or name another one with TORCH_EXTENSIONS_DIR")
    notice(f"{text}: name a directory of mode 0700 with TORCH_EXTENSIONS_DIR")


def remove_stale_locks(where: Path, is_ours: bool) -> list[Path]:
    """Remove the locks of killed builds and return them."""
    found = []
    for lock in where.glob("*/lock"):
        with contextlib.suppress(FileNotFoundError):
            if is_ours or time.time() - lock.stat().st_mtime > _FOREIGN_LOCK_S:
                lock.unlink()
                found.append(lock)
    return found


@contextlib.contextmanager
def _held(path: Path, limit_s: float, name: str) -> Iterator[None]:
    """Hold the lock `path` within the block. Raises ResourceError if another process holds it for `limit_s` seconds."""
    deadline = time.monotonic() + limit_s
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ResourceError(
                        f"{name} was not compiled by another process within start_timeout={limit_s:g} s: set a longer one"
                        f" (--set start_timeout={2 * limit_s:g}), or drop deepspeed.cpu_adam"
                    ) from None
                time.sleep(_POLL_S)
        yield


def _made(name: str, make: Callable[[], Any]) -> Any:
    try:
        return make()
    except RuntimeError as error:  # raised by torch and DeepSpeed if ninja or a compiler is missing or fails
        lines = [line for line in str(error).splitlines() if "error:" in line] or str(error).splitlines()[:1]
        raise ResourceError(
            f"{name} cannot be compiled ({lines[0].strip()[:200]}): install g++ and ninja, or drop deepspeed.cpu_adam"
        ) from None
