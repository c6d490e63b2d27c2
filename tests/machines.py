"""Machines for tests of several nodes: network namespaces joined by a bridge. Only root can make them.

Each machine has a host name, /etc/hosts, an address and a directory of its own. The host name resolves to loopback, as Debian's
installer writes it, unless `are_names_loopback` is false.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.conftest import poll


class Machines:
    """`count` machines. The fixture `make_machines` makes and closes them."""

    def __init__(self, directory: Path, count: int, *, are_names_loopback: bool = True) -> None:
        self._directory, self._holders = directory, []
        self.homes = [directory / f"home-{number}" for number in range(count)]
        self.addresses = [f"10.99.0.{number + 1}" for number in range(count)]
        for number in range(count):
            self.homes[number].mkdir()
            names = "".join(f"{self.addresses[other]} node{other}\n" for other in range(count) if other != number)
            file = directory / f"hosts-{number}"
            own = "127.0.1.1" if are_names_loopback else self.addresses[number]
            file.write_text(f"127.0.0.1 localhost\n{own} node{number}\n{names}")
            self._hold(f"hostname node{number} && mount --bind {file} /etc/hosts", f"up-{number}")
        self._hold("true", "up-switch")
        self._run(self._switch("ip link add br0 type bridge"))
        self._run(self._switch("ip link set br0 up"))
        for number, address in enumerate(self.addresses):
            holder, switch = self._holders[number].pid, self._holders[-1].pid
            self._run(f"ip link add eth0 netns {holder} type veth peer name port{number} netns {switch}")
            self._run(self._switch(f"ip link set port{number} master br0 up"))
            for what in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
                self._run([*self.on(number), "ip", *what.split()])

    def _hold(self, order: str, mark: str) -> None:
        """Start a process that holds a namespace open."""
        script = f"{order} && touch {self._directory}/{mark} && exec sleep 1000"
        holder = subprocess.Popen(["unshare", "--net", "--mount", "--uts", "sh", "-c", script])
        self._holders.append(holder)
        poll(lambda: (self._directory / mark).exists() or holder.poll(), 30, lambda: "no namespace")
        if holder.poll():
            (pytest.fail if os.environ.get("REQUIRE_MACHINES") else pytest.skip)(
                "this machine lets nobody make network namespaces"
            )

    def _switch(self, what: str) -> list[str]:
        return ["nsenter", "--target", str(self._holders[-1].pid), "--net", *what.split()]

    @staticmethod
    def _run(argv: list[str] | str) -> str:
        done = subprocess.run(argv.split() if isinstance(argv, str) else argv, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def on(self, number: int) -> list[str]:
        """Return the beginning of a command that runs on a machine, in its own directory."""
        target = ["nsenter", "--target", str(self._holders[number].pid), "--net", "--mount", "--uts"]
        return [*target, f"--wd={self.homes[number]}"]

    def write_hosts(self, number: int, text: str) -> None:
        """Set the names that a machine knows. The file, which is mounted there, is never empty meanwhile."""
        with (self._directory / f"hosts-{number}").open("r+") as file:
            if file.read() != text:
                os.pwrite(file.fileno(), text.encode(), 0)
                os.ftruncate(file.fileno(), len(text))

    def add_network(self, number: int) -> None:
        """Give a machine an interface that leads to no other machine, and make its host name resolve to the address there."""
        own = f"10.98.{number}.1"
        for what in ("link add eth9 type bridge", f"addr add {own}/24 dev eth9", "link set eth9 up"):
            self._run([*self.on(number), "ip", *what.split()])
        hosts = (self._directory / f"hosts-{number}").read_text()
        self.write_hosts(number, re.sub(rf"^\S+ node{number}$", f"{own} node{number}", hosts, flags=re.M))

    def ssh(self) -> Path:
        """Return a directory with a command `ssh` that enters a machine by its name. Put it first in the PATH of a launcher that
        starts processes on other machines."""
        entries = "\n".join(
            f'node{number}) exec {shlex.join(self.on(number))} bash -c "$*" ;;' for number in range(len(self.homes))
        )
        directory = self._directory / "ssh"
        directory.mkdir(exist_ok=True)
        command = directory / "ssh"
        command.write_text(
            "#!/bin/bash\nhost=\nwhile [[ $1 == -* || -z $host ]]; do\n"  # options may stand before and after the host
            "    if [[ $1 != -* ]]; then host=$1; elif [[ $1 == -[opil] ]]; then shift; fi\n    shift\ndone\n"
            f'case $host in\n{entries}\nesac\necho "no machine $host" >&2; exit 255\n'
        )
        command.chmod(0o755)
        return directory

    def link(self, number: int, state: str) -> None:
        """Set the link of a machine "up" or "down", at the switch: the machine itself notices nothing."""
        self._run(self._switch(f"ip link set port{number} {state}"))

    def lose(self, number: int, percent: int) -> None:
        """Drop a share of the packets that a machine sends, at random."""
        for rule in (
            "add table inet t",
            "add chain inet t o { type filter hook output priority 0 ; }",
            f"add rule inet t o oif eth0 numgen random mod 100 < {percent} counter drop",
        ):
            self._run([*self.on(number), "nft", rule])

    def num_lost(self, number: int) -> int:
        """Return how many packets `lose` has dropped on a machine."""
        (packets,) = re.findall(
            r"counter packets (\d+) ", self._run([*self.on(number), "nft", "list", "table", "inet", "t"])
        )
        return int(packets)

    def limit(self, number: int, rate: str) -> None:
        """Limit what a machine sends, for example to 2mbit."""
        self._run([*self.on(number), *f"tc qdisc add dev eth0 root tbf rate {rate} burst 32kbit latency 400ms".split()])

    def num_delayed(self, number: int) -> int:
        """Return how often `limit` has made a packet of a machine wait, or dropped it."""
        (times,) = re.findall(
            r"overlimits (\d+) ", self._run([*self.on(number), *["tc", "-s", "qdisc", "show", "dev", "eth0"]])
        )
        return int(times)

    def close(self) -> None:
        """End the namespaces."""
        for holder in self._holders:
            holder.kill()
            holder.wait()


def other_version(home: Path, name: str, version: str) -> dict[str, str]:
    """Return the environment of a machine on which another version of a distribution is installed."""
    info = home / "other" / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return {"PYTHONPATH": str(home / "other")}
