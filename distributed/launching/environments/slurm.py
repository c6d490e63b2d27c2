"""Tasks of a step of Slurm's `srun`. The shell of a batch script is not a task: it launches tasks."""

from __future__ import annotations

import re
from collections.abc import Mapping

from distributed.launching.environments import tf_config
from distributed.launching.environments.base import (
    Node,
    NodeEnvironment,
    Surroundings,
    Worker,
    WorkerEnvironment,
    derived_port,
    number,
)

_NOT_A_STEP = {"", "4294967290", "4294967291", "4294967292", "-5", "-6", "-4"}  # interactive, batch and extern step


def worker(at: Surroundings) -> Worker:
    """Return this task of a step as one worker, False if it is to launch the workers of its node, or None outside a step.

    In a step of one task, such as the shell of `srun --pty`, a TF_CONFIG with several workers takes precedence.
    """
    environ = at.environ
    if not is_step(environ):
        return None
    is_alone = number(environ, "SLURM_NTASKS", 1) == 1
    given = at.nproc_per_node or 0
    if (given > 1 or (given == 1 and not is_alone)) and _one_task_per_node(environ):
        return False
    return (tf_config.worker(at) if is_alone else None) or _task(environ)


def node(at: Surroundings) -> Node:
    """Return the rank of this node in a step with one task per node, False in other steps, or None outside a step."""
    environ = at.environ
    if not is_step(environ):
        return None
    if not _one_task_per_node(environ):
        return False
    addr, port = _master(environ)
    return NodeEnvironment(number(environ, "SLURM_NTASKS", 1), number(environ, "SLURM_PROCID"), addr, port)


def job(environ: Mapping[str, str]) -> str:
    """Return a name of this step. A requeued job keeps it."""
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")
    return f"slurm {environ['SLURM_JOB_ID']}.{step}" if "SLURM_JOB_ID" in environ else ""


def is_step(environ: Mapping[str, str]) -> bool:
    """Return whether this process is in a step of `srun`.

    The shell of a batch script has SLURM_PROCID=0 too, but no regular step number.
    """
    step = environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID") or ""
    return step not in _NOT_A_STEP and "SLURM_PROCID" in environ and "SLURM_NTASKS" in environ


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether SLURM_PROCID is the number of a task, even if SLURM_STEP_ID is missing, for instance in a container.

    The shell of a batch script has SLURM_PROCID=0, so any higher number belongs to a task.
    """
    return is_step(environ) or number(environ, "SLURM_PROCID", 0) > 0


def expand_hostlist(text: str) -> list[str]:
    """Return the hosts of Slurm's compressed list one by one: `n[01-03,7],gpu1` -> n01, n02, n03, n7, gpu1."""
    hosts: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        hosts.extend(_expand(item))
    return hosts


def _expand(item: str) -> list[str]:
    match = re.match(r"([^\[]*)\[([^\]]*)\](.*)", item)
    if not match:
        return [item]
    head, ranges, tail = match.groups()
    names = []
    for part in ranges.split(","):
        low, _, high = part.partition("-")
        names += [f"{head}{n:0{len(low)}d}" for n in range(int(low), int(high or low) + 1)]
    return [name + rest for name in names for rest in _expand(tail)]


def _one_task_per_node(environ: Mapping[str, str]) -> bool:
    nodes = number(environ, "SLURM_STEP_NUM_NODES", number(environ, "SLURM_NNODES", 1))
    return number(environ, "SLURM_NTASKS", 1) == nodes


def _task(environ: Mapping[str, str]) -> WorkerEnvironment:
    addr, port = _master(environ)
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or environ["SLURM_NTASKS"]
    node = number(environ, "SLURM_NODEID", 0)
    return WorkerEnvironment(
        number(environ, "SLURM_PROCID"), number(environ, "SLURM_LOCALID", 0), number(environ, "SLURM_NTASKS"),
        _tasks_on(tasks, node), node, addr, port, number(environ, "SLURM_RESTART_COUNT", 0), "slurm",
    )  # fmt: skip


def _master(environ: Mapping[str, str]) -> tuple[str, int]:
    """Return the host of the step's first node, and a port that is the same in every task of the step."""
    nodes = (
        environ.get("SLURM_STEP_NODELIST") or environ.get("SLURM_NODELIST") or environ.get("SLURM_JOB_NODELIST") or ""
    )
    hosts = expand_hostlist(nodes)
    addr = environ.get("MASTER_ADDR") or (hosts[0] if hosts else environ.get("SLURM_LAUNCH_NODE_IPADDR", "127.0.0.1"))
    key = f"{environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return addr, number(environ, "MASTER_PORT", derived_port(key))


def _tasks_on(tasks_per_node: str, node: int) -> int:
    """Return the number of tasks on node number `node` in Slurm's `2(x3),1`."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[node] if node < len(counts) else 1
