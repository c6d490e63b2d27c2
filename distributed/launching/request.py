"""What a launcher is asked for, what it hands to its workers, and what a worker knows of both. Imports no framework."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.config.merging import Overrides
from distributed.errors import ConfigError
from distributed.launching.environments.torchrun import is_local_rank

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.registry import BackendRow

HANDOVER_VARIABLE = "DISTRIBUTED_CONFIG"
# Settings that the launcher or every worker uses: they have an effect on a script without a Trainer too.
_FOR_ANY_SCRIPT = frozenset({
    "backend", "address", "num_gpus", "num_nodes", "gpus_per_node", "nproc_per_node", "device", "node_rank", "master_addr",
    "master_port", "timeout_s", "start_timeout", "monitor_interval", "max_restarts", "restart_on_exception", "seed",
    "verbose",
})  # fmt: skip


# What travels to a worker


@dataclasses.dataclass(frozen=True)
class Handover:
    """What the launcher hands to a worker: the settings given outside the script, and the number of this attempt."""

    overrides: Overrides
    run_dir: str | None = None
    resume: bool = False
    restart_count: int = 0

    def to_json(self) -> str:
        """Return the value of the variable DISTRIBUTED_CONFIG."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Handover:
        """Return the handover that `to_json` wrote. Raises ConfigError for any other text."""
        try:
            content = json.loads(text)
            return cls(**{**content, "overrides": overrides_from(content["overrides"])})
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{HANDOVER_VARIABLE}={text[:40]!r} was not written by the launcher of this package: unset it"
            ) from None


def overrides_from(content: Mapping[str, Any]) -> Overrides:
    """Return the overrides from their JSON form."""
    return Overrides(**{**content, "notices": tuple(content["notices"]), "script_args": tuple(content["script_args"])})


