"""Measure how long the nodes of a run take to join each other, and to join again for the next attempt.

python benchmarks/rendezvous.py [--nodes 2,16,50,100,200] [--rounds 5] [--to 1000]

The server of node 0 and the links of all nodes run without workers, over the loopback interface. In the first row each node is a
process of its own. In the others all of them share one process and its interpreter. The last row is not measured: it continues the fit
of a + b n + c n^2 to the measured numbers of nodes, because every node is told of every node.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

import machine
from distributed.launching.listening import listen_at
from distributed.launching.node_link import NodeLink
from distributed.launching.node_server import NodeServer

_SECRET = "0123456789abcdef"
_OF_GOAL, _LIMIT_S = 16, 2.0  # so many nodes, each in a process, are to join so soon after the last one is ready
COLUMNS = ["nodes", "join s", "join again s", "CPU ms of all nodes", "KB to each node"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", default="2,16,50,100,200", help="numbers of nodes (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument(
        "--to",
        type=int,
        default=1000,
        help="the number of nodes for which the times are estimated (default: %(default)s)",
    )
    asked = parser.parse_args()
    counts = [int(text) for text in asked.nodes.split(",")]
    alone = statistics.median(measure_processes(_OF_GOAL) for _ in range(asked.rounds))
    found = {
        count: [statistics.median(each) for each in zip(*(measure(count) for _ in range(asked.rounds)), strict=True)]
        for count in counts
    }
    rows = [COLUMNS, [f"{_OF_GOAL} processes", f"{alone:.3f}", "", "", ""]]
    rows += [[str(count), *_cells(values)] for count, values in found.items()]
    if len(counts) >= 3 and asked.to > max(counts):
        rows.append([f"{asked.to} (estimated)", *_cells([estimate(found, column, asked.to) for column in range(4)])])
    print(f"{machine.table(rows)}\n\n{asked.rounds} rounds, medians\n{machine.describe()}")
    return 0 if alone <= _LIMIT_S else 1


def _cells(values: list[float]) -> list[str]:
    return [f"{values[0]:.3f}", f"{values[1]:.3f}", f"{values[2]:.0f}", f"{values[3]:.1f}"]


def estimate(found: dict[int, list[float]], column: int, count: int) -> float:
    """Return a column for `count` nodes from a fit of a + b n + c n^2 with coefficients that are not negative."""
    counts = np.array(list(found), float)
    wanted = np.array([values[column] for values in found.values()])
    best = (float("inf"), np.zeros(3))
    for kept in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        powers = np.stack([counts**power for power in kept], 1)
        factors, *_ = np.linalg.lstsq(powers, wanted, rcond=None)
        error = float(np.square(powers @ factors - wanted).sum())
        if (factors >= 0).all() and error < best[0]:
            all_factors = np.zeros(3)
            all_factors[kept] = factors
            best = (error, all_factors)
    return float(best[1] @ np.array([1.0, count, count**2]))


def abouts_of(count: int) -> list[dict[str, Any]]:
    """Return what the launchers say of themselves, as in a run."""
    same = {
        "num_nodes": count, "min_nodes": count, "nproc_per_node": 8, "backend": "pytorch-ddp", "script": "train.py", "digest": "0" * 16,
        "torch": "2.13.0", "distributed-trainer": "0.1.0",
    }  # fmt: skip
    return [
        {"name": f"node{rank:04d}", "listens_at": "127.0.1.1", "address": f"10.0.{rank // 256}.{rank % 256}", "same": same}
        for rank in range(count)
    ]  # fmt: skip


def measure_processes(count: int) -> float:
    """Return the seconds from the time at which the last node is ready to the start of the round on all nodes, each in a process."""
    context = multiprocessing.get_context("fork")
    abouts, bound = abouts_of(count), listen_at("127.0.0.1", 0)
    ready, times = context.Barrier(count), context.SimpleQueue()

    def join(rank: int, own: socket.socket | None = None) -> None:
        where = bound.getsockname()[:2]
        link = NodeLink(where, _SECRET, rank, abouts[rank], node_timeout=300, on_event=lambda event: None, own=own)
        ready.wait()
        begin = time.monotonic()
        link.connect(60)
        link.join("offer", lambda: False)
        times.put((begin, time.monotonic()))
        link.finish("has finished", 1, waits=True)
        link.close()

    children = [context.Process(target=join, args=(rank,)) for rank in range(1, count)]
    for child in children:
        child.start()
    server = _server(bound, abouts)
    join(0, server.start())
    for child in children:
        child.join()
    server.close(10)
    begins, ends = zip(*(times.get() for _ in range(count)), strict=True)
    return float(max(ends) - max(begins))


def _server(bound: socket.socket, abouts: list[dict[str, Any]]) -> NodeServer:
    return NodeServer(
        bound, _SECRET, abouts[0], {"run_dir": "runs/a"}, start_timeout=300, node_timeout=300, on_event=lambda event: None,
        record=lambda event, **_: None,
    )  # fmt: skip


def measure(count: int) -> tuple[float, float, float, float]:
    """Return (seconds to join, seconds to join again, milliseconds of CPU for both, kilobytes that a node is sent for a round)."""
    abouts, bound = abouts_of(count), listen_at("127.0.0.1", 0)
    where = bound.getsockname()[:2]
    quiet = lambda event: None  # noqa: E731
    server = _server(bound, abouts)
    own = server.start()
    links = [
        NodeLink(where, _SECRET, rank, abouts[rank], node_timeout=300, on_event=quiet, own=own if rank == 0 else None)
        for rank in range(count)
    ]
    try:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda link: link.connect(60), links[:-1]))  # the others wait for the last one
            cpu = time.process_time()
            first = [pool.submit(link.join, "offer", lambda: False) for link in links[:-1]]
            begin = time.perf_counter()
            links[-1].connect(60)
            last = pool.submit(links[-1].join, "offer", lambda: False)
            rounds = [each.result(120) for each in (*first, last)]
            joined = time.perf_counter() - begin
            begin = time.perf_counter()
            again = [pool.submit(links[-1].join, "offer", lambda: False)]
            told = threading.Event()
            for link in links[:-1]:
                while not link.is_round_wanted and not told.wait(0.001):
                    pass
                again.append(pool.submit(link.join, "offer", lambda: False))
            for each in again:
                each.result(120)
            rejoined = time.perf_counter() - begin
            cpu = time.process_time() - cpu
        size = sum(len(str(node)) for node in rounds[0].nodes) if rounds[0] is not None else 0
    finally:
        for link in reversed(links):
            link.close()
        server.close(10)
    return joined, rejoined, cpu * 1e3, size / 1e3


if __name__ == "__main__":
    sys.exit(main())
