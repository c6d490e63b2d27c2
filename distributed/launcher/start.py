"""Check the given settings and start the workers: processes, addresses, the launch plan, `--dry-run`."""

from __future__ import annotations

import dataclasses
import functools
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.backends import entry_in_use, groups_in_use, make_backend, plan_of, starting_of
from distributed.backends.base import Backend
from distributed.backends.effects import Situation, lines_of, without_effect
from distributed.backends.keras_scripts import check_keras_backend, environ_for
from distributed.checkpoints.manifest import check_source
from distributed.checkpoints.weights import check_weights
from distributed.config.addresses import check_library, is_address
from distributed.config.merging import MergedConfig, Overrides, merge
from distributed.config.plan import ProcessPlan, check_nodes, choose_backend, plan_batch, plan_processes, starting_line
from distributed.config.registry import backend_entry
from distributed.config.settings import DEFAULT_PORT, GROUPS, DistributedConfig, nproc_of_world
from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments import pod
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import node_environment, worker_environment
from distributed.launching.environments.torchrun import pass_over_stale_rank
from distributed.launching.exposure import launcher_warnings, warnings_of
from distributed.launching.forkserver import launch
from distributed.launching.listening import listen_at, may_listen_at
from distributed.launching.nodes import wait_for_name
from distributed.launching.request import Handover, LaunchRequest, make_request
from distributed.launching.script import check_script
from distributed.launching.variables import set_missing, set_thread_variables, thread_count
from distributed.loggers import registry as loggers
from distributed.runs.directory import RunDirectory, choose_run_dir
from distributed.runs.remote import directory_of, take_remote

_ADDRESS = ("master_addr", "master_port")  # of rank 0
_NODE_SETTINGS = ("num_nodes", "node_rank", *_ADDRESS)


def start(
    overrides: Overrides,
    *,
    run_dir: str | None,
    resume: bool,
    dry_run: bool,
    world_size: int | None = None,
    rank: int | None = None,
    words: Sequence[str] = (),
) -> int:
    """Run the script in this process if it is a worker, otherwise start workers that run it. Return the exit code.

    Args:
        overrides: the settings given outside the script, and the script.
        run_dir: the run directory; None for a new one.
        resume: whether to go on with the run in `run_dir`.
        dry_run: show what would be started, and start nothing.
        world_size: the number of processes on all nodes.
        rank: the rank of this process, if it is to be one of these processes; None to start the workers.
        words: flags of `train` that start the run again, without the run directory and the script's own arguments.

    Raises:
        DistributedError: a check failed before anything started.
    """
    address, run_dir = run_dir, directory_of(run_dir)
    this = None if rank is None else _this_worker(overrides, world_size, rank)
    if this is not None:
        overrides = overrides.without(_ADDRESS)  # the worker reads it from its environment
    overrides, merged = _merged(overrides, world_size, is_starting=this is None)
    given = _given_processes(overrides)
    environment = this or worker_environment(nproc_per_node=given, num_nodes=merged.config.num_nodes)
    if environment is not None and not dry_run:
        os.environ.update(this.to_environ() if this is not None else {})
        if is_address(address) and environment.rank == 0 and not environment.restart_count:
            take_remote(str(address), resume=resume)
        return _run_as_worker(overrides, merged, environment, run_dir, resume)
    asks_for_rank = environment is None and _has_no_rank(merged)
    if asks_for_rank:  # until node 0 assigns the number, any but 0 will do
        overrides = dataclasses.replace(overrides, flag={**overrides.flag, "node_rank": 1})
        merged = merge(overrides, {})
    plan = plan_of(merged.config)
    if is_address(address) and merged.config.node_rank == 0 and not dry_run:
        _check_settings(overrides, merged, plan)  # first, because it needs no connection
        take_remote(str(address), resume=resume)
    backend, request = _checked_request(overrides, merged, plan, address, resume)
    if not dry_run:
        _wait_for_name(request)
    if this is None and not backend_entry(plan.backend).places_workers:
        _check_port(request)
    if dry_run:
        sys.stdout.write("\n".join(_dry_run_lines(merged, backend, request, this)) + "\n")
        return 0
    is_node_0 = merged.config.node_rank == 0  # its launcher checks for all, and resumes the run
    own = merged.config.checkpoint_dir
    # The script may override a weaker source.
    if is_node_0 and merged.source("checkpoint_dir") == "flag" and not is_address(own):
        RunDirectory(str(own), "checkpoint_dir", "--checkpoint-dir").check(resume=True)
    if merged.source("tensorboard_dir") == "flag":
        loggers.check_directories(merged)
    again = _again(words, request, str(address) if is_address(address) else request.run_dir) if is_node_0 else ""
    return launch(dataclasses.replace(request, again=again, asks_for_rank=asks_for_rank))


