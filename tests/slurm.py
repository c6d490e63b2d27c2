"""A SLURM of the machines of a test: the controller on machine 0, a node on each. Only root can start it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import clean_environment, patient, poll
from tests.machines import Machines

_CONF = """\
ClusterName=tests
SlurmctldHost=node0(10.99.0.1)
SlurmUser=root
AuthType=auth/munge
CryptoType=crypto/munge
AuthInfo=socket={dir}/munge.socket
StateSaveLocation={dir}/state
SlurmdSpoolDir={dir}/%n
SlurmdPidFile={dir}/%n/slurmd.pid
SlurmctldPidFile={dir}/slurmctld.pid
SlurmctldLogFile={dir}/slurmctld.log
SlurmdLogFile={dir}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldTimeout=10
SlurmdTimeout=10
KillWait=5
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE OverTimeLimit=0 State=UP
"""


class Slurm:
    """The daemons, and commands on machine 0."""

    def __init__(self, machines: Machines, directory: Path) -> None:
        self.machines, self.directory = machines, directory
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        directory.mkdir()
        directory.chmod(0o755)
        for number in range(len(machines.homes)):
            (directory / f"node{number}").mkdir()
        (directory / "state").mkdir()
        nodes = "\n".join(
            f"NodeName=node{number} NodeAddr={address} CPUs=2 RealMemory=4000 State=UNKNOWN"
            for number, address in enumerate(machines.addresses)
        )
        self.conf = directory / "slurm.conf"
        self.conf.write_text(_CONF.format(dir=directory, nodes=nodes))
        self.env = {"SLURM_CONF": str(self.conf)}

    def start(self) -> None:
        """Start the daemons and wait until the nodes are idle."""
        self._start_munge()
        self._daemons.append(self._daemon(0, "slurmctld", "-D"))
        for number in range(len(self.machines.homes)):
            self.start_node(number)
        self.wait_for_nodes({f"node{number} idle" for number in range(len(self.machines.homes))})

    def _start_munge(self) -> None:
        key = self.directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"key-file": key, "socket": self.directory / "munge.socket", "pid-file": self.directory / "munge.pid"}
        files |= {"log-file": self.directory / "munge.log", "seed-file": self.directory / "munge.seed"}
        self._daemons.append(
            subprocess.Popen(
                ["munged", "--foreground", "--force", *(f"--{name}={file}" for name, file in files.items())],
                stderr=subprocess.DEVNULL,
            )
        )
        poll((self.directory / "munge.socket").exists, 20, lambda: "no munge")

    def _daemon(self, number: int, *command: str) -> subprocess.Popen[bytes]:
        env = self._environ()
        with open(self.directory / f"{command[0]}-{number}.out", "wb") as out:
            return subprocess.Popen([*self.machines.on(number), *command], env=env, stdout=out, stderr=out)

    def _environ(self) -> dict[str, str]:
        """Return an environment in which `python` is the one of the tests."""
        return clean_environment(**self.env, PATH=f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin")

    def start_node(self, number: int) -> None:
        """Start the daemon of a node."""
        self._nodes[number] = self._daemon(number, "slurmd", "-D", "-N", f"node{number}")

    def kill_node(self, number: int) -> None:
        """Kill the daemon of a node and every process of its jobs, as a power failure does."""
        daemon = self._nodes.pop(number)
        daemon.kill()
        daemon.wait()
        for stat in Path("/proc").glob("[0-9]*/environ"):
            try:
                environ = stat.read_bytes()
            except OSError:
                continue
            if f"SLURM_CONF={self.conf}".encode() in environ and f"SLURMD_NODENAME=node{number}".encode() in environ:
                os.kill(int(stat.parent.name), signal.SIGKILL)

    def run(self, *command: str) -> str:
        """Run a command on machine 0 and return its output."""
        done = subprocess.run([*self.machines.on(0), *command], env=self._environ(), capture_output=True, text=True)
        return (done.stdout + done.stderr).strip()

    def wait_for(self, number: str, *states: str, seconds: float) -> str:
        """Wait until a job is in one of `states` and return that state."""

        def state() -> str | None:
            found = [
                line.split("=", 1)[1].split()[0]
                for line in self.run("scontrol", "show", "job", number).splitlines()
                if "JobState=" in line
            ]
            return found[0] if found and found[0] in states else None

        return str(poll(state, patient(seconds), lambda: self.run("scontrol", "show", "job", number) + self._logs()))

    def wait_for_nodes(self, states: set[str], seconds: float = 60) -> None:
        """Wait until `sinfo` shows every node in one of `states`, such as "node0 idle"."""
        poll(
            lambda: set(self.run("sinfo", "--Node", "--noheader", "--format=%N %t").splitlines()) == states,
            seconds,
            lambda: self.run("sinfo", "--Node", "--long"),
        )

    def _logs(self) -> str:
        return "\n".join(file.read_text(errors="replace")[-3000:] for file in sorted(self.directory.glob("*.log")))

    def close(self) -> None:
        """End the jobs and the daemons."""
        self.run("scancel", "--user=root", "--signal=KILL", "--full")
        self.run("scancel", "--user=root")
        deadline = time.monotonic() + 10
        while self.run("squeue", "--noheader", "--states=running,completing") and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in (*self._nodes.values(), *reversed(self._daemons)):
            daemon.terminate()
        for daemon in (*self._nodes.values(), *self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def needs_slurm() -> None:
    """Skip the test without SLURM, or fail it if REQUIRE_SLURM is set."""
    if all(map(shutil.which, ("slurmctld", "slurmd", "munged", "sbatch"))):
        return
    (pytest.fail if os.environ.get("REQUIRE_SLURM") else pytest.skip)("there is no SLURM: install slurm-wlm and munge")
