"""Check the given settings and start the workers: processes, addresses, the launch plan, `--dry-run`."""

from __future__ import annotations

import dataclasses
import os
import shlex
import shutil
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distributed.backends import make_backend
from distributed.backends._keras.scripts import check_keras_backend, environ_for
from distributed.backends.base import Backend
from distributed.backends.effects import Situation, lines_of, without_effect
from distributed.checkpoints.manifest import check_source
from distributed.config.merging import MergedConfig, Overrides, merge
from distributed.config.plan import ProcessPlan, choose_backend, plan_batch, plan_processes, starting_line
from distributed.config.registry import groups_in_use, row_in_use, starting_of
from distributed.config.settings import GROUPS, DistributedConfig, nproc_of_world
from distributed.errors import ConfigError, ResourceError
from distributed.launching.environments.base import WorkerEnvironment
from distributed.launching.environments.registry import node_environment, worker_environment
from distributed.launching.environments.torchrun import pass_over_stale_rank
from distributed.launching.exposure import launcher_warnings, warnings_of
from distributed.launching.forkserver import launch
from distributed.launching.listening import listen_at
from distributed.launching.request import Handover, LaunchRequest, make_request
from distributed.launching.script import check_script
from distributed.launching.variables import set_missing, set_thread_variables, thread_count
from distributed.loggers import registry as loggers
from distributed.runs.directory import RunDirectory, choose_run_dir

_NODE_SETTINGS = ("num_nodes", "node_rank", "master_addr", "master_port")


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
    """Run the given job, here or in workers of our own. Return the exit code.

    Args:
        overrides: the settings given outside the script, and the script.
        run_dir: the run directory; None for a new one.
        resume: whether to go on with the run in `run_dir`.
        dry_run: show what would be started, and start nothing.
        world_size: the number of processes, on this machine or cut over its nodes.
        rank: the rank of this process, which is then one of them.
        words: flags of `train` that start it again, without its run directory and the script's own arguments.

    Raises:
        DistributedError: before anything starts.
    """
    this = None if rank is None else _this_worker(overrides, world_size, rank)
    if this is not None:
        overrides = _without_address(overrides)
    overrides, merged = _merged(overrides, world_size, is_starting=this is None)
    asked = _asked_processes(merged.config)
    environment = this or worker_environment(nproc_per_node=asked, num_nodes=merged.config.num_nodes)
    if environment is not None and not dry_run:
        os.environ.update(this.to_environ() if this is not None else {})
        return _run_as_worker(overrides, merged, environment, run_dir, resume)
    plan = plan_processes(merged.config)
    backend, request = _checked_request(overrides, merged, plan, run_dir, resume)
    if this is None:
        _check_port(merged.config)
    if dry_run:
        sys.stdout.write("\n".join(_dry_run_lines(merged, backend, request, this)) + "\n")
        return 0
    if merged.source("checkpoint_dir") == "flag":  # a script may name another directory
        RunDirectory(str(merged.config.checkpoint_dir), "checkpoint_dir", "--checkpoint-dir").check(resume=True)
    if merged.source("tensorboard_dir") == "flag":
        loggers.check_directories(merged)
    return launch(dataclasses.replace(request, again=_again(words, request)))


def _again(words: Sequence[str], request: LaunchRequest) -> str:
    """Return the command that goes on with the run."""
    own = ["--", *request.script_args] if request.script_args else []
    return shlex.join([
        _python(), "-m", "distributed.cli", "train", *words, "--run-dir", request.run_dir, "--resume", *own,
    ])  # fmt: skip


def _python() -> str:
    """Return `python` if a shell finds the running interpreter by that name, else the path of the interpreter."""
    found = shutil.which("python")
    is_found = found is not None and _location(found) == _location(sys.executable)
    return "python" if is_found else sys.executable


def _location(python: str) -> tuple[Path, Path]:
    """Return what tells interpreters apart. That of a virtual environment is a link to another, in a directory of its own."""
    return Path(python).parent.resolve(), Path(python).resolve()


def launch_request(overrides: Overrides, run_dir: str | None) -> LaunchRequest:
    """Return the request that `start` would launch from a process that is no worker.

    Raises DistributedError as it does.
    """
    overrides, merged = _merged(overrides)
    _, request = _checked_request(overrides, merged, plan_processes(merged.config), run_dir, False)
    _check_port(merged.config)
    return request


