"""RANK, WORLD_SIZE and what stands beside them: which values count, and which are half or left over."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence

from distributed.errors import ConfigError, ResourceError
from distributed.launching import pods


def has_rank(environ: Mapping[str, str]) -> bool:
    """Return whether RANK and WORLD_SIZE are both set."""
    return environ.get("RANK", "") != "" and environ.get("WORLD_SIZE", "") != ""


def is_bare_rank(environ: Mapping[str, str], argv: Sequence[str]) -> bool:
    """Return whether RANK and WORLD_SIZE stand alone, without anything else that the launcher of a worker sets."""
    return has_rank(environ) and not _is_launched(environ) and not any(map(is_local_rank, argv))


def _is_launched(environ: Mapping[str, str]) -> bool:
    return environ.get("LOCAL_RANK", "") != "" or any(name.startswith("TORCHELASTIC_") for name in environ)


def pass_over_stale_rank(
    environ: MutableMapping[str, str], argv: Sequence[str] | None = None, *, nproc_per_node: int
) -> str | None:
    """Remove a bare RANK=0 with its WORLD_SIZE, which asks for nothing beside `nproc_per_node`; returns the line that says so.

    Returns None, and removes nothing, where RANK counts: in a worker, in a pod that it numbers, and above 0.
    """
    is_bare = is_bare_rank(environ, sys.argv if argv is None else argv) and not is_pods_number(environ)
    if not is_bare or number(environ, "RANK") != 0:
        return None
    stale = f"RANK={environ.pop('RANK')} and WORLD_SIZE={environ.pop('WORLD_SIZE')}"
    return f"{stale} in the environment are ignored: nproc_per_node={nproc_per_node} says what to start"


def contradicting_rank(environ: Mapping[str, str], nproc_per_node: int | None) -> ConfigError:
    """Return the error for a bare RANK above 0 beside a request to start processes."""
    rank, world_size = environ["RANK"], environ["WORLD_SIZE"]
    return ConfigError(
        f"RANK={rank} and WORLD_SIZE={world_size} in the environment make this process a worker, and"
        f" nproc_per_node={nproc_per_node} starts workers: unset RANK and WORLD_SIZE to start them here, or drop"
        f" nproc_per_node to be rank {rank} (node_rank numbers a machine)"
    )


def refuse_half_a_rank(environ: Mapping[str, str], nproc_per_node: int | None, num_nodes: int) -> None:
    """Raise ResourceError where only one of RANK and WORLD_SIZE is set, and it names several processes.

    A WORLD_SIZE that agrees with `nproc_per_node` x `num_nodes` is no contradiction to that request.
    """
    rank = environ.get("RANK", "")
    if rank.isdigit() and int(rank) > 0:
        raise ResourceError(f"RANK={rank} without WORLD_SIZE: set WORLD_SIZE to the number of processes, or unset RANK")
    world_size = number(environ, "WORLD_SIZE", 1)
    if world_size in (1, (nproc_per_node or 1) * num_nodes):
        return
    beside = f" beside nproc_per_node={nproc_per_node}" if nproc_per_node else ""
    raise ResourceError(
        f"WORLD_SIZE={world_size} without RANK{beside}: {world_size} processes like this one would each train alone. Set RANK"
        f" from 0 to {world_size - 1} (an indexed Job of Kubernetes has JOB_COMPLETION_INDEX, which is read), or unset"
        " WORLD_SIZE and start with --nproc-per-node"
    )


def is_pods_number(environ: Mapping[str, str]) -> bool:
    """Return whether RANK is the number of this pod, as Kubeflow sets it for torchrun."""
    return not _is_launched(environ) and pods.numbers_pod(environ)


def is_local_rank(argument: str) -> bool:
    """Return whether it is the `--local_rank=N` that `torch.distributed.launch` adds to a script's arguments."""
    return re.fullmatch(r"--local[-_]rank=\d+", argument) is not None


def number(environ: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return the whole number under `name`, or `default` where it is empty or missing. Raises ResourceError for other text."""
    text = environ.get(name, "")
    if text == "" and default is not None:
        return default
    try:
        return int(text)
    except ValueError:
        raise ResourceError(
            f"{name}={text!r} is not a whole number: the launcher that set it is broken, or unset it"
        ) from None