def _has_no_rank(merged: MergedConfig) -> bool:
    """Return whether node 0 has to number this node: no number was given, and this machine is not that of node 0.

    On the machine of node 0, the first command is node 0.
    """
    config = merged.config
    if config.num_nodes == 1 or merged.is_given("node_rank") or not merged.is_given("master_addr"):
        return False
    try:
        return not may_listen_at(config.master_addr, config.master_port or DEFAULT_PORT)
    except OSError:  # the host name cannot be resolved: joining the other nodes reports this later
        return True


def _again(words: Sequence[str], request: LaunchRequest, run_dir: str) -> str:
    """Return the command that resumes the run."""
    own = ["--", *request.script_args] if request.script_args else []
    return shlex.join([
        _python(), "-m", "distributed.cli", "train", *words, "--run-dir", run_dir, "--resume", *own,
    ])  # fmt: skip


def _python() -> str:
    """Return `python` if a shell finds the running interpreter by that name, else the path of the interpreter."""
    found = shutil.which("python")
    is_found = found is not None and _location(found) == _location(sys.executable)
    return "python" if is_found else sys.executable


def _location(python: str) -> tuple[Path, Path]:
    """Return a key that identifies an interpreter.

    The key has the directory too, because the interpreter of a virtual environment is a link to another interpreter.
    """
    return Path(python).parent.resolve(), Path(python).resolve()


def launch_request(overrides: Overrides, run_dir: str | None) -> LaunchRequest:
    """Return the request that `start` would launch from a process that is not a worker.

    Raises DistributedError as `start` does.
    """
    overrides, merged = _merged(overrides)
    plan = plan_of(merged.config)
    if is_address(run_dir) and merged.config.node_rank == 0:
        _check_settings(overrides, merged, plan)
        take_remote(str(run_dir), resume=False)
    _, request = _checked_request(overrides, merged, plan, run_dir, False)
    _wait_for_name(request)
    if not backend_entry(plan.backend).places_workers:
        _check_port(request)
    return request


def check_for_elsewhere(overrides: Overrides, gpus: int) -> tuple[MergedConfig, ProcessPlan]:
    """Check the settings of a run that other machines will start. Return (merged settings, processes).

    `gpus` is the number of GPUs of each node. Raises DistributedError for what is known to be wrong.
    """
    merged = merge(overrides, {})
    plan = plan_processes(merged.config, lambda: gpus)
    _check_settings(overrides, merged, plan)
    return merged, plan