def _checked_request(
    overrides: Overrides, merged: MergedConfig, plan: ProcessPlan, run_dir: str | None, resume: bool
) -> tuple[Backend[Any], LaunchRequest]:
    backend = _refuse(overrides, merged, plan, run_dir, resume)
    config, script = merged.config, _script(overrides)
    where = run_dir if run_dir is not None else str(choose_run_dir(script))
    row, starter = row_in_use(config, plan.backend), starting_of(plan.backend)
    starting = starting_line(plan, is_chosen=config.backend is not None)
    lines = [*warnings_of(config, plan), _plan_line(plan), f"run directory: {where}", starting]
    request = make_request(
        merged, plan, row, where, overrides=overrides, started_lines=lines, script=script, script_args=overrides.script_args, resume=resume,
        master_addr=config.master_addr, master_port=config.master_port,
        # A script that chooses its backend, or makes no Trainer, sets what its engine needs itself.
        environ={} if config.backend is None else environ_for(Path(script), row.environ),
        launcher=starter.launcher(), launcher_options=starter.launcher_options(config, plan),
    )  # fmt: skip
    return backend, request if config.node_rank == 0 else dataclasses.replace(request, started_lines=())


def _asked_processes(config: DistributedConfig) -> int | None:
    """Return the processes per node that were explicitly asked for, or None."""
    total = config.num_gpus // config.num_nodes if config.num_gpus else None
    return config.nproc_per_node or config.gpus_per_node or total


def _without_address(overrides: Overrides) -> Overrides:
    """Return `overrides` without the address of rank 0.

    It is in the environment of a worker that was started by hand.
    """
    file, flag = (
        {name: value for name, value in layer.items() if name not in ("master_addr", "master_port")}
        for layer in (overrides.file, overrides.flag)
    )
    return dataclasses.replace(overrides, file=file, flag=flag)


def _merged(
    overrides: Overrides, world_size: int | None = None, *, is_starting: bool = False
) -> tuple[Overrides, MergedConfig]:
    """Return the settings given outside the script, with what the environment adds to them, and all of them merged.

    Args:
        overrides: the settings given.
        world_size: the number of processes on all nodes, if it was given.
        is_starting: whether this command starts workers. A stale RANK=0, exported for other scripts, is then removed from the
            environment if processes were asked for.
    """
    merged = merge(overrides, {})
    asked = _asked_processes(merged.config) or world_size
    notices = [pass_over_stale_rank(os.environ, nproc_per_node=asked)] if is_starting and asked is not None else []
    found = _from_node(overrides, asked)
    if world_size is not None:
        found["nproc_per_node"], notice = _per_node(overrides, world_size, found)
        notices.append(notice)
    added = tuple(notice for notice in notices if notice is not None)
    if not found and not added:
        return overrides, merged
    overrides = dataclasses.replace(overrides, flag={**overrides.flag, **found}, notices=(*overrides.notices, *added))
    return overrides, merge(overrides, {})


def _from_node(overrides: Overrides, asked: int | None) -> dict[str, Any]:
    """Return the number of nodes and processes that nobody gave, from Slurm or from the variables of a pod."""
    given = {**overrides.file, **overrides.flag}
    node = node_environment(nproc_per_node=asked)
    if node is None or node.num_nodes != given.get("num_nodes", node.num_nodes):
        return {}
    found = {name: getattr(node, name) for name in _NODE_SETTINGS if node.num_nodes > 1 and name not in given}
    return found | (
        {"nproc_per_node": node.nproc_per_node} if asked is None and node.nproc_per_node is not None else {}
    )


def _per_node(overrides: Overrides, world_size: int, found: Mapping[str, Any]) -> tuple[int, str]:
    """Return (the processes of each node, a notice) for `world_size` processes on all nodes."""
    num_nodes = {"num_nodes": 1, **overrides.file, **overrides.flag, **found}["num_nodes"]
    each, notice = nproc_of_world(world_size, num_nodes)
    other = overrides.flag.get("nproc_per_node", each)
    if other != each:
        raise ConfigError(f"--world-size {world_size} contradicts --nproc-per-node {other}: drop one of them")
    return each, notice


