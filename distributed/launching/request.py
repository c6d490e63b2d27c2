"""Starts the workers of a run, or tells that this process already is one. Imports no framework before `launch`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import threading
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed.config.merging import Typed
from distributed.errors import ConfigError, ScriptError, nearest
from distributed.launching.environments.torchrun import is_local_rank

if TYPE_CHECKING:
    from distributed.config.merging import MergedConfig
    from distributed.config.plan import ProcessPlan
    from distributed.config.registry import BackendRow

HANDOVER_VARIABLE = "DISTRIBUTED_CONFIG"
# What the launcher itself uses, or every worker: these settings hold for a script without a Trainer too.
_FOR_ANY_SCRIPT = frozenset({
    "backend", "address", "num_gpus", "num_nodes", "gpus_per_node", "nproc_per_node", "device", "node_rank", "master_addr",
    "master_port", "timeout_s", "start_timeout", "monitor_interval", "max_restarts", "restart_on_exception", "seed",
    "verbose",
})  # fmt: skip
_MOST_PER_CORE = 4  # processes, before a start is warned of
THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


# What travels to a worker


@dataclasses.dataclass(frozen=True)
class Handover:
    """What the launcher tells a worker: what was typed outside the script, and which attempt this is."""

    typed: Typed
    run_dir: str | None = None
    resume: bool = False
    restart_count: int = 0

    def to_json(self) -> str:
        """The text of DISTRIBUTED_CONFIG."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Handover:
        """What `to_json` wrote. Raises ConfigError where the text is something else."""
        try:
            content = json.loads(text)
            return cls(**{**content, "typed": typed_from(content["typed"])})
        except (ValueError, TypeError, KeyError):
            raise ConfigError(
                f"{HANDOVER_VARIABLE}={text[:40]!r} was not written by a launcher of ours: unset it"
            ) from None


def typed_from(content: Mapping[str, Any]) -> Typed:
    """A Typed out of its JSON form."""
    return Typed(**{**content, "notices": tuple(content["notices"]), "script_args": tuple(content["script_args"])})