def _checked_request(
    overrides: Overrides, merged: MergedConfig, plan: ProcessPlan, address: str | None, resume: bool
) -> tuple[Backend[Any], LaunchRequest]:
    """Check everything that can be checked now. Return the adapter and the request for the launcher.

    `address` is the run directory as it was given: a path, an address, or None for a new one.
    """
    run_dir = directory_of(address)
    is_there = (
        not is_address(address) or Path(str(run_dir)).exists()
    )  # with `--dry-run` the directory may be missing, because nothing is downloaded
    backend = _refuse(overrides, merged, plan, run_dir, resume, is_there=is_there)
    config, script = merged.config, _script(overrides)
    is_named_later = plan.num_nodes > 1 and config.node_rank > 0  # node 0 tells this node the name of the run directory
    where = run_dir if run_dir is not None else "" if is_named_later else str(choose_run_dir(script))
    entry, starter = entry_in_use(config, plan.backend), starting_of(plan.backend)
    starting = starting_line(plan, is_chosen=config.backend is not None, is_elastic=config.is_elastic)
    copied = f", copied to {address}" if is_address(address) else ""
    lines = [*warnings_of(config, plan, entry), _plan_line(plan), f"run directory: {where}{copied}", starting]
    request = make_request(
        merged, plan, entry, where, overrides=overrides, started_lines=lines, script=script, script_args=overrides.script_args, resume=resume,
        # A script that chooses its backend, or creates no Trainer, sets the variables of its engine itself.
        environ={} if config.backend is None else environ_for(Path(script), entry.environ),
        launcher=starter.launcher(), launcher_options=starter.launcher_options(config, plan),
    )  # fmt: skip
    return backend, request if config.node_rank == 0 else dataclasses.replace(request, started_lines=())


def _given_processes(overrides: Overrides) -> int | None:
    """Return the processes per node that were given, or None. Raises ConfigError for a wrong number."""
    config = DistributedConfig(**overrides.only(("num_gpus", "num_nodes", "nproc_per_node", "gpus_per_node")).values())
    total = config.num_gpus // config.num_nodes if config.num_gpus else None
    return config.nproc_per_node or config.gpus_per_node or total


def _merged(
    overrides: Overrides, world_size: int | None = None, *, is_starting: bool = False
) -> tuple[Overrides, MergedConfig]:
    """Return (the settings given outside the script, completed from the environment; all settings merged).

    Args:
        overrides: the settings given.
        world_size: the number of processes on all nodes, if it was given.
        is_starting: whether this command starts workers. If it does and a number of processes was given, a stale RANK=0 that was
            exported for other scripts is removed from the environment.
    """
    given = _given_processes(overrides) or world_size
    notices = [pass_over_stale_rank(os.environ, nproc_per_node=given)] if is_starting and given is not None else []
    found = _from_node(overrides, given)
    if world_size is not None:
        found["nproc_per_node"], notice = _per_node(overrides, world_size, found)
        notices.append(notice)
    added = (notice for notice in notices if notice is not None)
    overrides = dataclasses.replace(overrides, flag={**overrides.flag, **found}, notices=(*overrides.notices, *added))
    return overrides, merge(overrides, {})


def _from_node(overrides: Overrides, nproc_per_node: int | None) -> dict[str, Any]:
    """Return the settings of nodes and processes that Slurm or the variables of a pod define and nobody has given."""
    given = overrides.values()
    node = node_environment(nproc_per_node=nproc_per_node)
    if node is None or node.num_nodes != given.get("num_nodes", node.num_nodes):
        return {}
    found = {name: getattr(node, name) for name in _NODE_SETTINGS if node.num_nodes > 1 and name not in given}
    return found | (
        {"nproc_per_node": node.nproc_per_node} if nproc_per_node is None and node.nproc_per_node is not None else {}
    )


def _per_node(overrides: Overrides, world_size: int, found: Mapping[str, Any]) -> tuple[int, str]:
    """Return (the processes of each node, a notice) for `world_size` processes on all nodes."""
    num_nodes = found.get("num_nodes", overrides.value("num_nodes", 1))
    each, notice = nproc_of_world(world_size, num_nodes)
    other = overrides.flag.get("nproc_per_node", each)
    if other != each:
        raise ConfigError(f"--world-size {world_size} contradicts --nproc-per-node {other}: drop one of them")
    return each, notice


