"""The script that `distributed doctor --num-nodes N` runs, with one process on each node. It measures the links between nodes.

The argument is the file into which each process writes the findings of all processes.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed.config.cores import num_cores
from distributed.config.registry import REGISTRY, versions_of
from distributed.launching.listening import is_loopback, reachable_address
from distributed.launching.nodes import interface_of

_PINGS = 20
_FIRST_BYTES, _LAST_BYTES = 1 << 16, 1 << 26  # of one all-reduce
_ENOUGH_S = 0.2  # an all-reduce that takes longer needs no larger tensor
_LIBRARIES = dict.fromkeys((
    "distributed-trainer", "numpy", "safetensors", *(name for entry in REGISTRY.values() for name in entry.requires),
))  # fmt: skip


def main() -> None:
    """Measure, and write the findings of all nodes to the file."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    facts = _gathered(_facts())
    on_gpu = all(fact["gpus"] for fact in facts)
    clocks = _clock_offsets(rank, world_size)
    pairs = _bandwidths(rank, world_size, "cuda" if on_gpu else "cpu")
    joined = {key: value for each in _gathered(pairs) for key, value in each.items()}
    Path(sys.argv[1]).write_text(json.dumps({"facts": facts, "clocks": clocks, "pairs": joined}))
    dist.barrier()
    dist.destroy_process_group()


def _gathered(value: Any) -> list[Any]:
    """Return the values of all ranks. They travel as JSON: torch's `all_gather_object` would unpickle what others send."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)]))
    longest = int(max(size.item() for size in sizes))
    texts = [torch.zeros(longest, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(texts, torch.cat([mine, mine.new_zeros(longest - len(mine))]))
    return [json.loads(bytes(text[: int(size.item())].tolist())) for text, size in zip(texts, sizes, strict=True)]


def _facts() -> dict[str, Any]:
    """Return what should be the same on all nodes, and what tells the nodes apart."""
    versions = {"python": platform.python_version()}
    versions |= versions_of(_LIBRARIES)
    if torch.cuda.is_available():
        versions["CUDA of torch"] = str(torch.version.cuda)
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    address = _own_address()
    interface = os.environ.get("GLOO_SOCKET_IFNAME") or interface_of(address)
    return {
        "name": socket.gethostname(), "address": address, "interface": interface, "cores": num_cores(), "gpus": gpus,
        "versions": versions,
    }  # fmt: skip


def _own_address() -> str:
    """Return the address at which the other nodes reach this one.

    On node 0, the name of the host may lead to a loopback address, so the node takes the route to another one.
    """
    mine = reachable_address(os.environ["MASTER_ADDR"])
    others = [other for other in _gathered(mine) if not is_loopback(other)]
    return reachable_address(others[0]) if is_loopback(mine) and others else mine


def _clock_offsets(rank: int, world_size: int) -> list[float]:
    """Return for each rank the seconds by which its clock is ahead of that of rank 0, as in NTP (RFC 5905, section 8).

    The answer of the shortest round trip counts.
    """
    offsets = torch.zeros(world_size, dtype=torch.float64)
    stamp = torch.zeros(1, dtype=torch.float64)
    for other in range(1, world_size):
        best = float("inf")
        for _ in range(_PINGS):
            if rank == 0:
                sent = time.time()
                dist.send(stamp, other)
                dist.recv(stamp, other)
                back = time.time()
                if back - sent < best:
                    best = back - sent
                    offsets[other] = stamp.item() - (sent + back) / 2
            elif rank == other:
                dist.recv(stamp, 0)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), 0)
    dist.broadcast(offsets, 0)
    return list(offsets.tolist())


def _bandwidths(rank: int, world_size: int, device: str) -> dict[str, list[float]]:
    """Return "a-b" -> [bytes per second of an all-reduce, seconds of a small one] for the pairs whose lower rank is this one.

    Pairs that have no rank in common measure at the same time.
    """
    found = {}
    for pairs in _rounds(world_size):
        groups = {pair: dist.new_group(list(pair), backend="nccl" if device == "cuda" else "gloo") for pair in pairs}
        mine = next((pair for pair in pairs if rank in pair), None)
        if mine is not None:
            rates = _measure(groups[mine], device)
            if rank == mine[0]:
                found[f"{mine[0]}-{mine[1]}"] = rates
        dist.barrier()
    return found


def _rounds(count: int) -> list[list[tuple[int, int]]]:
    """Return rounds of pairs in which each of `count` ranks meets each other rank once: the circle method for tournaments."""
    ranks = list(range(count + count % 2))  # with an odd count, the last one is a rank that does not exist
    rounds = []
    for _ in range(len(ranks) - 1):
        pairs = [sorted(pair) for pair in zip(ranks[: len(ranks) // 2], reversed(ranks), strict=False)]
        rounds.append(sorted((a, b) for a, b in pairs if b < count))
        ranks = [ranks[0], ranks[-1], *ranks[1:-1]]
    return rounds


def _measure(group: Any, device: str) -> list[float]:
    """Return [bytes per second of an all-reduce in `group`, seconds of an all-reduce of four bytes]."""
    small = statistics.median(_seconds(1, group, device) for _ in range(5))
    size = _FIRST_BYTES
    _seconds(size // 4, group, device)
    while True:
        took = torch.tensor(min(_seconds(size // 4, group, device) for _ in range(2)), device=device)
        dist.all_reduce(took, dist.ReduceOp.MAX, group)  # both ranks must take the same next step
        if took.item() > _ENOUGH_S or size >= _LAST_BYTES:
            return [size / took.item(), small]
        size *= 4


def _seconds(count: int, group: Any, device: str) -> float:
    tensor = torch.ones(count, device=device)
    dist.barrier(group)
    begin = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    if not bool(tensor.eq(2).all()):
        raise RuntimeError("an all-reduce of two nodes gave a wrong sum")
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