def _this_worker(overrides: Overrides, world_size: int | None, rank: int) -> WorkerEnvironment:
    """Return the place of this command, which `--rank` makes one worker among others that are started by hand."""
    given = {**overrides.file, **overrides.flag}
    if world_size is None:
        raise ConfigError(
            f"--rank {rank} needs --world-size, the number of processes in all (--node-rank numbers a machine)"
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
    if given.get("master_addr"):
        variables["MASTER_ADDR"] = str(given["master_addr"])
    if given.get("master_port"):
        variables["MASTER_PORT"] = str(given["master_port"])
    found = worker_environment({**os.environ, **variables})
    assert found is not None  # RANK and WORLD_SIZE are set
    return found


def _run_as_worker(
    overrides: Overrides, merged: MergedConfig, environment: WorkerEnvironment, run_dir: str | None, resume: bool
) -> int:
    """Run the script in this process, which another launcher started."""
    per_node = merged.config.nproc_per_node
    if per_node is not None and per_node * merged.config.num_nodes != environment.world_size:
        raise ConfigError(
            f"--nproc-per-node {per_node} x --num-nodes {merged.config.num_nodes} is not the running world of"
            f" {environment.world_size}: this process already is a worker, drop the flags"
        )
    script = _script(overrides)
    row = row_in_use(merged.config, choose_backend(merged.config, environment.world_size))
    check_script(script)
    check_keras_backend(Path(script), row.environ["KERAS_BACKEND"])
    set_thread_variables(environment.local_world_size)
    if merged.config.backend is not None:
        set_missing(environ_for(Path(script), row.environ))
    from distributed.launching.worker import run_here

    for text in launcher_warnings(environment) if environment.rank == 0 else ():
        sys.stderr.write(f"warning: {text}\n")
    handover = Handover(overrides, run_dir, resume, environment.restart_count)
    return run_here(handover, environment, row.before_script)


def _refuse(
    overrides: Overrides, merged: MergedConfig, plan: ProcessPlan, run_dir: str | None, resume: bool
) -> Backend[Any]:
    """Refuse what can be known to be wrong before anything starts, arithmetic first. Return the backend."""
    backend = make_backend(merged, plan)
    loggers.check_libraries(merged)
    plan_batch(merged, backend.data_parallel_size)
    if merged.is_given("backend"):
        used = (*groups_in_use(merged.config, plan.backend), "data")
        for group in GROUPS:
            if group not in used and overrides.flag.get(group):
                option = f"{group}.{next(iter(overrides.flag[group]))}"
                raise ConfigError(f"--set {option} has no effect with backend={plan.backend!r}: drop it")
    if resume and run_dir is None:
        raise ConfigError("--resume needs the directory of the run: add --run-dir RUN")
    _refuse_sources(merged, RunDirectory(run_dir) if resume and run_dir is not None else None)
    if plan.num_nodes > 1 and (run_dir is None or not merged.config.master_port):
        what = "run_dir" if run_dir is None else "master_port"
        raise ConfigError(
            f"num_nodes={plan.num_nodes} needs the same {what} on every node: add --{what.replace('_', '-')}"
        )
    check_script(_script(overrides))
    check_keras_backend(Path(_script(overrides)), row_in_use(merged.config, plan.backend).environ["KERAS_BACKEND"])
    return backend


def _check_port(config: DistributedConfig) -> None:
    """Raise ResourceError if the launcher of node 0 cannot listen on `master_port`. On one node it does not listen."""
    if not config.master_port or config.node_rank > 0 or config.num_nodes == 1:
        return
    try:
        with listen_at(config.master_addr, config.master_port, is_alone=False) as listener:
            listener.listen()
    except socket.gaierror as error:
        raise ResourceError(
            f"master_addr={config.master_addr!r} cannot be resolved here ({error.strerror}): correct it"
        ) from None
    except OSError as error:
        raise ResourceError(
            f"master_port={config.master_port} cannot be listened on ({error.strerror or error}): name another, or drop it"
        ) from None


def _refuse_sources(merged: MergedConfig, resumed: RunDirectory | None) -> None:
    """Refuse a checkpoint or a run that cannot be resumed.

    A run that has begun goes on from its own checkpoints, whatever it started from.
    """
    if resumed is not None and (merged.config.node_rank == 0 or resumed.path.exists()):  # only node 0 may have it
        resumed.check_resumable()
    source = merged.config.resume_from_checkpoint
    if isinstance(source, str) and (resumed is None or not resumed.events.exists()):
        check_source(source)


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
