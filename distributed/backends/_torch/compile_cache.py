"""Keep the cache of torch.compile in a directory to which only this user can write.

Workaround (torch 2.13, pytorch/pytorch#121122; may go when torch's default directory is private to the user): torch
unpickles and loads files from the cache, so no other user may write there. By default torch uses `torchinductor_USER`
in the temporary directory, even if another user created it; TORCHINDUCTOR_CACHE_DIR selects another directory.
"""

from __future__ import annotations

import atexit
import importlib
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from distributed.runs.private import cache_home, own_directory, stranger
from distributed.runs.temporary import claim

_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
_INDUCTOR = "torch._inductor"
_NAMES = ("runtime.cache_dir_utils", "runtime.runtime_utils", "codecache")  # modules that define `default_cache_dir`


def secure(warn: Callable[[str], None]) -> None:
    """Keep the cache of torch.compile in a directory to which only this user can write.

    Call it before the first compilation. It is not a collective. A directory chosen by the user is kept, with a
    warning if others can write there.
    """
    usual = importlib.import_module(f"{_INDUCTOR}.runtime.runtime_utils").default_cache_dir
    default = Path(usual()).absolute()
    value = os.environ.get(_VARIABLE)
    reason = own_directory(default)
    if value is not None and Path(value).absolute() != default:  # torch itself sets the variable to the default
        chosen = Path(value)
        if why := stranger(chosen) if os.path.lexists(chosen) else own_directory(chosen):
            warn(f"torch.compile runs code from {_VARIABLE}={value}, and {why}: name a directory of mode 0700")
    elif reason is not None:
        chosen = _private()
        os.environ[_VARIABLE] = str(chosen)
        warn(f"torch.compile does not use its cache {default}, as {reason}: it uses {chosen}")
    if reason is not None:
        _keep_out(chosen)


def _private() -> Path:
    """Return a private directory for the cache.

    It is in the user's cache directory and outlives this process. If others can write there too, return a temporary
    directory that is removed at exit.
    """
    try:
        path = cache_home() / "torchinductor"
        if own_directory(path) is None:
            return path
    except RuntimeError:  # there is no home directory
        pass
    path = claim(Path(tempfile.gettempdir(), f"distributed-{secrets.token_hex(4)}"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def _keep_out(chosen: Path) -> None:
    """Make `chosen` torch's default directory as well.

    Workaround (torch 2.13, no upstream issue known; may go when torch has a setting for it): precompiled headers and
    some other files are always written to the default directory.
    """
    for name in _NAMES:
        if (module := sys.modules.get(f"{_INDUCTOR}.{name}")) is not None and hasattr(module, "default_cache_dir"):
            module.default_cache_dir = lambda: str(chosen)  # type: ignore[attr-defined]
    if (codecache := sys.modules.get(f"{_INDUCTOR}.codecache")) is not None:
        for name, parts in (("_HEADER_DIR", ()), ("_HEADER_LOCK_DIR", ("locks",))):
            if hasattr(codecache, name):
                setattr(codecache, name, str(chosen.joinpath("precompiled_headers", *parts)))
