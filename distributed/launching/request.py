"""Define the request to a launcher (`LaunchRequest`) and the data that it gives to its workers (`Handover`).

Imports no framework.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from distributed.config.merging import Overrides
from distributed.config.settings import DEFAULT_PORT
from distributed.errors import ConfigError
from distributed.launching.causes import is_of_library
from distributed.launching.environments.torchrun import is_local_rank

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.registry import BackendEntry

HANDOVER_VARIABLE = "DISTRIBUTED_CONFIG"
# Settings that the launcher or every worker uses: they have an effect on a script without a Trainer too.
_FOR_ANY_SCRIPT = frozenset({
    "backend", "address", "num_gpus", "num_nodes", "gpus_per_node", "nproc_per_node", "min_nodes", "min_nproc_per_node",
    "elastic_interval_s", "device", "node_rank", "master_addr",
    "master_port", "timeout_s", "start_timeout", "node_timeout", "monitor_interval", "max_restarts", "restart_on_exception", "seed",
    "verbose",
})  # fmt: skip


# Data for a worker


@dataclasses.dataclass(frozen=True)
class Handover:
    """The data that the launcher gives to a worker, such as the settings given outside the script."""

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
    tuples = {name: tuple(content.get(name, ())) for name in ("notices", "script_args", "in_call")}
    return Overrides(**{**content, **tuples})


class Link:
    """The pipe from a worker to its launcher, which carries one JSON line per event."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def send(self, event: Mapping[str, Any]) -> None:
        """Send one event. May be called from any thread. Do nothing in a fork of the worker, or if the launcher has ended."""
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
class _FromLauncher:
    """Data that this process got from a launcher, either by `set_this_worker` or in an environment variable."""

    handover: Handover | None = None
    link: Link | None = None
    request: LaunchRequest | None = None  # the request of our launcher, if it started this process
    is_known: bool = False  # whether `handover` has been read, or set
    is_taken: bool = False  # whether a Trainer has read the handover
    read: set[str] = dataclasses.field(default_factory=set)  # settings that `distributed.comm` has read
    of_call: Overrides | None = None  # the settings of the call of `launch` that runs in this worker
    is_loading: bool = False  # whether this worker loads the model and the data of a fit, which imports their modules


_from_launcher = _FromLauncher()


def handover() -> Handover | None:
    """Return the data that the launcher gave to this worker, or None without a launcher. Only a Trainer calls this.

    The first call removes the variable DISTRIBUTED_CONFIG from the environment.
    """
    _from_launcher.is_taken = True
    return _handover()


def overrides_for_script(*names: str) -> Overrides:
    """Return the values of the settings `names` that were given outside the script. For a script without a Trainer."""
    found = _handover()
    _from_launcher.read.update(names)
    if found is None:
        return Overrides()
    return found.overrides.only(names)


def _handover() -> Handover | None:
    if not _from_launcher.is_known:
        text = os.environ.pop(HANDOVER_VARIABLE, None)
        _from_launcher.handover = Handover.from_json(text) if text is not None else None
        _from_launcher.is_known = True
    return _from_launcher.handover


def outside_settings(received: Handover | None = None) -> Overrides:
    """Return the settings that a Trainer in this process gets from outside, and the script of this process.

    `received` is the value that `handover` returned, if it was called.
    """
    if _from_launcher.of_call is not None:
        return _from_launcher.of_call
    found = received or _handover()
    return found.overrides if found is not None else running_script()