class Link:
    """The way from a worker to its launcher: one JSON line per event. None where another launcher started it."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._pid = os.getpid()
        self._lock = threading.Lock()

    def send(self, event: Mapping[str, Any]) -> None:
        """Send one event. Any thread; nothing happens in a fork of the worker or when the launcher has gone."""
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
    """What this process was told; filled in once by the entry of a worker, or from the environment."""

    handover: Handover | None = None
    link: Link | None = None
    request: LaunchRequest | None = None  # what our launcher was asked for, where it started this process
    is_told: bool = False
    is_taken: bool = False  # a Trainer has asked
    asked: set[str] = dataclasses.field(default_factory=set)  # settings that `distributed.comm` has asked for


_this = _ThisProcess()


def handover() -> Handover | None:
    """What the launcher told this worker, or None. The variable is taken out of the environment at the first call."""
    _this.is_taken = True
    return _told()


def typed_for_script(*names: str) -> Typed:
    """Of what was typed outside the script the settings `names`, for a script without a Trainer."""
    given = _told()
    _this.asked.update(names)
    if given is None:
        return Typed()
    file, flag = (
        {name: layer[name] for name in names if name in layer} for layer in (given.typed.file, given.typed.flag)
    )
    return Typed(file=file, flag=flag)


def _told() -> Handover | None:
    if not _this.is_told:
        text = os.environ.pop(HANDOVER_VARIABLE, None)
        _this.handover = Handover.from_json(text) if text is not None else None
        _this.is_told = True
    return _this.handover


def running_script() -> Typed:
    """The script of this process and its arguments as typed; nothing in a notebook and under `python -m`."""
    main = sys.modules["__main__"]
    is_file = hasattr(main, "__file__") and main.__spec__ is None and sys.argv[0].endswith(".py")
    if not is_file:
        return Typed()
    arguments = [each for each in sys.argv[1:] if not is_local_rank(each)]
    return Typed(script=sys.argv[0], script_args=tuple(arguments))


def unused_settings() -> list[str]:
    """The typed settings that nobody in this worker has asked for."""
    from distributed.config.registry import REGISTRY

    if _this.handover is None or _this.is_taken:
        return []
    used = _FOR_ANY_SCRIPT.union(f"{row.group}.{name}" for row in REGISTRY.values() for name in row.for_launcher)
    names: dict[str, None] = {}  # a set in order
    for typed in (_this.handover.typed.file, _this.handover.typed.flag):
        for name, value in typed.items():
            names.update(
                dict.fromkeys([f"{name}.{option}" for option in value] if isinstance(value, Mapping) else [name])
            )
    return [name for name in names if name not in used and name not in _this.asked]


def has_trainer() -> bool:
    """Whether a Trainer was made in this process."""
    return _this.is_taken


def link() -> Link | None:
    """The way to our launcher, or None in a process that it did not start."""
    return _this.link


def launched_by() -> LaunchRequest | None:
    """What our launcher was asked for, in a worker that it started; None in any other process."""
    return _this.request


def tell(given: Handover, link_fd: int | None = None, request: LaunchRequest | None = None) -> None:
    """Make `given` this process' handover, `link_fd` its way to the launcher and `request` what that was asked for. Entry of
    a worker only."""
    os.environ.pop(HANDOVER_VARIABLE, None)
    _this.handover, _this.is_told = given, True
    _this.link = Link(link_fd) if link_fd is not None else None
    _this.request = request


# What to launch


@dataclasses.dataclass(frozen=True)
class LaunchRequest:
    """All that a launcher process must know. JSON-able. Either `script` or `payload` is what the workers run."""

    run_dir: str
    typed: Typed = dataclasses.field(default_factory=Typed)
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
    before_script: str = ""  # "module:function" that each worker calls first, see BackendRow
    max_restarts: int = 3
    restart_on_exception: bool = False
    monitor_interval: float = 0.1  # seconds between two looks at the workers
    start_timeout: float = 600.0  # seconds all nodes may take to join
    timeout_s: float = 300.0  # seconds workers may take to end after a signal
    verbose: bool = True
    again: str = ""  # the command that goes on with this run, shown where a signal ended it
    live: bool | None = None  # a progress bar: None where the output is a terminal
    started_lines: tuple[str, ...] = ()  # shown once, before the workers start
    launcher: str = "distributed.launching.forkserver"  # the module whose `serve` starts and watches the workers
    launcher_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what only that launcher reads
    epochs_fd: int | None = None  # a descriptor that gets the row of each finished epoch as a JSON line
    bar_fd: int | None = None  # one that gets what a progress bar shows, for a notebook

    @property
    def world_size(self) -> int:
        """Workers in all."""
        return self.num_nodes * self.nproc_per_node

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LaunchRequest:
        """The request that `to_json` wrote."""
        content = json.loads(text)
        for name in ("script_args", "preload", "started_lines"):
            content[name] = tuple(content[name])
        if content["sys_path"] is not None:
            content["sys_path"] = tuple(content["sys_path"])
        return cls(**{**content, "typed": typed_from(content["typed"])})


_FROM_CONFIG = (
    "node_rank", "max_restarts", "restart_on_exception", "monitor_interval", "start_timeout", "timeout_s", "verbose",
)  # fmt: skip


def make_request(
    merged: MergedConfig, plan: ProcessPlan, row: BackendRow, run_dir: str, *, typed: Typed, started_lines: Sequence[str], **more: Any
) -> LaunchRequest:  # fmt: skip
    """Return the request for the processes of `plan` under the settings `merged`.

    Args:
        merged: the settings; their notices are shown at the start, before `started_lines`.
        plan: the processes to start.
        row: the backend, as its options make it.
        run_dir: the run directory.
        typed: what the workers get of the values that were set outside the script.
        started_lines: what is shown once, before the workers start.
        more: further fields of the request, such as the script or the payload.
    """
    settings = {name: getattr(merged.config, name) for name in _FROM_CONFIG}
    return LaunchRequest(
        run_dir, dataclasses.replace(typed, notices=()), nproc_per_node=plan.nproc_per_node, num_nodes=plan.num_nodes,
        device=plan.device, preload=row.preload, rendezvous=row.rendezvous, before_script=row.before_script,
        started_lines=(*merged.notices, *started_lines), **settings, **more,
    )  # fmt: skip


def check_script(script: str) -> None:
    """Raise ConfigError where `script` cannot be run, naming a file of a similar name where there is one; ScriptError where
    it does not compile."""
    path = Path(script)
    if path.is_file():
        if not os.access(path, os.R_OK):
            raise ConfigError(f"script {script!r} cannot be read: check its permissions")
        _check_syntax(script, path.read_bytes())
        return
    if path.is_dir():
        raise ConfigError(f"script {script!r} is a directory: name the file with --script")
    there = [other.name for other in path.parent.glob("*.py")] if path.parent.is_dir() else []
    hint = nearest(path.name, there)
    raise ConfigError(
        f"script {script!r} does not exist{hint}: check --script, the working directory is {str(Path.cwd())!r}"
    )


def _check_syntax(script: str, source: bytes) -> None:
    """Raise ScriptError with Python's own words where `source` does not compile. Warnings are left to the workers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            compile(source, script, "exec", dont_inherit=True)
        except (SyntaxError, ValueError) as error:  # ValueError: a null byte, in Python 3.11
            said = "".join(traceback.format_exception_only(error)).rstrip()
            raise ScriptError(f"script {script!r} does not compile:\n{said}") from None
        except (RecursionError, MemoryError):  # too deep for the compiler here: the workers will see
            return


def thread_count(local_processes: int) -> int:
    """Threads each process of this machine gets: its share of the cores, or what OMP_NUM_THREADS says."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdigit() and int(given) > 0:
        return int(given)
    return max(1, _cores() // max(1, local_processes))


def crowding(local_processes: int) -> str | None:
    """A warning where this machine gets far more processes than it has cores; else None."""
    cores = _cores()
    if local_processes <= _MOST_PER_CORE * cores:
        return None
    return (
        f"{local_processes} processes share {cores} core{'s' * (cores > 1)}, more than {_MOST_PER_CORE} on each:"
        " they start slowly and wait for each other; lower --nproc-per-node"
    )


def _cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_missing(environ: Mapping[str, str]) -> None:
    """Set the variables of `environ` that the user has not set."""
    for name, value in environ.items():
        os.environ.setdefault(name, value)


def set_thread_variables(local_processes: int) -> None:
    """Share the cores of this machine between its processes, unless the user did."""
    threads = str(thread_count(local_processes))
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, threads)
