"""Two nodes in network namespaces of their own, where each host name is loopback, as Debian's installer writes it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import distributed
from distributed.launching.request import LaunchRequest
from tests.conftest import poll

LAUNCH = str(Path(distributed.__file__).parent / "launching" / "main.py")
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
print("total", total.item(), os.environ["GLOO_SOCKET_IFNAME"])
"""
HOSTS = (
    "127.0.0.1 localhost\n127.0.1.1 node0\n10.99.0.2 node1\n",
    "127.0.0.1 localhost\n127.0.1.1 node1\n10.99.0.1 node0\n",
)


def _network(pids: list[int]) -> list[str]:
    """The commands that join the namespaces of two processes by a pair of interfaces."""
    pair = f"ip link add to-node1 netns {pids[0]} type veth peer name to-node0 netns {pids[1]}"
    rest = [
        f"nsenter --target {pid} --net ip {what}"
        for pid, name, address in zip(pids, ("to-node1", "to-node0"), ("10.99.0.1", "10.99.0.2"), strict=True)
        for what in (f"addr add {address}/24 dev {name}", f"link set {name} up", "link set lo up")
    ]
    return [pair, *rest]


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[list[list[str]]]:
    """For each of two machines, the command that runs another one on it. Their namespaces end with the processes that hold them."""
    if os.getuid() != 0 or not all(map(shutil.which, ("ip", "unshare", "nsenter"))):
        pytest.skip("only root can make network namespaces, with ip, unshare and nsenter")
    holders = []
    try:
        for number, hosts in enumerate(HOSTS):
            file = tmp_path / f"hosts-{number}"
            file.write_text(hosts)
            order = f"hostname node{number} && mount --bind {file} /etc/hosts && touch {tmp_path}/up-{number} && exec sleep 300"
            holders.append(subprocess.Popen(["unshare", "--net", "--mount", "--uts", "sh", "-c", order]))
        poll(
            lambda: all((tmp_path / f"up-{number}").exists() or holders[number].poll() for number in (0, 1)), 30,
            lambda: "no namespaces",
        )  # fmt: skip
        commands = _network([holder.pid for holder in holders])
        if any(holder.poll() for holder in holders) or any(
            subprocess.run(each.split()).returncode for each in commands
        ):
            pytest.skip("this machine lets nobody make network namespaces")
        yield [["nsenter", "--target", str(holder.pid), "--net", "--mount", "--uts"] for holder in holders]
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()


def test_machines_whose_own_names_are_loopback_reach_each_other(
    machines: list[list[str]], start: Callable[..., object], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    nodes = []
    for rank, machine in enumerate(machines):
        request = LaunchRequest(
            str(tmp_path / "run"), script=str(script), num_nodes=2, node_rank=rank, master_addr="node0",
            master_port=29777, start_timeout=60.0, max_restarts=0, preload=(),
        )  # fmt: skip
        file = tmp_path / f"node-{rank}.json"
        file.write_text(request.to_json())
        nodes.append(start([*machine, sys.executable, LAUNCH, file, os.getpid()], cwd=tmp_path))

    ended = [node.finish(120) for node in nodes]

    assert [each.returncode for each in ended] == [0, 0], ended[0].output + ended[1].output
    logs = [(tmp_path / "run" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 1)]
    assert [log.splitlines()[-1].partition("] ")[2] for log in logs] == ["total 2.0 to-node1", "total 2.0 to-node0"]