def _this_worker(overrides: Overrides, world_size: int | None, rank: int) -> WorkerEnvironment:
    """Return the worker that `--rank` names. The user starts such workers by hand, with one command for each."""
    if world_size is None:
        raise ConfigError(
            f"--rank {rank} needs --world-size, the total number of processes (--node-rank is the index of a machine)"
        )
    if rank >= world_size:
        raise ConfigError(f"--rank {rank} is not below --world-size {world_size}: number the processes from 0")
    for name in ("nproc_per_node", "gpus_per_node", "num_gpus", "num_nodes", "node_rank"):
        if name in overrides.flag:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"--rank {rank} makes this command one worker, and {flag} is for starting several: drop one"
            )
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size)}
    for name, value in variables.items():
        if os.environ.get(name, value) not in (value, ""):
            flag = f"--{name.lower().replace('_', '-')} {value}"
            raise ConfigError(f"{flag} contradicts {name}={os.environ[name]} in the environment: drop one of them")
    variables |= {name.upper(): str(value) for name in _ADDRESS if (value := overrides.value(name))}
    found = worker_environment({**os.environ, **variables})
    assert found is not None  # because `variables` has RANK and WORLD_SIZE
    return found


def _run_as_worker(
    overrides: Overrides, merged: MergedConfig, environment: WorkerEnvironment, run_dir: str | None, resume: bool
) -> int:
    """Run the script in this process, which another launcher started."""
    per_node = merged.config.nproc_per_node
    if per_node is not None and per_node * merged.config.num_nodes != environment.world_size:
        raise ConfigError(
            f"--nproc-per-node {per_node} x --num-nodes {merged.config.num_nodes} is not the number of processes of this run,"
            f" {environment.world_size}: another launcher started this process as a worker, drop the flags"
        )
    script = _script(overrides)
    plan = _plan_of_world(merged.config, environment)
    entry = entry_in_use(merged.config, plan.backend)
    check_script(script)
    check_keras_backend(Path(script), entry.environ)
    set_thread_variables(environment.local_world_size)
    if merged.config.backend is not None:
        set_missing(environ_for(Path(script), entry.environ))
    from distributed.launching.worker import run_here

    for text in launcher_warnings(environment) if environment.rank == 0 else ():
        sys.stderr.write(f"warning: {text}\n")
    handover = Handover(overrides, run_dir, resume, environment.restart_count)
    request = make_request(
        merged, plan, entry, run_dir or "", overrides=overrides, started_lines=(), script=script, script_args=overrides.script_args,
        resume=resume,
    )  # fmt: skip
    return run_here(handover, request, environment)