@contextlib.contextmanager
def calling(overrides: Overrides) -> Iterator[None]:
    """Make `outside_settings` return `overrides` within the block."""
    before, _from_launcher.of_call = _from_launcher.of_call, overrides
    try:
        yield
    finally:
        _from_launcher.of_call = before


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Make `is_loading` return True within the block."""
    _from_launcher.is_loading = True
    try:
        yield
    finally:
        _from_launcher.is_loading = False


def is_loading() -> bool:
    """Return whether this worker is loading the model and the data of a fit, which imports the modules of their classes."""
    return _from_launcher.is_loading


def running_script() -> Overrides:
    """Return overrides with only the script of this process and its arguments.

    Both are empty in a notebook, under `python -m` and in a process of a library, such as a worker of Ray.
    """
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if file is None or main.__spec__ is not None or not sys.argv[0].endswith(".py") or is_of_library(file):
        return Overrides()
    arguments = [each for each in sys.argv[1:] if not is_local_rank(each)]
    return Overrides(script=sys.argv[0], script_args=tuple(arguments))


def unused_settings() -> list[str]:
    """Return the settings given outside the script that nothing in this worker has read.

    They include a backend that divides the model among the processes, because it has only started the workers.
    """
    from distributed.config.registry import REGISTRY

    if _from_launcher.handover is None or _from_launcher.is_taken:
        return []
    used = _FOR_ANY_SCRIPT.union(f"{entry.group}.{name}" for entry in REGISTRY.values() for name in entry.for_launcher)
    names: list[str] = []
    for name, value in _from_launcher.handover.overrides.values().items():
        if name == "backend" and REGISTRY[value].cuts_model:
            names.append(f"{name}={value}")
        names += [f"{name}.{option}" for option in value] if isinstance(value, Mapping) else [name]
    return [name for name in names if name not in used and name not in _from_launcher.read]


def has_trainer() -> bool:
    """Return whether a Trainer was created in this process."""
    return _from_launcher.is_taken


def link() -> Link | None:
    """Return the pipe to our launcher, or None in a process that it did not start."""
    return _from_launcher.link


def launched_by() -> LaunchRequest | None:
    """Return the request of our launcher in a worker that it started, or None in any other process."""
    return _from_launcher.request


def set_this_worker(handover: Handover) -> None:
    """Make this process a worker that got `handover`. Called once, before the script."""
    os.environ.pop(HANDOVER_VARIABLE, None)
    _from_launcher.handover, _from_launcher.is_known = handover, True


def set_forked_worker(request: LaunchRequest, restart_count: int, link_fd: int) -> None:
    """Make this process a worker that our launcher has forked for `request`. Called once, before the script.

    Args:
        request: the request of our launcher.
        restart_count: the number of this attempt.
        link_fd: the descriptor of the pipe to our launcher.
    """
    set_this_worker(Handover(request.overrides, request.run_dir, request.resume, restart_count))
    _from_launcher.link, _from_launcher.request = Link(link_fd), request


# What to launch


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """Everything that a launcher process needs to know. JSON-able. The workers run `payload` if it is given, else `script`."""

    run_dir: str
    overrides: Overrides = dataclasses.field(default_factory=Overrides)
    script: str | None = None
    script_args: tuple[str, ...] = ()
    payload: str | None = None  # file with a cloudpickled callable without arguments; may be /proc/self/fd/N
    working_dir: str | None = None
    sys_path: tuple[str, ...] | None = None  # `sys.path` of the calling process, for a payload
    resume: bool = False
    nproc_per_node: int = 1
    num_nodes: int = 1
    min_nproc_per_node: int | None = None  # the fewest with which the run goes on; None: all
    min_nodes: int | None = None
    elastic_interval_s: float = (
        300.0  # seconds until lost workers are replaced, and at most until a new node takes part
    )
    node_rank: int = 0
    asks_for_rank: bool = False  # whether node 0 assigns the rank of this node; False on node 0
    master_addr: str = "localhost"
    master_port: int | None = None
    device: str = "cpu"
    preload: tuple[str, ...] = ("torch",)
    libraries: tuple[str, ...] = ()  # whose versions must be the same on all nodes
    rendezvous: str | None = None  # "module:Class" of an EngineRendezvous
    # Variables of every worker, unless set by the user.
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Variables that the launcher sets before it imports any engine, unless the user has set them. Its workers inherit them.
    launcher_environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    before_script: str = ""  # "module:function" that each worker calls first, see BackendEntry
    warm_up: str = ""  # "module:function" that the launcher calls before it forks a worker, see BackendEntry
    max_restarts: int = 3
    restart_on_exception: bool = False
    monitor_interval: float = 0.1  # seconds between two checks of the workers
    start_timeout: float = 600.0  # seconds that all nodes together may take to join
    node_timeout: float = 120.0  # seconds in which a lost node, or its replacement, must join again
    timeout_s: float = 300.0  # seconds that workers may take to end after a signal
    hang_timeout: float | None = (
        None  # seconds after which a rank that stands still in an update is reported as hanging; 0 or None: never
    )
    hang_timeout_slow: float | None = (
        None  # the same in work that is slow by its nature; 0: never; None: a multiple of `hang_timeout`
    )
    verbose: bool = True
    again: str = ""  # the command that resumes this run, shown after a signal ended it
    live: bool | None = None  # whether to show a progress bar; None: only if the output is a terminal
    started_lines: tuple[str, ...] = ()  # shown once, before the workers start
    launcher: str = "distributed.launching.forkserver"  # the module whose `serve` starts and watches the workers
    launcher_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # only for the module `launcher`
    epochs_fd: int | None = None  # a descriptor that gets the metrics of each finished epoch as a JSON line
    bar_fd: int | None = None  # a descriptor that gets what a progress bar shows, for a notebook
    run_dir_fd: int | None = None  # a descriptor that gets the run directory that the nodes agreed on as a JSON line

    @property
    def world_size(self) -> int:
        """The number of workers on all nodes, when none is missing."""
        return self.num_nodes * self.nproc_per_node

    @property
    def is_elastic(self) -> bool:
        """Return whether the number of workers may change during the run."""
        return (self.min_nproc_per_node or self.nproc_per_node) * (self.min_nodes or self.num_nodes) < self.world_size

    @property
    def may_leave(self) -> bool:
        """Return whether the other nodes go on after a SIGTERM to this node. A SIGTERM to node 0 ends the run."""
        return self.node_rank > 0 and (self.min_nodes or self.num_nodes) < self.num_nodes

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchRequest:
        """Return the request that `to_json` wrote."""
        content = json.loads(text)
        for name in ("script_args", "preload", "libraries", "started_lines"):
            content[name] = tuple(content[name])
        if content["sys_path"] is not None:
            content["sys_path"] = tuple(content["sys_path"])
        return cls(**{**content, "overrides": overrides_from(content["overrides"])})


_FROM_CONFIG = (
    "min_nproc_per_node", "min_nodes", "elastic_interval_s", "node_rank", "master_addr", "master_port", "max_restarts",
    "restart_on_exception", "monitor_interval", "start_timeout", "node_timeout", "timeout_s", "hang_timeout",
    "hang_timeout_slow", "verbose",
)  # fmt: skip


def make_request(
    merged: MergedConfig, plan: ProcessPlan, entry: BackendEntry, run_dir: str, *, overrides: Overrides, started_lines: Sequence[str], **more: Any
) -> LaunchRequest:  # fmt: skip
    """Return the request for the processes of `plan` under the settings `merged`.

    Args:
        merged: the settings; their notices are shown at the start, before `started_lines`.
        plan: the processes to start.
        entry: the registry entry of the backend, as changed by its options (`entry_in_use`).
        run_dir: the run directory.
        overrides: the settings given outside the script that the workers get.
        started_lines: lines that are shown once, before the workers start.
        more: further fields of the request, such as the script or the payload.
    """
    settings = {name: getattr(merged.config, name) for name in _FROM_CONFIG}
    if plan.num_nodes > 1 and not entry.places_workers:
        settings["master_port"] = settings["master_port"] or DEFAULT_PORT
    return LaunchRequest(
        run_dir, dataclasses.replace(overrides, notices=()), nproc_per_node=plan.nproc_per_node, num_nodes=plan.num_nodes,
        device=plan.device, preload=entry.preload, libraries=entry.requires, rendezvous=entry.rendezvous,
        before_script=entry.before_script, warm_up=entry.warm_up,
        launcher_environ=entry.profile_environ if merged.config.profile else {},
        started_lines=(*merged.notices, *started_lines), **settings, **more,
    )  # fmt: skip