class Link:
    """The pipe from a worker to its launcher, which carries one JSON line per event."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def send(self, event: Mapping[str, Any]) -> None:
        """Send one event, from any thread. Do nothing in a fork of the worker, or if the launcher has ended."""
        if os.getpid() != self._pid:
            return
        data = (json.dumps(event) + "\n").encode()
        with self._lock:
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError:
                return


@dataclasses.dataclass
class _ThisProcess:
    """What this process got from a launcher, by `set_this_worker` or by the environment."""

    handover: Handover | None = None
    link: Link | None = None
    request: LaunchRequest | None = None  # the request of our launcher, if it started this process
    is_known: bool = False  # whether `handover` is final
    is_taken: bool = False  # whether a Trainer has asked for the handover
    asked: set[str] = dataclasses.field(default_factory=set)  # settings that `distributed.comm` has asked for


_this = _ThisProcess()


def handover() -> Handover | None:
    """Return what a Trainer of this worker got from the launcher, or None. The first call removes the variable from the environment."""
    _this.is_taken = True
    return _handover()


def overrides_for_script(*names: str) -> Overrides:
    """Return the settings `names` as far as they were given outside the script, for a script without a Trainer."""
    found = _handover()
    _this.asked.update(names)
    if found is None:
        return Overrides()
    file, flag = (
        {name: layer[name] for name in names if name in layer} for layer in (found.overrides.file, found.overrides.flag)
    )
    return Overrides(file=file, flag=flag)


def _handover() -> Handover | None:
    if not _this.is_known:
        text = os.environ.pop(HANDOVER_VARIABLE, None)
        _this.handover = Handover.from_json(text) if text is not None else None
        _this.is_known = True
    return _this.handover


def running_script() -> Overrides:
    """Return the script of this process and its arguments, or neither in a notebook and under `python -m`."""
    main = sys.modules["__main__"]
    is_file = hasattr(main, "__file__") and main.__spec__ is None and sys.argv[0].endswith(".py")
    if not is_file:
        return Overrides()
    arguments = [each for each in sys.argv[1:] if not is_local_rank(each)]
    return Overrides(script=sys.argv[0], script_args=tuple(arguments))


def unused_settings() -> list[str]:
    """Return the settings given outside the script that nothing in this worker has asked for."""
    from distributed.config.registry import REGISTRY

    if _this.handover is None or _this.is_taken:
        return []
    used = _FOR_ANY_SCRIPT.union(f"{row.group}.{name}" for row in REGISTRY.values() for name in row.for_launcher)
    names: dict[str, None] = {}  # an ordered set
    for layer in (_this.handover.overrides.file, _this.handover.overrides.flag):
        for name, value in layer.items():
            names.update(
                dict.fromkeys([f"{name}.{option}" for option in value] if isinstance(value, Mapping) else [name])
            )
    return [name for name in names if name not in used and name not in _this.asked]


def has_trainer() -> bool:
    """Return whether a Trainer was created in this process."""
    return _this.is_taken


def link() -> Link | None:
    """Return the pipe to our launcher, or None in a process that it did not start."""
    return _this.link


def launched_by() -> LaunchRequest | None:
    """Return the request of our launcher in a worker that it started, or None in any other process."""
    return _this.request


def set_this_worker(handover: Handover, link_fd: int | None = None, request: LaunchRequest | None = None) -> None:
    """Make this process a worker. Called once, before the script.

    Args:
        handover: what the launcher hands to it.
        link_fd: the descriptor of the pipe to our launcher; None if another launcher started this process.
        request: the request of our launcher.
    """
    os.environ.pop(HANDOVER_VARIABLE, None)
    _this.handover, _this.is_known = handover, True
    _this.link = Link(link_fd) if link_fd is not None else None
    _this.request = request


# What to launch


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """All that a launcher process must know. JSON-able. The workers run either `script` or `payload`."""

    run_dir: str
    overrides: Overrides = dataclasses.field(default_factory=Overrides)
    script: str | None = None
    script_args: tuple[str, ...] = ()
    payload: str | None = None  # file with a cloudpickled callable without arguments; may be /proc/self/fd/N
    working_dir: str | None = None
    sys_path: tuple[str, ...] | None = None  # of the calling process, for a payload
    resume: bool = False
    nproc_per_node: int = 1
    num_nodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int | None = None
    device: str = "cpu"
    preload: tuple[str, ...] = ("torch",)
    rendezvous: str | None = None  # "module:Class" of an EngineRendezvous
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of every worker, unless the user has set it
    # of the launcher before it imports any engine, unless the user has set it; its workers inherit it
    launcher_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    before_script: str = ""  # "module:function" that each worker calls first, see BackendRow
    warm_up: str = ""  # "module:function" that the launcher calls before it forks a worker, see BackendRow
    max_restarts: int = 3
    restart_on_exception: bool = False
    monitor_interval: float = 0.1  # seconds between two checks of the workers
    start_timeout: float = 600.0  # seconds all nodes may take to join
    timeout_s: float = 300.0  # seconds workers may take to end after a signal
    verbose: bool = True
    again: str = ""  # the command that goes on with this run, shown after a signal ended it
    live: bool | None = None  # whether to show a progress bar; None: if the output is a terminal
    started_lines: tuple[str, ...] = ()  # shown once, before the workers start
    launcher: str = "distributed.launching.forkserver"  # the module whose `serve` starts and watches the workers
    launcher_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # read by that launcher only
    epochs_fd: int | None = None  # a descriptor that gets the row of each finished epoch as a JSON line
    bar_fd: int | None = None  # a descriptor that gets what a progress bar shows, for a notebook

    @property
    def world_size(self) -> int:
        """The number of workers on all nodes."""
        return self.num_nodes * self.nproc_per_node

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchRequest:
        """Return the request that `to_json` wrote."""
        content = json.loads(text)
        for name in ("script_args", "preload", "started_lines"):
            content[name] = tuple(content[name])
        if content["sys_path"] is not None:
            content["sys_path"] = tuple(content["sys_path"])
        return cls(**{**content, "overrides": overrides_from(content["overrides"])})


_FROM_CONFIG = (
    "node_rank", "max_restarts", "restart_on_exception", "monitor_interval", "start_timeout", "timeout_s", "verbose",
)  # fmt: skip


def make_request(
    merged: MergedConfig, plan: ProcessPlan, row: BackendRow, run_dir: str, *, overrides: Overrides, started_lines: Sequence[str], **more: Any
) -> LaunchRequest:  # fmt: skip
    """Return the request for the processes of `plan` under the settings `merged`.

    Args:
        merged: the settings; their notices are shown at the start, before `started_lines`.
        plan: the processes to start.
        row: the backend, as its options make it.
        run_dir: the run directory.
        overrides: what the workers get of the values that were set outside the script.
        started_lines: what is shown once, before the workers start.
        more: further fields of the request, such as the script or the payload.
    """
    settings = {name: getattr(merged.config, name) for name in _FROM_CONFIG}
    return LaunchRequest(
        run_dir, dataclasses.replace(overrides, notices=()), nproc_per_node=plan.nproc_per_node, num_nodes=plan.num_nodes,
        device=plan.device, preload=row.preload, rendezvous=row.rendezvous, before_script=row.before_script, warm_up=row.warm_up,
        launcher_environ=row.profile_environ if merged.config.profile else {},
        started_lines=(*merged.notices, *started_lines), **settings, **more,
    )  # fmt: skip