def _plan_of_world(config: DistributedConfig, found: WorkerEnvironment) -> ProcessPlan:
    """Return the plan of the running world. Its device is the CPU if the settings name none, which a script may change."""
    backend, each = choose_backend(config, found.world_size), max(1, found.local_world_size)
    return ProcessPlan(found.world_size // each, each, config.device or "cpu", backend)


def _refuse(
    overrides: Overrides, merged: MergedConfig, plan: ProcessPlan, run_dir: str | None, resume: bool, *, is_there: bool
) -> Backend[Any]:
    """Raise an error for everything that is known to be wrong before anything starts. Return the backend."""
    backend = _check_settings(overrides, merged, plan)
    if resume and run_dir is None and merged.config.node_rank == 0:  # the other nodes are told its name
        raise ConfigError("--resume needs the directory of the run: add --run-dir RUN")
    _refuse_sources(merged, RunDirectory(run_dir) if resume and run_dir is not None and is_there else None)
    check_nodes(merged, plan)
    return backend


def _check_settings(overrides: Overrides, merged: MergedConfig, plan: ProcessPlan) -> Backend[Any]:
    """Raise an error for settings and scripts that are wrong on any machine. Return the backend."""
    backend = make_backend(merged, plan)
    loggers.check_libraries(merged)
    check_library("checkpoint_dir", merged.config.checkpoint_dir)
    plan_batch(merged, backend.data_parallel_size)
    if merged.is_given("backend"):
        used = (*groups_in_use(merged.config, plan.backend), "data")
        for group in GROUPS:
            if group not in used and overrides.flag.get(group):
                option = f"{group}.{next(iter(overrides.flag[group]))}"
                raise ConfigError(f"--set {option} has no effect with backend={plan.backend!r}: drop it")
    check_script(_script(overrides))
    check_keras_backend(Path(_script(overrides)), entry_in_use(merged.config, plan.backend).environ)
    return backend


def _wait_for_name(request: LaunchRequest) -> None:
    """Wait in a pod until `master_addr` has an address. DNS has the name of pod 0 only some seconds after the pod's start.

    Raises ResourceError if it has none within `start_timeout`.
    """
    if request.num_nodes == 1 or not pod.is_pod(os.environ):
        return
    host, seconds = request.master_addr, request.start_timeout
    if not wait_for_name(host, seconds, functools.partial(print, file=sys.stderr, flush=True)):
        raise ResourceError(
            f"master_addr={host!r} did not resolve to an address within {seconds:g} s (start_timeout): check that pod 0 is running, and that a"
            " headless Service with publishNotReadyAddresses selects it"
        )


def _check_port(request: LaunchRequest) -> None:
    """Raise ResourceError if the launcher of node 0 cannot listen on `master_port`. A single node opens no such port."""
    if not request.master_port or request.node_rank > 0 or request.num_nodes == 1:
        return
    try:
        with listen_at(request.master_addr, request.master_port, is_alone=False) as listener:
            listener.listen()
    except socket.gaierror as error:
        raise ResourceError(
            f"master_addr={request.master_addr!r} cannot be resolved here ({error.strerror}): correct it"
        ) from None
    except OSError as error:
        raise ResourceError(
            f"master_port={request.master_port} cannot be listened on ({error.strerror or error}): name another on every node"
        ) from None


def _refuse_sources(merged: MergedConfig, resumed: RunDirectory | None) -> None:
    """Refuse a checkpoint or a run that cannot be resumed. Only node 0 must have them.

    A resumed run that has begun uses its own checkpoints, so its `resume_from_checkpoint` and `init_from` are not checked again.
    """
    if merged.config.node_rank > 0:
        return
    if resumed is not None:
        resumed.check_resumable()
    source, weights = merged.config.resume_from_checkpoint, merged.config.init_from
    if resumed is not None and resumed.events.exists():
        return
    if isinstance(source, str):
        check_source(source)
    elif weights is not None and not source:
        check_weights("init_from", weights)


def _script(overrides: Overrides) -> str:
    if overrides.script is None:
        raise ConfigError("no script to run: add --script train.py")
    return overrides.script


def _plan_line(plan: ProcessPlan) -> str:
    threads = thread_count(plan.nproc_per_node)
    nodes = f" on each of {plan.num_nodes} nodes" if plan.num_nodes > 1 else ""
    processes = f"{plan.nproc_per_node} process{'es' * (plan.nproc_per_node > 1)}"
    return f"{processes}{nodes}, device {plan.device}, {threads} thread{'s' * (threads > 1)} each"


def _dry_run_lines(
    merged: MergedConfig, backend: Backend[Any], request: LaunchRequest, this: WorkerEnvironment | None
) -> list[str]:
    plan = backend.plan
    values = merged.config.to_dict()
    names = sorted(values, key=lambda name: not merged.is_given(name))
    width = max(map(len, names))
    settings = [f"  {name:<{width}}  {_shown(values[name]):<14}  {merged.source(name)}" for name in names]
    return [
        *merged.notices,
        "settings (value, source):",
        *settings,
        "batch:",
        f"  {plan_batch(merged, backend.data_parallel_size)}",
        "  (if batch_size is not set, that of the loader is used)",
        "launch:",
        f"  script         {Path(request.script or '')} {' '.join(request.script_args)}".rstrip(),
        f"  backend        {plan.backend}"
        + ("" if merged.is_given("backend") else " (unless the script sets another one)"),
        f"  processes      {_plan_line(plan)}",
        *_this_lines(this),
        f"  run directory  {request.run_dir}",
        *lines_of(without_effect(Situation(backend, request)), " unless the script changes that"),
        "nothing was started (--dry-run)",
    ]


def _this_lines(this: WorkerEnvironment | None) -> list[str]:
    if this is None:
        return []
    where = f"{this.master_addr}:{this.master_port}"
    return [f"  this command   rank {this.rank} of {this.world_size}, joins the others at {where}"]


def _shown(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value or "none" if isinstance(value, dict) else value)
